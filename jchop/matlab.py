"""MATLAB's ``chop(x, options)`` of N. J. Higham and S. Pranesh.

*Simulating Low Precision Floating-Point Arithmetic*, SIAM J. Sci. Comput. 41(5), 2019; the function of MATLAB is at
https://github.com/higham/chop. docs/matlab.md shows how to call this function from MATLAB. Intended differences:

* A number is rounded once. Between 0 and the smallest number MATLAB's function rounds to nearest twice: first as if
  smaller numbers existed, then to 0 or the smallest number. This is the smallest subnormal one, or with ``subnormal``
  0 the smallest normal one. So a number just below half of it may round up to it.
* Ties at half the smallest number go to the even neighbour, 0, also with ``subnormal`` 0, for which MATLAB's go to the
  smallest normal number. Below the smallest number, the stochastic modes round up with the right probability; MATLAB's
  never round up there.
* -0 stays -0, and NaN NaN.
* There is no global generator and there are no global options: random options require ``seed``, or ``randfunc`` for the
  rounding. The options are not returned, and a call with an empty `x` sets nothing.
* ``round`` 6 rounds numbers between the largest one and 2^(emax + 1) to infinity with probability 1/2. MATLAB's rounds
  all of them to infinity from half a unit above the largest on. ``round`` 5 does not overflow in either.
* ``params`` takes up to 53 bits of significand.
* With ``explim`` 0 the data type sets the range; below its smallest normal number the distance of values is the same as
  just above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import as_numpy, check, check_choice, check_int
from jchop._common.settings import always_jit
from jchop._core.rounding.elements import round_to_spec
from jchop._round.flip import flip_bits
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat

__all__ = ["chop"]

#: Significand bits t (including the leading one) and largest exponent emax of each format.
CHOP_FORMATS = {
    **dict.fromkeys(("q43", "fp8-e4m3"), (4, 7)),
    **dict.fromkeys(("q52", "fp8-e5m2"), (3, 15)),
    **dict.fromkeys(("b", "bfloat16", "bf16"), (8, 127)),
    **dict.fromkeys(("h", "half", "fp16"), (11, 15)),
    **dict.fromkeys(("t", "tf32"), (11, 127)),
    **dict.fromkeys(("s", "single", "fp32"), (24, 127)),
    **dict.fromkeys(("d", "double", "fp64"), (53, 1023)),
}
_CUSTOM_NAMES = ("c", "custom")
#: Formats without subnormal numbers by default.
FORMATS_WITHOUT_SUBNORMALS = ("b", "bfloat16")
#: The rounding of each number of ``round``.
CHOP_ROUNDINGS = {1: "nearest_even", 2: "up", 3: "down", 4: "toward_zero", 5: "stochastic", 6: "stochastic_equal"}
_OPTION_NAMES = ("format", "subnormal", "round", "flip", "p", "explim", "params", "randfunc", "seed")
_EXPONENT_BITS = {"float32": 8, "float64": 11}


def chop(x: Any, options: Any = None, /, **more: Any) -> Any:
    """`x` rounded to a lower precision, like MATLAB's ``chop(x, options)``.

    Args:
        x: single or double precision numbers as passed by MATLAB: a float, an ``array.array``, a memoryview or an array
            in Fortran order; any shape.
        options: a dict (from a MATLAB struct), or an object with attributes. A missing, None or empty option has its
            default:

            * ``format``: ``'h'`` (default; ``'half'``, ``'fp16'``), ``'b'`` (``'bfloat16'``), ``'t'`` (``'tf32'``),
              ``'s'`` (``'single'``, ``'fp32'``), ``'d'`` (``'double'``, ``'fp64'``), ``'q43'`` (``'fp8-e4m3'``),
              ``'q52'`` (``'fp8-e5m2'``), or ``'c'`` (``'custom'``), which ``params`` describes.
            * ``params``: ``[t, emax]``, significand bits with the leading one, and the largest exponent; the smallest
              normal number is 2^(1 - emax).
            * ``subnormal``: 1 (default) for gradual underflow, 0 for none; 0 is the default of ``'b'``.
            * ``round``: 1 to nearest, ties to even (default); 2 toward +inf; 3 toward -inf; 4 toward zero. At random: 5
              up or down, the nearer with the larger probability; 6 with equal probability.
            * ``explim``: 1 (default); 0 for the exponent range of the data type.
            * ``flip``: 1 flips with probability ``p`` (default 0.5) a random significand bit of each rounded number,
              like `jchop.flip_bits`. Default 0.
            * ``randfunc``: a function of n that returns n numbers in [0, 1) for ``round`` 5 and 6: one for each
              element, in MATLAB's (Fortran) order. A number below the discarded fraction (for 6: below 0.5) rounds
              away.
            * ``seed``: an integer from which the random bits are drawn, unless ``randfunc`` is given.
        more: options by name; they override the fields of `options`.

    Returns:
        NumPy numbers of the shape and precision of `x`, in Fortran order if `x` is.

    Raises:
        TypeError: for other data, or an option of the wrong type.
        ValueError: for an unknown option or value, or a random option without ``seed`` or ``randfunc``.

    Example:
        >>> import jchop.matlab
        >>> jchop.matlab.chop([1 / 3, 1e6], {"format": "h", "round": 4.0}).tolist()
        [0.333251953125, 65504.0]
        >>> float(jchop.matlab.chop(1.1, {"format": "custom", "params": [3, 7]}, round=2))
        1.25
    """
    settings = _chop_options(options, more)
    array = as_numpy("x", x)
    if array.dtype.name not in _EXPONENT_BITS:
        raise TypeError(f"x has dtype {array.dtype}, but must be of single or double precision")
    seed = _integer_option(settings, "seed", 0)
    key = None if seed is None else jax.random.key(seed)
    mode = _integer_option(settings, "round", 1, 6, default=1)
    subnormal, explim = _switch_option(settings, "subnormal", None), bool(_switch_option(settings, "explim", True))
    name, params = settings.get("format", "h"), settings.get("params")
    spec = chop_spec(name, subnormal, mode, explim, params, array.dtype.name)
    randfunc = settings.get("randfunc")
    draws = spec.rounding.stochastic
    if draws and randfunc is not None:
        result = round_by_randfunc(array, spec, randfunc)
    else:
        check(key is not None or not draws, "round 5 and 6 draw random numbers: pass seed or randfunc")
        result = round_to_format(array, spec, key)
    if _switch_option(settings, "flip", False):
        if key is None:
            raise ValueError("flip=1 flips bits at random: pass seed")
        result = flip_bits(result, Spec(spec.format), settings.get("p", 0.5), key)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return np.asarray(result, order=order) if array.ndim else result[()]


def chop_spec(name: Any, subnormal: bool | None, mode: Any, explim: bool, params: Any, dtype: str) -> Spec:
    """The spec for options of *chop* and data of a dtype, which bounds the exponents if `explim` is False."""
    check_choice("format", name, (*CHOP_FORMATS, *_CUSTOM_NAMES))
    bits, emax = _custom_params(params) if name in _CUSTOM_NAMES else CHOP_FORMATS[name]
    if subnormal is None:
        subnormal = name not in FORMATS_WITHOUT_SUBNORMALS
    if explim:
        fmt = chop_float_format(bits, emax, subnormal)
    else:
        fmt = FloatFormat(_EXPONENT_BITS.get(dtype, 8), bits - 1, subnormals=subnormal)
    return Spec(fmt, CHOP_ROUNDINGS[mode], "propagate" if mode == 5 else "ieee")


def chop_float_format(bits: int, emax: int, subnormals: bool = True) -> FloatFormat:
    """The format of `bits` significand bits, including the leading one, with exponents from 1 - emax to emax."""
    return FloatFormat((2 * emax + 1).bit_length(), bits - 1, bias=emax, max_exponent=emax, subnormals=subnormals)


def _custom_params(params: Any) -> tuple[int, int]:
    values = [] if params is None else np.asarray(params, float).ravel().tolist()
    check(len(values) == 2, f"params={params!r} must be [t, emax], which format 'custom' needs")
    bits, emax = (check_int(name, int_if_whole(value), 1) for name, value in zip(("t", "emax"), values, strict=True))
    check(bits <= 53, f"params=[{bits}, {emax}] must have t from 1 to 53")
    return bits, emax


# -- options -----------------------------------------------------------------------------------------------------------


def _chop_options(options: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The given options by name, without empty ones."""
    given = options or {} if isinstance(options, Mapping | None) else getattr(options, "__dict__", None)
    if given is None:
        raise TypeError(f"options={options!r} must be a dict, or an object with attributes")
    settings = {**given, **more}
    for name in settings:
        if name not in _OPTION_NAMES:
            raise ValueError(f"option {name!r} is not known; allowed: {', '.join(_OPTION_NAMES)}")
    return {name: value for name, value in settings.items() if value is not None and np.size(value) and value != ""}


