"""A projection specification: everything static about one rounding, as a hashable value; and the facts of a format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common import checks, html
from jchop._common.checks import FieldsRepr, check_bool, close_names_hint, quote, short_repr, split_outside_brackets
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat, UniformFormat, parse_format
from jchop.formats._base import format_facts, short_number
from jchop.formats.rounding import ROUNDING_ALIASES, Overflow, Rounding, as_overflow, as_rounding
from jchop.formats.scaled.scaled import as_format


@dataclass(frozen=True, repr=False)
class Gradient(FieldsRepr):
    """The backward rule for the cotangent g of a rounded value.

    Args:
        clipped: whether g is zero for values that overflowed (clipped straight-through). Otherwise g passes unchanged
            (straight-through, Bengio et al., arXiv 1308.3432).
        round: a Spec, format or text to which g is then rounded. A stochastic one draws from ``gradient_key``.

    Example:
        >>> import jax, jchop as jc
        >>> spec = jc.Spec("fixed1.3", gradient=jc.Gradient(clipped=True))
        >>> jax.grad(lambda x: jc.round_to_format(x, spec).sum())(jax.numpy.array([0.3, 5.0])).tolist()
        [1.0, 0.0]
    """

    clipped: bool = False
    round: Spec | None = None

    if TYPE_CHECKING:  # the arguments may have more types than the fields

        def __init__(self, clipped: bool = ..., round: SpecLike | None = ...) -> None: ...

    def __post_init__(self) -> None:
        check_bool("clipped", self.clipped)
        if self.round is not None:
            object.__setattr__(self, "round", as_spec(self.round, "round", scaled=True))
            if self.round.gradient != Gradient():
                raise ValueError(f"round={self.round}: the Spec of a cotangent has no gradient of its own")

    def __str__(self) -> str:
        parts = ["clipped"] * self.clipped + ([f"[{self.round}]"] if self.round is not None else [])
        return "+".join(parts) or "straight_through"


@dataclass(frozen=True, repr=False)
class Spec:
    """Format, rounding mode and overflow rule of a rounding: IEEE P3109's projection specification.

    Args:
        format: an element format or a `ScaledFormat`, its text, or a dtype. A text may have the other fields after it:
            ``FORMAT[:ROUNDING][:OVERFLOW][:random_bits=N][:flush][:gradient=...]``, in any order, with ``clipped``, a
            format, ``[SPEC]`` or ``clipped+[SPEC]`` as the gradient. Of a scaled format they apply to the elements.
        rounding: a `Rounding`, or its text; default ``"nearest_even"``.
        overflow: an `Overflow`, or its text. Default (None): ``"ieee"``, under which fixed point and integers saturate;
            for a scaled format ``"saturate"``.
        random_bits: bits N that a stochastic mode draws for each element: 1 to 32, or to 64 for float64. For
            ``"stochastic_b"`` and ``"stochastic_c"`` the limits are 31 and 63. Default: the maximum, with a bias below
            2^-31 of the distance between neighbours.
        flush: whether magnitudes below the smallest normal value become zero before rounding (hardware FTZ).
        gradient: ``"straight_through"``, ``"clipped"``, a `Gradient`, or a spec to which the cotangent is rounded.

    Raises:
        TypeError, ValueError: for a field that is not allowed, or has no effect beside the others.

    Example:
        >>> import jchop as jc
        >>> spec = jc.Spec(jc.formats.FloatFormat(5, 2), rounding="stochastic", overflow="saturate")
        >>> spec == jc.Spec("e5m2:stochastic:saturate"), spec
        (True, Spec('e5m2:stochastic:saturate'))
    """

    format: ElementFormat  # or a ScaledFormat, which `as_spec` refuses for callers that handle elements only
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow = None  # type: ignore[assignment]
    random_bits: int | None = None
    flush: bool = False
    gradient: Gradient = Gradient()

    if TYPE_CHECKING:  # the arguments may have more types than the fields

        def __init__(
            self,
            format: ElementFormat | ScaledFormat | str | np.dtype | type,
            rounding: Rounding | str = ...,
            overflow: Overflow | str | None = ...,
            random_bits: int | None = ...,
            flush: bool = ...,
            gradient: Gradient | SpecLike = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.format, str) and ":" in self.format:
            self._take_parts(self.format)
        object.__setattr__(self, "format", as_format(self.format))
        if not isinstance(self.format, ElementFormat | ScaledFormat):
            raise TypeError(f"format={short_repr(self.format)} must be a format, its text, or a dtype")
        members = {
            "rounding": as_rounding(self.rounding),
            "overflow": self._default_overflow if self.overflow is None else as_overflow(self.overflow),
            "gradient": _as_gradient(self.gradient),
        }
        for name, value in members.items():
            object.__setattr__(self, name, value)
        check_bool("flush", self.flush)
        if self.random_bits is not None:
            object.__setattr__(self, "random_bits", checks.check_int("random_bits", self.random_bits, 1, 64))
            if not self.rounding.stochastic or self.rounding is Rounding.STOCHASTIC_EQUAL:
                raise ValueError(
                    f"random_bits={self.random_bits} has no effect under rounding={self.rounding.value!r}; "
                    "it belongs to 'stochastic', 'stochastic_b' and 'stochastic_c'"
                )
        if self.overflow is Overflow.WRAP:
            if not isinstance(self.format, UniformFormat):
                raise ValueError(f"overflow='wrap' is for fixed point and integers, not {self.format}")
            if self.format.min == -self.format.max:
                raise ValueError(f"overflow='wrap' needs the whole two's complement range, not {self.format}")
        if self.flush and not (isinstance(self.element, FloatFormat) and self.element.zero):
            raise ValueError(f"flush=True needs a floating-point format with a zero, not {self.format}")

    def _take_parts(self, text: str) -> None:
        """Takes the fields of a spec's text, none of which may be an argument, too."""
        name, fields = _parse_parts(text)
        for field, value in fields.items():
            if getattr(self, field) != type(self).__dict__[field]:
                raise ValueError(f"{field}={getattr(self, field)} stands in format={quote(text)}, too; give it once")
            object.__setattr__(self, field, value)
        object.__setattr__(self, "format", name)

    @property
    def element(self) -> ElementFormat:
        """The format of elements: the format itself, or the element format of a scaled one."""
        return self.format if self.scaled is None else self.scaled.element

    @property
    def scaled(self) -> ScaledFormat | None:
        """The format if it is a scaled one, else None."""
        return self.format if isinstance(self.format, ScaledFormat) else None

    @property
    def _default_overflow(self) -> Overflow:
        return Overflow.IEEE if self.scaled is None else Overflow.SATURATE

    def _repr_html_(self) -> str:
        own = {"rounding": self.rounding.value, "overflow": self.overflow.value}
        if self.random_bits is not None:
            own["random bits"] = str(self.random_bits)
        own |= {"flush": "subnormal numbers become zero"} if self.flush else {}
        own |= {"gradient": str(self.gradient)} if self.gradient != Gradient() else {}
        return html.box(f"Spec {self}", [*format_facts(self.format), *own.items()])

    def __repr__(self) -> str:
        return f"Spec({str(self)!r})"

    def __str__(self) -> str:
        parts = [str(self.format)]
        if self.rounding is not Rounding.NEAREST_EVEN:
            parts.append(self.rounding.value)
        if self.overflow is not self._default_overflow:
            parts.append(self.overflow.value)
        if self.random_bits is not None:
            parts.append(f"random_bits={self.random_bits}")
        if self.flush:
            parts.append("flush")
        if self.gradient != Gradient():
            parts.append(f"gradient={self.gradient}")
        return ":".join(parts)


