"""Rules that assign specs to the tensors of layers, and their matching; where scales come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jchop._common.checks import (
    FieldsRepr,
    check,
    check_choice,
    check_instance,
    keyword_hints,
    place_in_errors,
    short_repr,
)
from jchop._common.paths import check_path_pattern, common_path_pattern, matches_path, nearest_paths_hint, path_pattern
from jchop._quantized.products.operand_layout import Hadamard
from jchop._quantized.products.rule_sources import fields_of_hf, fields_of_qwix
from jchop._quantized.products.scale_from import ScaleFrom, check_scale_from
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop.formats import ElementFormat, ScaledFormat

#: The fields of a rule that are specs.
SPEC_FIELDS = ("weight", "activation", "output", "bias", "gradient", "input_gradient", "weight_gradient", "cache")
#: The operations that a rule's `operation` may select: the primitives of JAX by the names of their functions.
OPERATION_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dot_general": "dot_general",
        "conv_general_dilated": "conv",
        "ragged_dot_general": "ragged_dot",
        **dict.fromkeys(("gather", "dynamic_slice"), "embedding"),
    }
)
#: The fields that select, beside the path.
_SELECTOR_FIELDS = ("layer", "operation")
#: All fields that define roundings.
ROUNDING_FIELDS = (*SPEC_FIELDS, "rotation", "matmul", "scale_from")


@dataclass(frozen=True, repr=False)
class Rule(FieldsRepr):
    """The roundings of the layers that match a pattern.

    A layer computes ``output(product(activation(x), weight(w)) + bias(b))``. A field that is None rounds nothing, so a
    rule with only a path leaves its layers unchanged.

    A scaled format counts the axes of an operand laid out for its product: the contracted axes come last, joined into
    one. So ``"mxfp8_e4m3"`` has blocks along the sum in every product, forward and backward. ``"int8(group=all)"`` has
    a scale for each output channel of a weight and for each row (token) of an activation. ``"int8"`` has one for the
    whole tensor. Arrays that enter no product (embeddings, biases, outputs, scales of norms) keep their own axes.

    Args:
        path: a pattern for consecutive parts of the path of a layer or parameter, [](patterns.md): ``"head"``,
            ``"blocks/*/mlp"``, ``"*norm* !final"``. Submodules match too, unless it ends with a slash: ``"block/"``.
            ``"/"`` is the model itself. Default ``"*"``: every layer.
        layer: a pattern for the class of the layer, or of the module or node that holds a parameter: ``"Linear"``,
            ``"{Conv,ConvTranspose}"``, ``"!Embed"``. Default None: any.
        operation: a pattern for the computation: ``"dot_general"`` (matrix products and einsums), ``"conv"``,
            ``"ragged_dot"``, ``"embedding"`` (rows that are looked up). A parameter belongs to its first product.
            ``"gmm(-1,-2)"`` declares calls of this name, of a Pallas kernel, `jax.jit` or `jax.custom_vjp`: for each
            operand of floats the axis that is summed over, or ``_``. Default None: any, and layers without one, as
            norms.
        weight: the spec of the kernel or the embedding: a `Spec`, a format, a scaled format, or text. In a model of
            layers, a rule that decides norms alone rounds their scales to it; every other rule leaves them.
        activation: the spec of the layer's input. In attention it is for queries, keys, values and attention weights.
            The input of a norm is rounded as its scale: by a rule that decides norms alone.
        output: the spec of the layer's result.
        bias: the spec of the bias.
        gradient: the spec of the incoming gradient g in both backward products, dx = g w and dw = x g. With it, each of
            the three products rounds its operands in its own layout, x and w from full precision. Some formats round a
            matrix and its transpose to the same numbers (no groups, one scale, square tiles). They are applied once, in
            the forward product. Default None: backward products use the rounded operands of the forward product.
        input_gradient: the spec of both operands of the product dx = g w, instead of `gradient` and `weight`.
        weight_gradient: the spec of both operands of the product dw = x g, instead of `activation` and `gradient`;
            ``"binary32"`` keeps it in float32.
        rotation: a `Hadamard`, which rotates both operands of the product dw, or of both backward products, along the
            sum. It rotates before they are rounded, from full precision. It needs the spec of a gradient, and products
            whose rows are independent: of matrices, not convolutions or experts. ``products="forward"`` rotates the
            forward product instead: of matrices and experts, in programs (`jchop.quantize_fn`), not in layers.
            ``products="all"`` rotates all three: of matrices, in programs.
        cache: the spec of the keys and values that MultiHeadAttention stores for decoding, packed. A plain format, or
            one with scales for each token and head, as ``"int8(group=all)"``.
        matmul: a `jchop.MatmulSpec`, the emulated arithmetic of products and sums: in matrix products forward and
            backward, in convolutions only forward.
        scale_from: the source of the scales of the kernel and of the layer's input: `MovingAverage`, `DelayedScaling`
            or `LSQ`. It is for Linear, LinearGeneral, Einsum and Conv, and has no effect on other layers and operands.
            Under these scales an operand is rounded once, for all three products. Default None: from each array itself.
        product: ``"float"`` multiplies rounded operands as floats, in the carrier. ``"codes"`` multiplies their codes
            and scales the sums, as the units of chips do; [](products.md) states the sum. With a ``gradient`` the
            backward products are of codes, too, and without one of floats. ``"auto"`` multiplies codes in products of
            matrices that read a weight alone as it is stored, else floats. Default None: ``"float"``; in
            ``mode="weight_only"`` ``"auto"``, unless there is a `scale_from`.
        stochastic_stream: the stream of `flax.nnx.Rngs` for stochastic roundings. Default ``"rounding"``.

    Raises:
        TypeError, ValueError: for an invalid field.

    Example:
        >>> import jchop as jc
        >>> rule = jc.Rule("blocks/*", weight="int4(group=32)", activation="int8(group=all)")
        >>> str(rule)
        "Rule('blocks/*', weight=int4(group=32), activation=int8(group=all))"
    """

    path: str = "*"
    _: KW_ONLY
    layer: str | None = None
    operation: str | None = None
    weight: Spec | None = None
    activation: Spec | None = None
    output: Spec | None = None
    bias: Spec | None = None
    gradient: Spec | None = None
    input_gradient: Spec | None = None
    weight_gradient: Spec | None = None
    cache: Spec | None = None
    rotation: Hadamard | None = None
    matmul: MatmulSpec | None = None
    scale_from: ScaleFrom | None = None
    product: str | None = None
    stochastic_stream: str = "rounding"

    if TYPE_CHECKING:  # the arguments may have more types than the fields

        def __init__(
            self,
            path: str = ...,
            *,
            layer: str | None = ...,
            operation: str | None = ...,
            weight: SpecLike | None = ...,
            activation: SpecLike | None = ...,
            output: SpecLike | None = ...,
            bias: SpecLike | None = ...,
            gradient: SpecLike | None = ...,
            input_gradient: SpecLike | None = ...,
            weight_gradient: SpecLike | None = ...,
            cache: SpecLike | None = ...,
            rotation: Hadamard | None = ...,
            matmul: MatmulSpec | None = ...,
            scale_from: ScaleFrom | None = ...,
            product: Literal["float", "codes", "auto"] | None = ...,
            stochastic_stream: str = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_path_pattern("path", self.path)
        if self.layer is not None:
            check_path_pattern("layer", self.layer, "'Linear'")
        if self.operation is not None:
            operations = ", ".join(OPERATION_NAMES.values())
            is_text = isinstance(self.operation, str)
            pattern = check_path_pattern("operation", self._operation_pattern if is_text else self.operation)
            matches = self.axes_of_calls or any(matches_path(pattern, name) for name in OPERATION_NAMES.values())
            check(matches, f"operation={self.operation!r} must match one of {operations}, or be as 'gmm(-1,-2)'")
        for name in SPEC_FIELDS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else as_spec(value, name, scaled=True))
        for name in ("gradient", "input_gradient", "weight_gradient"):
            spec = getattr(self, name)
            if spec is not None and spec.gradient != type(spec.gradient)():
                raise ValueError(f"{name}={str(spec)!r} is of a gradient, and has no gradient of its own")
        if self.cache is not None:
            check_cache_spec("cache", self.cache)
        if self.rotation is not None:
            self._check_rotation(self.rotation)
        if self.matmul is not None and not isinstance(self.matmul, MatmulSpec):
            raise TypeError(f"matmul={self.matmul!r} must be a MatmulSpec, such as MatmulSpec(accumulate='e5m10')")
        if self.matmul is not None and self.matmul.operands is not None:
            raise ValueError(f"matmul={str(self.matmul)!r} rounds operands, which activation= and weight= are for")
        if self.scale_from is not None:
            check_scale_from(self.scale_from, {name: getattr(self, name) for name in SPEC_FIELDS})
        if self.product is not None:
            check_choice("product", self.product, ("float", "codes", "auto"))
        if self.product == "codes" and self.matmul is not None:
            raise ValueError(
                f"product='codes' and matmul={str(self.matmul)!r} both say how a sum is computed; leave one of them out"
            )
        if not isinstance(self.stochastic_stream, str) or not self.stochastic_stream:
            raise TypeError(f"stochastic_stream={self.stochastic_stream!r} must be the name of a stream of nnx.Rngs")

    def _check_rotation(self, rotation: Any) -> None:
        check_instance("rotation", rotation, Hadamard, "a jchop.Hadamard, such as Hadamard(16)")
        if rotation.forward and self.weight is None and self.activation is None:
            raise ValueError(f"rotation={rotation} needs a weight= or an activation=: nothing is rounded")
        backward = (("input_gradient", rotation.of_input), ("weight_gradient", rotation.of_weight))
        if self.gradient is None and any(rotates and getattr(self, name) is None for name, rotates in backward):
            raise ValueError(f"rotation={rotation} needs a gradient=: the backward products have nothing rounded")
        if self.scale_from is not None:
            raise ValueError(
                f"rotation={rotation} with scale_from={self.scale_from!r}: operands under such a scale are rounded "
                "once, for all three products, and as they are"
            )

    @classmethod
    def from_qwix(cls, rules: Any) -> list[Rule]:
        """Converts rules of qwix, which MaxText, Tunix and tpu-inference use.

        The rules round the same tensors as in qwix; [](patterns.md) has a table of all fields.

        Args:
            rules: a rule of qwix (`QuantizationRule`, `QtRule`, `LoraRule`), or a dict with the same fields. Or several
                of them, or the dict of a YAML file around them.

        Raises:
            TypeError: for an argument that is no rule.
            ValueError: for a field without an equal in rules of jchop. The message names the nearest one.

        Example:
            >>> import jchop as jc
            >>> yaml = {"qwix": {"rules": [{"module_path": ".*mlp.*", "weight_qtype": "int4", "tile_size": 128}]}}
            >>> print(*jc.Rule.from_qwix(yaml))
            Rule('*mlp*', operation=!embedding, weight=int4(group=128,rule=half_range))
        """
        return [cls(**fields) for fields in fields_of_qwix(rules)]

    @classmethod
    def from_hf(cls, quantization_config: Any) -> list[Rule]:
        """Converts the ``quantization_config`` of a model of Hugging Face to rules.

        The rules are for linear layers. Their paths are the names of the checkpoint without ``model.`` in front. A
        table of all fields is in [](patterns.md).

        Args:
            quantization_config: a dict, an object with a method ``to_dict``, or the whole ``config.json`` around it.
                Its method is compressed-tensors, gptq, awq, fp8, bitsandbytes, torchao, modelopt or mxfp4.

        Raises:
            TypeError: for an argument that is no dict.
            ValueError: for another method, or a field without an equal in rules of jchop. The message names the nearest
                one.

        Example:
            >>> import jchop as jc
            >>> config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
            >>> print(jc.Rule.from_hf(config)[0].weight)
            int4(group=128,scale=binary16,zero_point=integer)
        """
        return [cls(**fields) for fields in fields_of_hf(quantization_config)]

    def matches(self, path: str, *, layer: str = "", operation: str = "") -> bool:
        """Whether the rule matches a layer of this path.

        Args:
            path: the attribute names and indexes of the layer, joined by slashes.
            layer: its class, by name; empty if there is none.
            operation: its computation, one of the names of `operation`; empty for none.

        Example:
            >>> import jchop as jc
            >>> jc.Rule("attention").matches("blocks/0/attention/query"), jc.Rule("att").matches("attention")
            (True, False)
            >>> jc.Rule("block/").matches("net/block"), jc.Rule("block/").matches("net/block/dense")
            (True, False)
        """
        return self.selects((path,), layer, operation)

    def selects(self, paths: Sequence[str], layer: str, operation: str) -> bool:
        """Whether the rule matches any of several paths, as its own and the path of its module."""
        return matches_path(self.path, *paths) and all(
            pattern is None or (bool(name) and matches_path(pattern, name))
            for pattern, name in ((self.layer, layer), (self._operation_pattern, operation))
        )

    @cached_property
    def _operation_pattern(self) -> str | None:
        return None if self.operation is None else _CALL_AXES.sub("", self.operation)

    @cached_property
    def axes_of_calls(self) -> dict[str, tuple[int | None, ...]]:
        """The axes of operands that `operation` says calls sum over, by the pattern of the name of the call."""
        example = f"operation={self.operation!r} must give the axis of each operand as a number or _, as 'gmm(-1,-2)'"
        with place_in_errors(example):
            return {
                name: tuple(None if axis.strip() == "_" else int(axis) for axis in axes.split(","))
                for name, axes in _CALL.findall(self.operation or "")
            }

    @property
    def forward_rotation(self) -> Hadamard | None:
        """The rotation of the operands of forward products."""
        return self.rotation if self.rotation is not None and self.rotation.forward else None

    @property
    def rounds(self) -> bool:
        """Whether any field is set."""
        return any(getattr(self, name) is not None for name in ROUNDING_FIELDS)

    @property
    def stochastic(self) -> bool:
        """Whether any rounding draws random bits."""
        return any_draw((getattr(self, name) for name in SPEC_FIELDS), self.matmul, self.rotation)

    def __str__(self) -> str:
        fields = []
        for name in (*_SELECTOR_FIELDS, *ROUNDING_FIELDS, "product"):
            value = getattr(self, name)
            if value is not None and (name, value) != ("product", "float"):
                fields.append(f"{name}=({value})" if name == "matmul" else f"{name}={value}")
        return f"Rule({', '.join([repr(self.path), *fields])})"


#: A call that `operation` declares.
_CALL_AXES = re.compile(r"\([^()]*\)")
_CALL = re.compile(r"([^\s()]+)\(([^()]*)\)")
_KEYWORDS_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("weight_qtype", "act_qtype", "bwd_qtype", "tile_size", "module_path", "op_names", "weight_calibration_method"),
        "Rule.from_qwix(rule), or Rule('*mlp*', weight='int4(group=32)', activation='int8')",
    ),
    **dict.fromkeys(("bits", "dtype", "group_size", "format", "spec"), "weight='int4(group=32)'"),
}
Rule.__init__ = keyword_hints(_KEYWORDS_ELSEWHERE)(Rule.__init__)  # type: ignore[method-assign]


def refuse_code_products(rule: Rule, what: str, why: str) -> None:
    """Refuse ``product="codes"`` for a layer.

    Raises:
        NotImplementedError: that names the functions that take it.
    """
    if rule.product == "codes":
        raise NotImplementedError(
            f"{what}: product='codes' of {rule}: {why}; quantize the program, by jc.nn.quantize(model, rules, "
            "inputs=...) or jc.quantize_fn"
        )


def refuse_forward_rotation(rule: Rule, what: str) -> None:
    """Refuse a rotation of forward products for a layer.

    Raises:
        NotImplementedError: that names the functions that take it.
    """
    if rule.forward_rotation is not None:
        raise NotImplementedError(
            f"{what}: rotation={rule.rotation} of {rule} is of programs; quantize the program, by "
            "jc.nn.quantize(model, rules, inputs=...) or jc.quantize_fn"
        )


def multiplies_codes(rule: Rule) -> bool:
    """Whether a rule wants products of codes, if only of weights that are read as they are stored."""
    return rule.product == "codes" or (rule.product == "auto" and rule.scale_from is None)


def is_stochastic(spec: Spec | None) -> bool:
    """Whether a rounding, or the rounding of its cotangent, draws random bits."""
    if spec is None:
        return False
    backward = spec.gradient.round
    return spec.rounding.stochastic or (backward is not None and backward.rounding.stochastic)


def any_draw(specs: Iterable[Spec | None], matmul: MatmulSpec | None, rotation: Hadamard | None) -> bool:
    """Whether any part of a product draws random bits."""
    of_sums, of_signs = matmul is not None and matmul.stochastic, rotation is not None and rotation.draws
    return of_sums or of_signs or any(map(is_stochastic, specs))


def check_cache_spec(name: str, spec: Spec) -> None:
    """Refuse a spec of a cache that rounds tokens or heads together, or draws random bits.

    Raises:
        ValueError: that names the argument.
    """
    fmt = spec.scaled
    rows = fmt is None or (fmt.group is not None and fmt.axis == fmt.axis_of_sparse == -1 and len(fmt.scale_parts) == 1)
    if not rows or is_stochastic(spec):
        raise ValueError(
            f"{name}={str(spec)!r} must round each token and head by itself and draw nothing: a plain format, or "
            "scales of groups along the last axis, as 'int8(group=all)'"
        )


def exclusion_advice(paths: Iterable[str], before: Rule, fields: str = "") -> str:
    """The advice of an error for a module that a rule cannot treat, so that its sublayers keep their rule."""
    first, *others = paths
    terms = common_path_pattern([first, *others]).split() if others else [path_pattern(first)]
    pattern = " ".join(term if term.endswith("/") else f"{term}/" for term in terms)
    reason = "it is for that module alone, and the layers below it keep their rule"
    return f"Put Rule({pattern!r}{fields}) before {before}: {reason}"


#: One rule, several, or an argument of `as_rule_tuple`, which makes them.
RuleLike = Rule | SpecLike | Mapping[str, Any] | Iterable[Rule]


def as_rule_tuple(rules: Any) -> tuple[Rule, ...]:
    """One rule, or several, as a tuple.

    Args:
        rules: rules, or one spec of all weights. Or a mapping of patterns of paths, each to a rule, the fields of one,
            the spec of weights, or None.

    Raises:
        TypeError, ValueError: for other values, or no rule.
    """
    items: Sequence[Any] = ()
    if isinstance(rules, Mapping) and not _reading_advice(rules):
        entries = rules.items()
        items = [rule_of_entry(Rule, key, v if isinstance(v, Rule | Mapping) else {"weight": v}) for key, v in entries]
    elif isinstance(rules, Rule | Spec | ElementFormat | ScaledFormat | str | type | np.dtype):
        items = (rules if isinstance(rules, Rule) else Rule(weight=rules),)
    elif isinstance(rules, Iterable):
        items = tuple(rules)
    wrong = [rule for rule in items if not isinstance(rule, Rule)]
    if wrong or not items:
        raise TypeError(
            f"rules={short_repr(rules)} must be a jchop.Rule, several, or a mapping such as {{'*': 'int4'}}"
            f"{_reading_advice(rules if isinstance(rules, Mapping) else next(iter(wrong), rules))}"
        )
    return tuple(items)


def rule_of_entry(cls: Any, pattern: str, value: Any) -> Any:
    """The rule of a class for an entry of a mapping: a rule, or the fields of one."""
    if not isinstance(value, cls):
        return cls(pattern, **value)
    check(value.path in ("*", pattern), f"rules[{pattern!r}]={value!r} has another path; leave one of them out")
    return replace(value, path=pattern)


def refuse_idle_rules(idle: Sequence[Any], what: str, paths: Iterable[str], advice: str = "") -> None:
    """Refuse rules that match nothing, if there are any; the error names paths that they could match."""
    if idle:
        hint = nearest_paths_hint([rule.path for rule in idle], paths)
        names = ", ".join(map(str, idle))
        raise ValueError(f"{names} matches no {what}, or only such as an earlier rule matches{hint}{advice}")


def _reading_advice(rule: Any) -> str:
    """The end of an error for rules of qwix, or a configuration of Hugging Face: the call that reads them."""
    if isinstance(rule, Mapping) and ("quant_method" in rule or "quantization_config" in rule):
        return "; jc.Rule.from_hf(config) reads a quantization_config"
    is_qwix = hasattr(rule, "module_path") or (isinstance(rule, Mapping) and rule.keys() & {"module_path", "qwix"})
    return "; jc.Rule.from_qwix(rules) reads rules of qwix" if is_qwix else ""


def rule_index(path: str, rules: Sequence[Rule], layer: str = "", operation: str = "") -> int | None:
    """The index of the first rule that matches a layer; None if there is none."""
    return next((n for n, rule in enumerate(rules) if rule.selects((path,), layer, operation)), None)


def param_rule_index(path: str, rules: Sequence[Rule], layer: str = "", operation: str = "") -> int | None:
    """The index of the first rule that matches a parameter's path, or its module's; None if there is none."""
    both = (path, path.rpartition("/")[0])
    return next((n for n, rule in enumerate(rules) if rule.selects(both, layer, operation)), None)


def module_rule_indexes(paths: Iterable[str], rules: Sequence[Rule], layer: str = "", operation: str = "") -> list[int]:
    """The indexes of the rules of one module with several paths: for each path the first that matches.

    Raises:
        ValueError: for rules that differ.
    """
    number_of_path = {
        path: number for path in paths if (number := rule_index(path, rules, layer, operation)) is not None
    }
    numbers = sorted(set(number_of_path.values()))
    if len({replace(rules[number], path="*", layer=None, operation=None) for number in numbers}) > 1:
        matches = ", ".join(f"{path!r} by {rules[number]}" for path, number in number_of_path.items())
        raise ValueError(
            f"rules disagree about one module that is reached by several paths: {matches}. Give all of these paths "
            "the same"
        )
    return numbers


@dataclass(frozen=True, eq=False)
class Location:
    """The location of a rounding, for errors only: all compare equal, so that jit compiles layers of one kind once.

    Args:
        layer: the class of the layer.
        path: of the layer.
        rule: its rule.
    """

    layer: str = ""
    path: str = ""
    rule: Rule | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location)

    def __hash__(self) -> int:
        return hash(Location)

    def __str__(self) -> str:
        return f"{self.layer} at {self.path!r} by {self.rule}" if self.layer else "product"


NO_LOCATION = Location()
