"""`LoraRule`: which layers get adapters of low rank; the adapters that they begin with, and files of PEFT."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.checks import check, check_choice, check_float, check_int, short_repr
from jchop._common.files import atomic_file, exclusive_folder, json_object, open_regular_file, short_text
from jchop._common.paths import check_path_pattern
from jchop._quantized.products.rule import rule_of_entry
from jchop._quantized.products.rule_sources import fields_of_qwix
from jchop._storage import load, save

#: The first values of adapters: the name, and whether they need the weights before they were packed.
LORA_INITS: Final = {"zeros": False, "loftq": True, "pissa": True}


@dataclass(frozen=True)
class LoraRule:
    """Adapters for the layers whose path matches: y = base(x) + (alpha / rank) x A B (Hu et al., arXiv 2106.09685).

    Args:
        path: a pattern of paths ([](patterns.md)), as in `Rule`. Default ``"*"``: all layers.
        rank: the number of columns of A and rows of B.
        alpha: the numerator of the factor. Default: `rank`, so that the factor is 1.
        dropout: the rate of dropout of x on its way to A, from 0 up to 1. Default 0.
        init: ``"zeros"`` (default): A is random and B zero, so the first output equals the base's. ``"loftq"``: A B is
            the best approximation of this rank of the error of the packed weight (Li et al., arXiv 2310.08659, one
            step). ``"pissa"``: A B approximates the weight itself, and the base is the rest, packed again (Meng et al.,
            arXiv 2404.02948).

    Raises:
        TypeError, ValueError: for a field out of range.

    Example:
        >>> import jchop as jc
        >>> jc.nn.LoraRule("mlp", rank=8, alpha=16).factor
        2.0
    """

    path: str = "*"
    rank: int = field(kw_only=True)
    alpha: float | None = None
    dropout: float = 0.0
    init: str = "zeros"

    def __post_init__(self) -> None:
        check_path_pattern("path", self.path)
        check_int("rank", self.rank, 1)
        check_choice("init", self.init, tuple(LORA_INITS))
        check_float("alpha", 1.0 if self.alpha is None else self.alpha, 0, ends="(]")
        check_float("dropout", self.dropout, 0, 1, "[)")

    @classmethod
    def from_qwix(cls, rules: Any) -> list[LoraRule]:
        """Converts rules of qwix for adapters (Tunix, MaxText); `jchop.Rule.from_qwix` reads their formats.

        Args:
            rules: a `LoraRule` of qwix, a dict with the same fields, several of them, or a dict around them.

        Raises:
            TypeError: for an argument that is no rule.
            ValueError: for a field without an equal in rules of jchop. The message names the nearest one.

        Example:
            >>> import jchop as jc
            >>> jc.nn.LoraRule.from_qwix({"module_path": ".*mlp.*", "rank": 8, "alpha": 16.0, "weight_qtype": "nf4"})
            [LoraRule(path='*mlp*', rank=8, alpha=16.0, dropout=0.0, init='zeros')]
        """
        return [cls(**fields) for fields in fields_of_qwix(rules, adapters=True)]

    @property
    def factor(self) -> float:
        """Alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


# -- adapters of any model ---------------------------------------------------------------------------------------------


#: A rule, several, or a mapping of patterns of paths, each to a rule or the fields of one.
LoraRuleLike = LoraRule | Iterable[LoraRule] | Mapping[str, Any]


def as_lora_rules(rules: LoraRuleLike) -> tuple[LoraRule, ...]:
    """Rules in any form, checked."""
    items: Any = rules
    if isinstance(items, Mapping):
        is_rule = lambda value: isinstance(value, LoraRule | Mapping)  # noqa: E731
        items = [rule_of_entry(LoraRule, key, value) if is_rule(value) else value for key, value in items.items()]
    lora_rules = tuple(items) if isinstance(items, Iterable) else (items,)
    if not lora_rules or not all(isinstance(rule, LoraRule) for rule in lora_rules):
        raise TypeError(
            f"rules={short_repr(rules)} must be a jchop.nn.LoraRule, several, or {{'*': {{'rank': 8}}}}; "
            "jc.nn.LoraRule.from_qwix(rules) reads those of qwix"
        )
    return lora_rules


