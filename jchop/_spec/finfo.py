"""The facts of a format under the names of `jax.numpy.finfo`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat
from jchop.formats._base import short_number

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

        def __init__(self, format: Spec | ElementFormat | ScaledFormat | str) -> None: ...

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