def parse(text: str) -> Spec:
    """The Spec of a text: ``FORMAT[:ROUNDING][:OVERFLOW][:random_bits=N][:flush][:gradient=...]``.

    Args:
        text: a format's text (see `jchop.formats.parse_format`) and then, in any order, a rounding, an overflow rule,
            ``random_bits=N``, ``flush``, and ``gradient=``. The gradient is ``clipped``, a format, ``[SPEC]`` or
            ``clipped+[SPEC]``. The spec of a cotangent needs the brackets unless it is only a format.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: for an unknown or repeated part, and for a text of more than 4096 characters beside the levels of
            codebooks.

    Example:
        >>> import jchop as jc
        >>> jc.Spec("e5m2:stochastic:random_bits=8").random_bits
        8
    """
    if not isinstance(text, str):
        raise TypeError(f"text={text!r} must be a spec's text such as 'e5m2:stochastic:saturate'")
    return _parse_spec(text)


@lru_cache(maxsize=256)
def _parse_spec(text: str) -> Spec:
    name, fields = _parse_parts(text)
    return Spec(parse_format(name), **fields)  # type: ignore[arg-type]


def _parse_parts(text: str) -> tuple[str, dict[str, object]]:
    name, *parts = split_outside_brackets(checks.check_text("spec text", text), ":")
    fields: dict[str, object] = {}
    for part in map(str.strip, parts):
        field, value = _parse_spec_field(text, part)
        checks.check(field not in fields, f"spec text {quote(text)} gives {field} twice")
        fields[field] = value
    return name, fields