def int_if_whole(value: Any) -> Any:
    """A float that is a whole number as an int, because MATLAB passes integers as floats."""
    return int(value) if isinstance(value, float | np.floating) and float(value).is_integer() else value


def _integer_option(settings: dict[str, Any], name: str, low: int, high: int | None = None, default: Any = None) -> Any:
    return check_int(name, int_if_whole(settings[name]), low, high) if name in settings else default


def _switch_option(settings: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    if name not in settings:
        return default
    value = int_if_whole(settings[name])
    if not isinstance(value, bool | np.bool_ | int | np.integer) or value not in (0, 1):
        raise ValueError(f"{name}={settings[name]!r} must be 0 or 1")
    return bool(value)


# -- numbers -----------------------------------------------------------------------------------------------------------


def round_by_randfunc(x: np.ndarray, spec: Spec, randfunc: Callable[[int], Any]) -> np.ndarray:
    """`x` rounded with the numbers of `randfunc` instead of random bits."""
    uniforms = as_numpy(f"randfunc({x.size})", randfunc(x.size)).astype(np.float64).ravel(order="F")
    if uniforms.size != x.size or not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError(f"randfunc({x.size}) must return {x.size} numbers in [0, 1)")
    width = 8 * x.dtype.itemsize
    # The result is rounded away if word + floor(fraction 2^width) carries, so a smaller number becomes a larger word.
    words = ~np.ldexp(uniforms, width).astype(f"uint{width}")
    with jax.enable_x64(True):
        return np.array(_round_with_word(x, words.reshape(x.shape, order="F"), spec))


@partial(always_jit, static_argnums=2)
def _round_with_word(x: jax.Array, word: jax.Array, spec: Spec) -> jax.Array:
    return round_to_spec(x, spec, CARRIERS[x.dtype.name], word)
