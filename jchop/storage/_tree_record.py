"""A record of the dicts and lists of a saved tree, and their reconstruction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jchop.storage._files.json import json_object, short_text
from jchop.storage._files.safetensors import TensorFile

#: The metadata key of the record: JSON, which maps the name of each array to the steps to it in the tree. A string is a
#: key of a dict, an integer the index in a list, a list of one integer an integer key.
TREE_KEY = "jchop.tree"
#: The most steps to an array.
_MOST_TREE_STEPS = 200

TreeStep = str | int | list[int]


def tree_metadata(paths: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """The metadata that record a tree: empty if it does not consist of dicts and lists of arrays.

    Args:
        paths: JAX's path of each array, by name.
    """
    steps = {name: [_tree_step(key) for key in path] for name, path in paths.items()}
    try:
        nest_leaves([(path, None) for path in steps.values()])
    except ValueError:  # a list with entries without arrays, or a key that is neither a string nor an integer
        return {}
    return {TREE_KEY: json.dumps(steps, separators=(",", ":"))} if steps else {}


def tree_paths_in(file: TensorFile, names: Iterable[str]) -> dict[str, list[TreeStep]]:
    """The recorded steps to each array of a file.

    Raises:
        ValueError: if the file has no record, or one that is damaged or does not match `names`.
    """
    names = set(names)
    if TREE_KEY not in file.metadata and names:
        raise ValueError(
            f"{file.path} has no record of dicts and lists, which save_safetensors writes: omit nested to get the "
            "arrays by name, or pass like="
        )
    try:
        record = json_object(file.metadata.get(TREE_KEY, "{}"))
        if set(record) != names:
            raise ValueError(f"it is of other arrays: {short_text(sorted(set(record) ^ names))}")
        for name, path in record.items():
            if not isinstance(path, list) or ".".join(map(_tree_step_text, path)) != name:
                raise ValueError(f"{short_text(path)} does not lead to {short_text(name)}")
        nest_leaves([(path, None) for path in record.values()])
    except ValueError as error:
        raise ValueError(f"{file.path}: bad metadata {TREE_KEY!r} ({error})") from None
    return record


def nest_leaves(leaves: Sequence[tuple[Sequence[TreeStep], Any]], depth: int = 0) -> Any:
    """The dicts and lists of leaves, from the steps to each leaf.

    Raises:
        ValueError: for contradictory steps, a missing entry of a list, or too many steps.
    """
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    if depth == _MOST_TREE_STEPS:
        raise ValueError(f"more than {_MOST_TREE_STEPS} steps")
    groups: dict[tuple[type, Any], list[tuple[Sequence[TreeStep], Any]]] = {}
    for path, leaf in leaves:
        if len(path) == depth:
            raise ValueError(f"{short_text(path)} leads to an array and to a container")
        _tree_step_text(step := path[depth])
        groups.setdefault((type(step), step[0] if isinstance(step, list) else step), []).append((path, leaf))
    children = {key: nest_leaves(group, depth + 1) for key, group in groups.items()}
    if all(kind is not int for kind, _ in children):
        return {key: value for (_, key), value in children.items()}
    if set(children) != {(int, index) for index in range(len(children))}:
        raise ValueError(f"a list has the entries {short_text([key for _, key in children])}")
    return [children[int, index] for index in range(len(children))]


def _tree_step(key: Any) -> Any:
    """A step of a JAX path in the form of the record; None if it cannot be recorded."""
    match key:
        case SequenceKey(idx=int(index)) | FlattenedIndexKey(key=int(index)):
            return index
        case DictKey(key=str(text)) | GetAttrKey(name=str(text)):
            return text
        case DictKey(key=int(number)) if not isinstance(number, bool):
            return [number]
    return None


def _tree_step_text(step: Any) -> str:
    """The text of a step in a name.

    Raises:
        ValueError: if it is not a step.
    """
    number = step[0] if isinstance(step, list) and len(step) == 1 else step
    if type(number) is int:
        return str(number)
    if not isinstance(step, str):
        raise ValueError(f"{short_text(step)} is not a step to an array")
    return step
