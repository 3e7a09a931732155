"""Which tensor is rounded to what: a rule for the layers of a model, and how rules find them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from jchop._paths import matches_path
from jchop.accumulation import MatmulSpec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.nn._scale_from import ScaleFrom, check_scale_from
from jchop.spec import Spec, as_spec

__all__ = ["FIELDS", "NOWHERE", "SPECS", "Rule", "StreamOffset", "as_rules", "left_alone", "rule_of", "rules_of"]

#: The fields of a rule that are specs.
SPECS = ("weight", "activation", "output", "bias", "gradient", "weight_gradient", "cache")
#: All that say something about rounding.
FIELDS = (*SPECS, "matmul", "scale_from")


@dataclass(frozen=True)
class Rule:
    """What is rounded to what in the layers that a pattern names.

    A layer computes ``output(product(activation(x), weight(w)) + bias(b))``. A field that is None rounds nothing, so a
    rule of a path alone keeps its layers as they are.

    The axes of a scaled format are those of an operand laid out for the product at hand: the axes that are summed over
    come last, as one. So ``"mxfp8_e4m3"`` has blocks along the sum in every product, forward and backward;
    ``"int8(group=all)"`` is a scale for each output channel of a weight and for each row (token) of an activation;
    ``"int8"`` is one for the whole tensor. Arrays that enter no product (embeddings, biases, outputs,
    gains of norms) are laid out as they are.

    Args:
        path: a pattern (`fnmatch`) for a piece of the path of a layer, its parts joined by slashes: ``"head"``,
            ``"blocks/*/mlp"``, ``"*norm*"``; the layers below such a piece match too. With a slash at its end the
            pattern is for that module alone, without those below, each part for one part: ``"block/"``; ``"/"`` is the
            model itself. Default ``"*"``: every layer.
        weight: of the kernel, the embedding, or the gain of a norm: a `Spec`, a format, a scaled format, or text.
        activation: of what enters the layer; in attention of queries, keys, values and of the attention weights.
        output: of the layer's result.
        bias: of the bias.
        gradient: of the incoming gradient g in both backward products, dx = g w and dw = x g. Where it is given, each
            product of the three rounds its operands in its own layout: x and w are rounded anew, from their full
            precision, except where the format gives a matrix and its transpose the same numbers (no groups, one scale,
            square tiles): then as the forward product rounded them. Default None: backward products take the operands
            as the forward product rounded them.
        weight_gradient: of both operands of the product dw = x g, in place of `activation` and `gradient`;
            ``"binary32"`` keeps it in float32.
        cache: of the keys and values that MultiHeadAttention keeps for decoding, stored packed: a plain format, or one
            with scales for each token and head, as ``"int8(group=all)"``.
        matmul: a `jchop.MatmulSpec`: products and sums in an emulated arithmetic, in matrix products also backward; in
            a convolution forward.
        scale_from: where the scales of the kernel and of what enters the layer come from: `MovingAverage`,
            `DelayedScaling` or `LSQ`, in Linear, LinearGeneral, Einsum and Conv; other layers, and other operands, go
            without. What is rounded under such scales is rounded once, for all three products. Default None: from
            each array itself.
        stochastic_stream: the stream of `flax.nnx.Rngs` that stochastic roundings draw from. Default ``"rounding"``.

    Raises:
        TypeError, ValueError: for a field that is not what it should be.

    Example:
        >>> import jchop as jc
        >>> rule = jc.nn.Rule("blocks/*", weight="int4(group=32)", activation="int8(group=all)")
        >>> str(rule)
        "Rule('blocks/*', weight=int4(group=32), activation=int8(group=all))"
    """

    path: str = "*"
    _: KW_ONLY
    weight: Spec | None = None
    activation: Spec | None = None
    output: Spec | None = None
    bias: Spec | None = None
    gradient: Spec | None = None
    weight_gradient: Spec | None = None
    cache: Spec | None = None
    matmul: MatmulSpec | None = None
    scale_from: ScaleFrom | None = None
    stochastic_stream: str = "rounding"

    if TYPE_CHECKING:  # what may be given is more than what is stored

        def __init__(
            self,
            path: str = ...,
            *,
            weight: Spec | ElementFormat | ScaledFormat | str | None = ...,
            activation: Spec | ElementFormat | ScaledFormat | str | None = ...,
            output: Spec | ElementFormat | ScaledFormat | str | None = ...,
            bias: Spec | ElementFormat | ScaledFormat | str | None = ...,
            gradient: Spec | ElementFormat | ScaledFormat | str | None = ...,
            weight_gradient: Spec | ElementFormat | ScaledFormat | str | None = ...,
            cache: Spec | ElementFormat | ScaledFormat | str | None = ...,
            matmul: MatmulSpec | None = ...,
            scale_from: ScaleFrom | None = ...,
            stochastic_stream: str = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise TypeError(f"path={self.path!r} must be a pattern of paths such as 'blocks/*/mlp'; '*' is every layer")
        for name in SPECS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else as_spec(value, name, scaled=True))
        for name in ("gradient", "weight_gradient"):
            spec = getattr(self, name)
            if spec is not None and spec.gradient != type(spec.gradient)():
                raise ValueError(f"{name}={str(spec)!r} is of a gradient, and has no gradient of its own")
        if self.cache is not None and not _by_rows(self.cache):
            raise ValueError(
                f"cache={str(self.cache)!r} must round each token and head by itself and draw nothing: a "
                "plain format, or scales of groups along the last axis, as 'int8(group=all)'"
            )
        if self.matmul is not None and not isinstance(self.matmul, MatmulSpec):
            raise TypeError(f"matmul={self.matmul!r} must be a MatmulSpec, such as MatmulSpec(accumulate='e5m10')")
        if self.matmul is not None and self.matmul.operands is not None:
            raise ValueError(f"matmul={str(self.matmul)!r} rounds operands, which activation= and weight= are for")
        if self.scale_from is not None:
            check_scale_from(self.scale_from, {name: getattr(self, name) for name in SPECS})
        if not isinstance(self.stochastic_stream, str) or not self.stochastic_stream:
            raise TypeError(f"stochastic_stream={self.stochastic_stream!r} must be the name of a stream of nnx.Rngs")

    def matches(self, path: str) -> bool:
        """Whether the rule is for a layer of this path.

        Args:
            path: the names of the attributes and indexes that lead to the layer, joined by slashes.

        Example:
            >>> import jchop as jc
            >>> jc.nn.Rule("attention").matches("blocks/0/attention/query"), jc.nn.Rule("att").matches("attention")
            (True, False)
            >>> jc.nn.Rule("block/").matches("net/block"), jc.nn.Rule("block/").matches("net/block/dense")
            (True, False)
        """
        if self.path.endswith("/"):
            parts, wanted = path.split("/"), self.path[:-1].split("/")
            return len(wanted) <= len(parts) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))
        return matches_path(self.path, path)

    @property
    def rounds(self) -> bool:
        """Whether any field says something."""
        return any(getattr(self, name) is not None for name in FIELDS)

    @property
    def stochastic(self) -> bool:
        """Whether any rounding draws random bits."""
        return any(is_stochastic(getattr(self, name)) for name in SPECS) or (
            self.matmul is not None and self.matmul.stochastic
        )

    def __str__(self) -> str:
        fields = [f"{name}={getattr(self, name)}" for name in SPECS if getattr(self, name) is not None]
        if self.matmul is not None:
            fields.append(f"matmul=({self.matmul})")
        if self.scale_from is not None:
            fields.append(f"scale_from={self.scale_from}")
        return f"Rule({', '.join([repr(self.path), *fields])})"


def is_stochastic(spec: Spec | None) -> bool:
    """Whether a rounding, or that of its cotangent, draws random bits."""
    if spec is None:
        return False
    backward = spec.gradient.round
    return spec.rounding.stochastic or (backward is not None and backward.rounding.stochastic)


def _by_rows(spec: Spec) -> bool:
    """Whether a spec rounds each row of the last axis by itself, and draws nothing."""
    fmt = spec.scaled
    rows = fmt is None or (fmt.group is not None and fmt.axis == -1 and len(fmt.scale_parts) == 1)
    return rows and not is_stochastic(spec)


def left_alone(paths: Iterable[str], before: Rule, fields: str = "") -> str:
    """What an error advises for a module that a rule cannot treat, so that the layers below it keep their rule."""
    mine = ", ".join(f"Rule({f'{path}/'!r}{fields})" for path in paths)
    return f"Put {mine} before {before}: it is for that module alone, and the layers below it keep their rule"


def as_rules(rules: Any) -> tuple[Rule, ...]:
    """One rule, or several in their order.

    Raises:
        TypeError, ValueError: for what is no rule, or none at all.
    """
    given: Sequence[Any] = (rules,) if isinstance(rules, Rule) else tuple(rules) if isinstance(rules, Iterable) else ()
    wrong = [rule for rule in given if not isinstance(rule, Rule)]
    if wrong or not given:
        raise TypeError(f"rules={rules!r} must be a jchop.nn.Rule, or several")
    return tuple(given)


def rule_of(path: str, rules: Sequence[Rule]) -> int | None:
    """The number of the first rule that matches a path; None where none does."""
    return next((number for number, rule in enumerate(rules) if rule.matches(path)), None)


def rules_of(paths: Iterable[str], rules: Sequence[Rule]) -> list[int]:
    """The numbers of the rules of one module with several paths: of each path the first that matches.

    Raises:
        ValueError: for rules that say different things.
    """
    chosen = {path: number for path in paths if (number := rule_of(path, rules)) is not None}
    numbers = sorted(set(chosen.values()))
    if len({replace(rules[number], path="*") for number in numbers}) > 1:
        given = ", ".join(f"{path!r} by {rules[number]}" for path, number in chosen.items())
        raise ValueError(
            f"rules disagree about one module that is reached by several paths: {given}. Give all of these paths "
            "the same"
        )
    return numbers


@dataclass(frozen=True, eq=False)
class StreamOffset:
    """Where a rounding stands, for errors alone: all places are equal, so that jit compiles layers of one kind once.

    Args:
        layer: the class of the layer.
        path: of the layer.
        rule: its rule.
    """

    layer: str = ""
    path: str = ""
    rule: Rule | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamOffset)

    def __hash__(self) -> int:
        return hash(StreamOffset)

    def __str__(self) -> str:
        return f"{self.layer} at {self.path!r} by {self.rule}" if self.layer else "product"


NOWHERE = StreamOffset()
