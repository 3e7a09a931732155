"""The modules of a model, each with all the paths that lead to it and the parameters that are its own; other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

Keys = tuple[Any, ...]

#: So many paths are followed; modules that refer to each other all around could have more than can be counted.
_MAX_MODULE_PATHS = 1_000_000


@dataclass
class ModuleEntry:
    """A module in a model.

    Args:
        module: the module.
        keys: of each path that leads to it, the names of attributes and the indexes. One that leads through the module
            itself is none.
        variables: its variables by their paths below it, without those of modules below.
    """

    module: nnx.Module
    keys: list[Keys] = field(default_factory=list)
    variables: dict[str, nnx.Variable] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """Its paths as text, the one of `flax.nnx.iter_modules` first."""
        return [keys_as_path(keys) for keys in self.keys]


def keys_as_path(keys: Sequence[Any]) -> str:
    """The path of a module as text."""
    return "/".join(map(str, keys))


def module_entries(model: nnx.Module) -> list[ModuleEntry]:
    """Every module of a model once, in the order of `flax.nnx.iter_modules`.

    Raises:
        ValueError: for more paths than can be followed.
    """
    entries: dict[int, ModuleEntry] = {}
    order: dict[int, ModuleEntry] = {}
    above: set[int] = set()
    count = 0

    def visit(node: Any, keys: Keys, holder: ModuleEntry | None, start: int) -> None:
        nonlocal count
        if isinstance(node, nnx.Variable):
            if holder is not None:
                holder.variables[keys_as_path(keys[start:])] = node
            return
        if id(node) in above or not nnx.graph.is_node(node):
            return
        if isinstance(node, nnx.Module):
            count += 1
            if count > _MAX_MODULE_PATHS:
                raise ValueError(
                    f"model: more than {_MAX_MODULE_PATHS} paths lead to its modules, which refer to each other"
                )
            holder, start = entries.setdefault(id(node), ModuleEntry(node)), len(keys)
            holder.keys.append(keys)
        above.add(id(node))
        for key, child in _node_children(node).items():
            visit(child, (*keys, key), holder, start)
        above.remove(id(node))
        if isinstance(node, nnx.Module):
            order.setdefault(id(node), entries[id(node)])

    visit(model, (), None, 0)
    return [*order.values()]


def node_at(model: Any, path: Keys) -> Any:
    """The module, variable or container at a path."""
    node = model
    for key in path:
        node = _node_children(node)[key]
    return node


def replace_nodes(model: Any, replacements: Mapping[int, Any]) -> Any:
    """A model with other variables or modules, in place, in all that hold those with the ids of `replacements`."""
    nodes = [node for _, node in nnx.iter_graph(model) if nnx.graph.is_node(node)]
    for node in nodes:
        if isinstance(node, nnx.Variable):
            continue
        for key, child in _node_children(node).items():
            if id(child) not in replacements:
                continue
            if isinstance(key, str) and hasattr(node, key):
                setattr(node, key, replacements[id(child)])
            else:
                node[key] = replacements[id(child)]
    return replacements.get(id(model), model)


def _node_children(node: Any) -> dict[Any, Any]:
    return dict(nnx.graph.get_node_impl(node).node_dict(node))  # type: ignore[union-attr]