def initial_adapter(
    rule: LoraRule, what: str, draw: Callable[[], Array], weight: Array, original: Any, has_codes: bool
) -> tuple[Array, Array, Array | None]:
    """A and B of a layer.

    Args:
        rule: its rule.
        what: the layer, for errors.
        draw: gives a key.
        weight: (in, out), unpacked.
        original: the weight before it was packed; None if that is not known.
        has_codes: whether it is packed.

    Returns:
        A, B, and the weight that the layer is to have beside them, None for its own.
    """
    if not LORA_INITS[rule.init]:
        a = jax.nn.initializers.he_uniform()(draw(), (weight.shape[0], rule.rank), weight.dtype)
        return a, jnp.zeros((rule.rank, weight.shape[1]), weight.dtype), None
    check(rule.rank <= min(weight.shape), f"{what}: the rank is above the sizes {list(weight.shape)} of the weight")
    if has_codes and original is None:
        raise ValueError(f"{what}: init={rule.init!r} needs original=, the model before it was packed")
    exact = np.asarray(original if has_codes else weight, np.float64)
    if exact.shape != weight.shape:
        raise ValueError(f"{what}: original has a weight of shape {list(exact.shape)}, not {list(weight.shape)}")
    is_pissa = rule.init == "pissa"
    a, b = (
        jnp.asarray(part, weight.dtype)
        for part in _low_rank_factors(exact if is_pissa else exact - np.asarray(weight), rule)
    )
    if not is_pissa:
        return a, b, None
    product = rule.factor * (np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    return a, b, jnp.asarray(exact - product, weight.dtype)


def initial_stack_adapters(
    rule: LoraRule, what: str, draw: Callable[[int], Array], weight: Array, original: Any, has_codes: bool
) -> tuple[Array, Array, Array | None]:
    """`initial_adapter` of each layer of a stack, whose axes are in front; `draw` gives a key for each."""
    stack_shape = weight.shape[:-2]
    parts = [
        initial_adapter(rule, what, partial(draw, i), weight[at], None if original is None else original[at], has_codes)
        for i, at in enumerate(np.ndindex(*stack_shape))
    ]
    a, b, base = (
        None if arrays[0] is None else jnp.stack(arrays).reshape(*stack_shape, *arrays[0].shape)
        for arrays in zip(*parts, strict=True)
    )
    assert a is not None and b is not None
    return a, b, base


def _low_rank_factors(matrix: np.ndarray, rule: LoraRule) -> tuple[np.ndarray, np.ndarray]:
    """A and B with factor A B the closest matrix of the rank (Eckart and Young, 1936)."""
    left, singular_values, right = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    root = np.sqrt(singular_values[: rule.rank] / rule.factor)
    return left[:, : rule.rank] * root, root[:, None] * right[: rule.rank]


def add_adapter_output(y: Array, x: Array, a: Array, b: Array, axis: Sequence[int], rule: LoraRule) -> Array:
    """Adds the output of an adapter to the result y of a layer that sums over `axis` of x."""
    sum_axes = sorted(i % x.ndim for i in axis)  # as Flax sums, in whatever order they are given
    a = a.reshape(*(x.shape[i] for i in sum_axes), a.shape[-1])
    projection = jnp.tensordot(x, a, (sum_axes, list(range(len(sum_axes)))))
    return y + (projection @ b * rule.factor).reshape(y.shape).astype(y.dtype)


def merge_lora_weight(weight: Array, a: Array, b: Array, rule: LoraRule) -> Array:
    """W + factor A B, in the shape and dtype of W."""
    product = jnp.matmul(a, b, precision="highest").reshape(weight.shape)
    return (weight + rule.factor * product).astype(weight.dtype)


# -- files of PEFT -----------------------------------------------------------------------------------------------------

_PEFT_TENSORS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"

_PEFT_PREFIX, _LORA_A_SUFFIX, _LORA_B_SUFFIX = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

#: The longest configuration, in bytes.
_MAX_PEFT_CONFIG_BYTES = 1 << 20

#: Fields that are read, and fields that leave the result as it is; all others must be off.
_PEFT_FIELDS = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "use_rslora", "init_lora_weights",
)  # fmt: skip