def _parse_spec_field(text: str, part: str) -> tuple[str, object]:
    if part in ROUNDING_ALIASES or part in [mode.value for mode in Rounding]:
        return "rounding", part
    if part in [rule.value for rule in Overflow]:
        return "overflow", part
    if part == "flush":
        return "flush", True
    name, _, value = part.partition("=")
    if name == "random_bits":
        if not value.isdigit():
            raise ValueError(f"spec text {quote(text)}: random_bits={quote(value)} must be an integer from 1 to 64")
        return name, int(value)
    if name == "gradient":
        return name, value
    names = [*(member.value for kind in (Rounding, Overflow) for member in kind), *ROUNDING_ALIASES]
    hint = close_names_hint({"sat": "saturate"}.get(name, name), [*names, "random_bits", "flush", "gradient"])
    raise ValueError(
        f"spec text {quote(text)}: part {quote(part)} is not known"
        f"{hint or '; after the format come a rounding (up, stochastic), an overflow rule (saturate), random_bits=8, '}"
        f"{'' if hint else 'flush, gradient=clipped'}"
    )


def _as_gradient(value: object) -> Gradient:
    if isinstance(value, Gradient):
        return value
    if isinstance(value, Spec | ElementFormat | ScaledFormat):
        return Gradient(round=as_spec(value, scaled=True))
    if not isinstance(value, str):
        raise TypeError(f"gradient={value!r} must be {_GRADIENT_CHOICES}")
    if value == "straight_through":
        return Gradient()
    match = _GRADIENT_TEXT.fullmatch(value)
    if match is None:
        raise ValueError(f"gradient={quote(value)} must be {_GRADIENT_CHOICES}")
    text = match["inside"] or match["plain"]
    try:
        return Gradient(bool(match["clipped"] or match["both"]), _parse_spec(text) if text else None)
    except ValueError as error:
        raise ValueError(f"gradient={quote(value)} must be {_GRADIENT_CHOICES}: {error}") from None


_GRADIENT_TEXT = re.compile(
    r"(?P<clipped>clipped)|(?:(?P<both>clipped)\+)?(?:\[(?P<inside>[^\[\]]+)\]|(?P<plain>(?!clipped)[^\[\]]+))"
)
_GRADIENT_CHOICES = (
    "'straight_through', 'clipped', a Gradient, or a Spec, format or text that the cotangent is rounded to "
    "('[e4m3:up]', 'clipped+[e4m3:up]')"
)


#: A `Spec`, or an argument of `as_spec`. A scaled format is refused where each number is rounded by itself.
SpecLike = Spec | ElementFormat | ScaledFormat | str | np.dtype | type


def as_spec(value: object, argument: str = "spec", *, scaled: bool = False) -> Spec:
    """`value` as a Spec.

    Args:
        value: a Spec, a format, a dtype, or text.
        argument: name of the argument, for errors.
        scaled: whether the format may be a scaled one, which rounds whole arrays only. Default False.

    Raises:
        TypeError, ValueError: for any other value, and for a scaled format if `scaled` is False.
    """
    if isinstance(value, str):
        value = parse(value)
    if not isinstance(value, Spec):
        fmt = as_format(value)
        if not isinstance(fmt, ElementFormat | ScaledFormat):
            raise TypeError(
                f"{argument}={short_repr(value)} must be a Spec, a format, a dtype, or text such as "
                "'e5m2:stochastic:saturate'"
            )
        value = Spec(fmt)
    if value.scaled is not None and not scaled:
        raise ValueError(
            f"{argument}={str(value)!r} is a scaled format, and each number has to be rounded by itself; "
            "the integers without a scale are 'integer8' and the like"
        )
    return value


# == facts of a format under the names of jax.numpy.finfo ==============================================================


FactValue = float | Fraction
_REPR_FACTS = ("bits", "max", "min", "eps", "smallest_normal", "smallest_subnormal")


@dataclass(frozen=True, repr=False)
class finfo:
    """The facts of a format under the names of `jax.numpy.finfo`, each exact: a float, or a fraction if none holds it.

    Fixed point, integers and codebooks have `bits`, `max` and `min` alone. A fact that a format does not have raises
    AttributeError, so ``getattr(jc.finfo("int8"), "eps", None)`` is None.

    Args:
        format: a format, a `Spec` or text. A scaled format or a Spec gives the facts of its elements.

    Raises:
        TypeError, ValueError: for a value that is no format.

    Example:
        >>> import jchop as jc
        >>> info = jc.finfo("float8_e4m3fn")
        >>> info.max, info.eps, info.smallest_subnormal, info.minexp
        (448.0, 0.125, 0.001953125, -6)
        >>> jc.finfo("int4")
        finfo(integer4, bits=4, max=7.0, min=-8.0)
    """

    format: ElementFormat

    if TYPE_CHECKING:  # the argument may have more types than the stored field

        def __init__(self, format: SpecLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", as_spec(self.format, "format", scaled=True).element)

    def __repr__(self) -> str:
        values = {name: getattr(self, name, None) for name in _REPR_FACTS}
        facts = (
            f"{name}={short_number(v) if isinstance(v, Fraction) else v}" for name, v in values.items() if v is not None
        )
        return f"finfo({', '.join([str(self.format), *facts])})"

    def _require(self, name: str, value: Any) -> Any:
        if value is None:
            available = "all others" if isinstance(self.format, FloatFormat) else "bits, max and min"
            raise AttributeError(f"{self.format} has no {name}; it has {available}", name=name, obj=self)
        return value

    def _float(self, name: str) -> FloatFormat:
        return self._require(name, self.format if isinstance(self.format, FloatFormat) else None)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.format.bits

    @property
    def max(self) -> FactValue:
        """Largest finite value."""
        return self.format.max

    @property
    def min(self) -> FactValue:
        """Smallest (most negative) finite value."""
        return self.format.min

    @property
    def eps(self) -> FactValue:
        """Distance from 1 to the next larger value, 2^-m for m fraction bits."""
        return self._float("eps").eps

    @property
    def epsneg(self) -> FactValue:
        """Distance from 1 to the next smaller value, 2^(-m-1), or 2^-m if 1 is the smallest normal value."""
        return 2.0**self.negep

    @property
    def machep(self) -> int:
        """Exponent of `eps`, -m."""
        return -self._float("machep").frac_bits

    @property
    def negep(self) -> int:
        """Exponent of `epsneg`."""
        fmt = self._float("negep")
        return -fmt.frac_bits - (fmt.emin < 0)

    @property
    def tiny(self) -> FactValue:
        """As `smallest_normal`."""
        return self.smallest_normal

    @property
    def smallest_normal(self) -> FactValue:
        """Smallest positive value of full precision, 2^minexp."""
        return self._float("smallest_normal").smallest_normal

    @property
    def smallest_subnormal(self) -> FactValue:
        """Smallest positive subnormal value, 2^(minexp - m)."""
        return self._require("smallest_subnormal", self.format.smallest_subnormal)

    @property
    def maxexp(self) -> int:
        """Least power of two above the largest finite value, as an exponent."""
        return self._float("maxexp").emax + 1

    @property
    def minexp(self) -> int:
        """Exponent of the smallest normal value."""
        return self._float("minexp").emin

    @property
    def nmant(self) -> int:
        """Fraction bits m."""
        return self._float("nmant").frac_bits

    @property
    def nexp(self) -> int:
        """Exponent bits."""
        return self._float("nexp").exp_bits