_PEFT_NEUTRAL_FIELDS = (
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size", "megatron_config",
    "megatron_core", "runtime_config",
)  # fmt: skip

#: The first values of adapters that leave the weights of the base as they are.
_PEFT_PLAIN_INITS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")

_PEFT_MERGE_ADVICE = "merge the adapters in PEFT (merge_and_unload), and load the weights"

#: Syntax that makes a regular expression match in several ways; escapes and sets of characters are read over.
_REGEX_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[:=!]?)?|\)[*+{]?|[|?*+{]", re.DOTALL)

#: The most steps of all patterns of a file.
_MAX_MATCH_STEPS = 1 << 27


def write_adapters(folder: str | os.PathLike[str], adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the adapters that `split_lora` gives, by path."""
    tensors: dict[str, Any] = {}
    rules: dict[str, LoraRule] = {}
    for path, adapter in adapters.items():
        if adapter["lora_a"].ndim != 2:
            raise ValueError(
                f"the adapter of {path!r} is one of a stack, {list(adapter['lora_a'].shape)}, which a file of PEFT has "
                "not; save split_lora(model)[1] with jchop.save"
            )
        name = path.replace("/", ".")
        tensors |= {
            f"{_PEFT_PREFIX}{name}{_LORA_A_SUFFIX}": adapter["lora_a"].T,
            f"{_PEFT_PREFIX}{name}{_LORA_B_SUFFIX}": adapter["lora_b"].T,
        }
        rules[name] = adapter["rule"]
    rates = {rule.dropout for rule in rules.values()}
    check(len(rates) <= 1, f"the adapters have dropout of {sorted(rates)}, and a file of PEFT has one rate")
    rank = Counter(rule.rank for rule in rules.values()).most_common(1)[0][0]
    alphas = {name: float(rule.rank if rule.alpha is None else rule.alpha) for name, rule in rules.items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    config = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "bias": "none"}
    config |= {"r": rank, "lora_alpha": alpha, "lora_dropout": rates.pop(), "target_modules": sorted(rules)}
    pattern = {name: f"^{re.escape(name)}" for name in rules}  # a name alone is a pattern of the ends of paths, too
    config["rank_pattern"] = {pattern[name]: rule.rank for name, rule in rules.items() if rule.rank != rank}
    config["alpha_pattern"] = {pattern[name]: value for name, value in alphas.items() if value != alpha}
    text = json.dumps(config, indent=2) + "\n"
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lock = exclusive_folder(target) if jax.process_count() == 1 else nullcontext()  # several processes write one file
    with lock, atomic_file(target / _PEFT_CONFIG) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())  # both files are whole before one of them has its name
        save(target / _PEFT_TENSORS, tensors, metadata={"format": "pt"})


def read_adapters(
    folder: str | os.PathLike[str], paths: Collection[str], shape_of: Callable[[str], tuple[int, ...]]
) -> dict[str, tuple[Array, Array, LoraRule]]:
    """A, B and the rule of each adapter in a folder, by the path of its layer.

    Args:
        folder: of `save_lora` or PEFT.
        paths: of the layers that may have one.
        shape_of: the shape of the weight of a layer, of axes of inputs and then of outputs.
    """
    source = Path(folder)
    config, tensors = _read_peft_config(source / _PEFT_CONFIG), load(source / _PEFT_TENSORS)
    path_by_name = {path.replace("/", "."): path for path in paths}
    arrays = {}
    for name in sorted(
        {name.removeprefix(_PEFT_PREFIX).removesuffix(_LORA_A_SUFFIX).removesuffix(_LORA_B_SUFFIX) for name in tensors}
    ):
        a, b = (tensors.get(f"{_PEFT_PREFIX}{name}{suffix}") for suffix in (_LORA_A_SUFFIX, _LORA_B_SUFFIX))
        if a is None or b is None or name not in path_by_name:
            raise ValueError(
                f"{source / _PEFT_TENSORS}: {short_text(name)} has no A and B, or is no linear layer of the model"
            )
        arrays[name] = jnp.asarray(a).T, jnp.asarray(b).T
        _check_adapter_shapes(source, name, shape_of(path_by_name[name]), *arrays[name])
    try:
        return {path_by_name[name]: (*arrays[name], rule) for name, rule in _peft_rules(config, arrays).items()}
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{source / _PEFT_CONFIG}: {error}") from None


def _check_adapter_shapes(source: Path, name: str, shape: tuple[int, ...], a: Any, b: Any) -> None:
    sides = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) not in sides:
        raise ValueError(
            f"{source / _PEFT_TENSORS}: A and B of {short_text(name)} have shapes {list(a.shape)} and {list(b.shape)} "
            f"(transposed), and its weight {list(shape)}"
        )


def _peft_rules(config: dict[str, Any], adapters: Mapping[str, tuple[Array, Array]]) -> dict[str, LoraRule]:
    """The rules of adapters by name; fields that a configuration has not are as PEFT has them."""
    ranks, alphas = (
        _values_by_pattern(field, config.get(field) or {}, config.get(default_field, 8), list(adapters))
        for field, default_field in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    rules = {}
    for (name, (a, _)), rank, alpha in zip(adapters.items(), ranks, alphas, strict=True):
        if rank != a.shape[1]:
            raise ValueError(f"the rank of {short_text(name)} is {short_text(rank)}, and A of it has {a.shape[1]}")
        check(alpha is not None, f"alpha of {short_text(name)} is null, and must be a number")
        if config.get("use_rslora"):
            alpha = alpha * math.sqrt(rank)
        rules[name] = LoraRule(name or "*", rank=rank, alpha=alpha, dropout=config.get("lora_dropout") or 0.0)
    return rules


def _values_by_pattern(field: str, patterns: Any, default: Any, names: Sequence[str]) -> list[Any]:
    """The value of the first pattern that matches each name, as PEFT matches them; `default` if none does."""
    check(isinstance(patterns, dict), f"{field}={short_text(patterns)} is no object")
    longest, steps, regexes = max(map(len, names), default=0), 0, []
    for pattern, pattern_value in patterns.items():
        steps += len(names) * (16 + _max_match_ways(pattern, longest)) + 64 * (256 + len(pattern))
        if steps > _MAX_MATCH_STEPS:
            raise ValueError(f"{field} takes too long to match, at {short_text(pattern)}: use whole paths as keys")
        try:
            regexes.append((re.compile(rf"(.*\.)?({pattern})$"), pattern_value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{field} has the key {short_text(pattern)}, which is no regular expression: {error}"
            ) from None
    return [next((pattern_value for key, pattern_value in regexes if key.match(name)), default) for name in names]


def _max_match_ways(pattern: str, longest: int) -> int:
    """A bound of the ways in which a pattern can match a text; groups that repeat have no bound of use."""
    ways, branches = longest + 1, [1]
    for token in _REGEX_TOKENS.findall(pattern):
        if token[0] in "\\[":
            continue
        factor = 1
        if token[0] == "(" and token != "(?":  # of flags and comments, which can hide a repetition
            branches.append(1)
        elif token == "|":
            branches[-1] += 1
        elif token == ")" and len(branches) > 1:
            factor = branches.pop()
        else:
            factor = 2 if token == "?" else longest + 1 if token in "*+{" else _MAX_MATCH_STEPS
        ways = min(ways * factor, _MAX_MATCH_STEPS)
    return ways * branches[0]


def _read_peft_config(path: Path) -> dict[str, Any]:
    with open_regular_file(path) as file:
        data = file.read(_MAX_PEFT_CONFIG_BYTES)
    try:
        config = json_object(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a configuration: {error}") from None
    switches = {key: value for key, value in config.items() if value and value != "none" and key not in _PEFT_FIELDS}
    wrong = sorted(switches.keys() - set(_PEFT_NEUTRAL_FIELDS))
    if config.get("peft_type") != "LORA":
        wrong.append("peft_type")
    if wrong:
        field = f"{wrong[0]}={short_text(config.get(wrong[0]))}"
        raise ValueError(f"{path} is not of plain LoRA: {field}; {_PEFT_MERGE_ADVICE}")
    if str(init := config.get("init_lora_weights")).lower() not in _PEFT_PLAIN_INITS:
        raise ValueError(
            f"{path} has init_lora_weights={short_text(init)}, which changes the base or is not known; "
            f"{_PEFT_MERGE_ADVICE}"
        )
    return config
