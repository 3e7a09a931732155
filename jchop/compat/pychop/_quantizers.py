"""Quantizers: classes that map arguments to specs, and their other words; the properties of formats by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_bool, check_choice, check_int
from jchop._core.rounding.grid import carrier_holds
from jchop._round.arguments import as_operands, convert_dtype
from jchop._round.flip import flip_bits
from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize, fit_scale, quantize
from jchop._storage._codes import load_codes, unpack_entries
from jchop.compat import _arrays
from jchop.compat.pychop.math_func import PYCHOP_METHODS, call_method
from jchop.formats import FixedFormat, FloatFormat, IntegerFormat, ScaledFormat
from jchop.matlab import CHOP_FORMATS, CHOP_ROUNDINGS, chop_float_format, chop_spec, int_if_whole, round_by_randfunc

#: Rounding of each ``rmode``, and its text name.
RMODES = CHOP_ROUNDINGS | {7: "nearest_zero", 8: "nearest_away", 9: "odd"}
RMODES[10] = "stochastic_equal"  # CADNA's: up or down with equal probability
RMODE_NAMES = {
    "nearest": 1, "plus_inf": 2, "minus_inf": 3, "toward_zero": 4, "towards_zero": 4, "stoc_prop": 5,
    "stoc_equal": 6, "cadna": 10,
}  # fmt: skip


def _rmode_number(rmode: Any, largest: int) -> int:
    number = RMODE_NAMES.get(rmode, rmode) if isinstance(rmode, str) else rmode
    if isinstance(number, bool) or number not in RMODES or (number > largest and rmode != "cadna"):
        names = ", ".join(repr(name) for name, value in RMODE_NAMES.items() if value <= largest)
        raise ValueError(f"rmode={rmode!r} must be an integer from 1 to {largest}, or one of {names}")
    return int(number)


class PychopQuantizer:
    """Base class of `Chop`, `FaultChop` and `Chopf`: rounds when called, with low-precision functions as methods."""

    rmode: int
    u: float

    def __init__(self, spec: Spec, random_state: int, verbose: int = 0) -> None:
        self.spec = spec
        self._draws = _arrays.SeedCounter(int_if_whole(random_state))
        if verbose:
            print(f"{spec}: unit roundoff {self.u:e}")

    def spec_for(self, dtype: str) -> Spec:
        """The spec of numbers of a dtype."""
        return self.spec

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> Any:
        """`x` rounded.

        Args:
            x: numbers of NumPy, JAX or torch; the result is of the same kind.
            key: a typed JAX key instead of the object's random numbers; required for a traced `x`.
        """
        x = _arrays.as_numbers(x)
        if isinstance(x, jax.Array) or not self._needs_float64(_arrays.dtype_name(x)):
            spec = self.spec_for(_arrays.dtype_name(x))
            return _arrays.round_any_array(x, spec, self._seed(spec, x, key), key)
        if _arrays.is_torch(x):
            return PychopQuantizer.__call__(self, x.double(), key=key).to(x.dtype)
        with np.errstate(over="ignore"):
            return PychopQuantizer.__call__(self, x.astype(np.float64), key=key).astype(x.dtype)

    def quantize(self, x: Any, *, key: jax.Array | None = None) -> Any:
        """The same as a call.

        Args:
            x: numbers.
            key: as in a call.
        """
        return self(x, key=key)

    def _seed(self, spec: Spec, x: Any, key: jax.Array | None) -> int | None:
        return self._draws.next(x) if spec.rounding.stochastic and key is None else None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in PYCHOP_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(call_method, self, name)

    def compute(
        self, function: Callable[..., Any], operands: tuple, key: jax.Array | None = None, exponents: tuple = ()
    ) -> Any:
        """A function of `jchop.math`, ``function(*operands, *exponents, spec, key)``.

        Args:
            function: function of the operands, a spec and a key.
            operands: numbers; the spec belongs to the dtype that they have together.
            key: as in a call.
            exponents: whole numbers, which are not rounded.
        """
        operands = tuple(_arrays.as_numbers(operand) for operand in operands)
        tracer = next((x for x in operands if isinstance(x, Tracer)), operands[0])
        seed = self._seed(self.spec, tracer, key)
        key = key if seed is None else _arrays.key_of_seed(seed)
        in_jax = any(isinstance(x, jax.Array) for x in operands)

        def run(*arrays: Any) -> Any:
            numbers, exponent_arrays = arrays[: len(operands)], arrays[len(operands) :]
            dtype = as_operands(["x"] * len(numbers), numbers, complex_too=True)[0].dtype
            # Functions of 16-bit numbers compute in float32.
            if in_jax or not self._needs_float64(dtype.name if dtype.itemsize > 2 else "float32"):
                return function(*numbers, *exponent_arrays, self.spec_for(dtype.name), key)
            wide = (convert_dtype(x, np.dtype("float64")) for x in numbers)
            results = function(*wide, *exponent_arrays, self.spec_for("float64"), key)
            return jax.tree.map(lambda y: _arrays.narrow_dtype(y, dtype) if y.dtype == np.float64 else y, results)

        return _arrays.apply_to_arrays(run, *operands, *map(_arrays.as_whole_numbers, exponents))

    def _needs_float64(self, dtype: str) -> bool:
        """Whether numbers of a dtype that JAX does not have are rounded in float64."""
        return False


class Chop(PychopQuantizer):
    """Floating point of any size: the ``Chop`` of Pychop 0.6, which its paper calls ``LightChop``.

    With a format's name or ``customs``, like the paper's ``Chop``, the constructor returns a `FaultChop`. For a format
    with a wider exponent range than the dtype, rounding and functions are in float64 (not for JAX arrays). Numbers
    beyond the dtype become infinite.

    Args:
        exp_bits: bits of the exponent.
        sig_bits: bits of the fraction.
        rmode: 1 to nearest, ties to even; 2 up; 3 down; 4 toward zero; 5 stochastic; 6 stochastic with equal
            probability. 7 and 8 to nearest, ties to zero and away; 9 to odd; 10 as 6.
        subnormal: whether there are subnormal numbers; without them numbers below the smallest normal one become zero.
        chunk_size: has no effect.
        random_state: the seed of the random modes.
        verbose: whether to print the unit roundoff.

    Example:
        >>> from jchop.compat.pychop import Chop
        >>> Chop(exp_bits=5, sig_bits=2)([1.1, 70000.0]).tolist()
        [1.0, inf]
        >>> float(Chop(5, 2, rmode=2).sin(1.0))  # 0.8415 upward
        0.875
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        is_paper_call = isinstance(args[0], str) if args else "exp_bits" not in options
        return super().__new__(FaultChop if cls is Chop and is_paper_call else cls)  # type: ignore[arg-type]

    def __getnewargs__(self) -> tuple[int, ...]:
        """Arguments for copies, which are created without the arguments of a `FaultChop`."""
        return (self.exp_bits, self.sig_bits)

    def __init__(
        self,
        exp_bits: int,
        sig_bits: int,
        rmode: int = 1,
        subnormal: bool = True,
        chunk_size: int = 800,
        random_state: int = 42,
        verbose: int = 0,
    ) -> None:
        self.exp_bits, self.sig_bits = int_if_whole(exp_bits), int_if_whole(sig_bits)
        self.subnormal = check_bool("subnormal", bool(subnormal))
        self.rmode = _rmode_number(rmode, 10)
        fmt = FloatFormat(self.exp_bits, self.sig_bits, subnormals=self.subnormal)
        self.u = 2.0**-(fmt.precision)
        super().__init__(Spec(fmt, RMODES[self.rmode], flush=not self.subnormal), random_state, verbose)

    def _needs_float64(self, dtype: str) -> bool:
        carrier = CARRIERS.get(dtype)
        return carrier is not None and not carrier_holds(self.spec_for(dtype), carrier)


@dataclass
class Customs:
    """A floating-point format: largest exponent and significand bits, or the bits of both fields.

    Args:
        emax: largest exponent; the smallest normal number is 2^(1 - emax).
        t: significand bits, including the leading one.
        exp_bits: bits of the exponent; the largest is then 2^(exp_bits - 1) - 1.
        sig_bits: bits of the fraction, t - 1.

    Example:
        >>> from jchop.compat.pychop import Customs, FaultChop
        >>> ways = (Customs(emax=15, t=11), Customs(exp_bits=5, sig_bits=10))
        >>> [float(FaultChop(customs=way, rmode=3)(0.1)) for way in ways]
        [0.0999755859375, 0.0999755859375]
    """

    emax: int | None = None
    t: int | None = None
    exp_bits: int | None = None
    sig_bits: int | None = None

    def params(self) -> tuple[int, int]:
        """Significand bits t and largest exponent emax.

        Raises:
            ValueError: if one is missing or out of range, or its two fields contradict each other.
        """
        exp_bits, emax, t = int_if_whole(self.exp_bits), int_if_whole(self.emax), int_if_whole(self.t)
        emax = emax if exp_bits is None else (1 << (check_int("exp_bits", exp_bits, 2, 16) - 1)) - 1
        t = t if self.sig_bits is None else int_if_whole(self.sig_bits) + 1
        check(emax is not None and t is not None, f"customs={self} must have emax or exp_bits, and t or sig_bits")
        if self.emax not in (None, emax):
            raise ValueError(f"customs={self}: exp_bits={exp_bits} is emax={emax}, not {self.emax}; pass one of them")
        check(self.t in (None, t), f"customs={self}: sig_bits={self.sig_bits} is t={t}, not {self.t}; pass one of them")
        return check_int("t", t, 1, 53), check_int("emax", emax, 1, (1 << 15) - 1)


class FaultChop(Chop):
    """MATLAB chop's arithmetic: Pychop's ``FaultChop``, the ``Chop`` of its paper.

    Args:
        prec: a format's name: ``"h"``, ``"b"``, ``"bf16"``, ``"q43"`` ... as in `jchop.matlab.chop`.
        subnormal: None (default): True, but False for ``"b"`` and ``"bfloat16"``.
        rmode: 1 to 6 as in `Chop` and 10, or ``"nearest"``, ``"plus_inf"``, ``"minus_inf"``, ``"toward_zero"``,
            ``"stoc_prop"``, ``"stoc_equal"``, ``"cadna"``. 5 does not overflow.
        flip: whether to flip, with probability `p`, a random significand bit of each result, like `jchop.flip_bits`.
        explim: whether the format limits exponents; otherwise only the data type does.
        p: probability of a flip.
        randfunc: a function of n that returns n numbers in [0, 1), for rmodes 5 and 6; NumPy only.
        customs: a `Customs`, in place of `prec`.
        random_state: the seed.
        verbose: whether to print the unit roundoff.

    Example:
        >>> from jchop.compat.pychop import FaultChop
        >>> FaultChop("q43", rmode="plus_inf")([1.1, 500.0]).tolist()
        [1.125, inf]
    """

    def __init__(
        self,
        prec: str = "h",
        subnormal: bool | None = None,
        rmode: int | str = 1,
        flip: bool = False,
        explim: int = 1,
        p: float = 0.5,
        randfunc: Callable[[int], Any] | None = None,
        customs: Customs | None = None,
        random_state: int = 0,
        verbose: int = 0,
    ) -> None:
        self.rmode = _rmode_number(rmode, 6) if rmode != 10 else 10
        if customs is None and prec not in CHOP_FORMATS:
            names = ", ".join(map(repr, CHOP_FORMATS))
            raise ValueError(f"prec={prec!r} must be one of {names}; customs=Customs(...) describes other formats")
        self.prec, self.subnormal, self.flip, self.explim, self.p = prec, subnormal, bool(flip), bool(explim), p
        self.randfunc, self.customs = randfunc, customs
        name, params = (prec, None) if customs is None else ("custom", customs.params())
        self.t, self.emax = params or CHOP_FORMATS.get(prec, (0, 0))
        mode = 6 if self.rmode == 10 else self.rmode
        subnormals = None if subnormal is None else bool(subnormal)
        self._chop_arguments = (name, subnormals, mode, self.explim, params)
        self.u = 2.0**-self.t
        PychopQuantizer.__init__(self, chop_spec(*self._chop_arguments, "float64"), random_state, verbose)

    def __getnewargs__(self) -> tuple[int, ...]:
        """No arguments."""
        return ()

    def spec_for(self, dtype: str) -> Spec:
        """The spec of numbers of a dtype.

        Args:
            dtype: its name.
        """
        return chop_spec(*self._chop_arguments, dtype)

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> Any:
        """`x` rounded.

        Args:
            x: numbers.
            key: as for `Chop`.
        """
        x = _arrays.as_numbers(x)
        spec = self.spec_for(_arrays.dtype_name(x))
        if self.randfunc is not None and spec.rounding.stochastic:
            if _arrays.is_torch(x) or isinstance(x, jax.Array):
                raise TypeError(f"randfunc is for NumPy arrays; x is a {type(x).__name__}")
            result = round_by_randfunc(np.asarray(x), spec, self.randfunc)
        else:
            result = super().__call__(x, key=key)
        if not self.flip:
            return result
        if _arrays.is_torch(result) and result.requires_grad:
            raise ValueError("flip=True has no gradient for tensors; use torch.no_grad()")
        key = _arrays.key_of_seed(self._draws.next(x)) if key is None else key
        return _arrays.apply_to_arrays(lambda array: flip_bits(array, Spec(spec.format), self.p, key), result)


class Chopf(PychopQuantizer):
    """Fixed point, saturating.

    Args:
        ibits: integer bits, including the sign.
        fbits: fraction bits.
        rmode: 1 to 6 as in `Chop`.
        random_state: the seed of rmodes 5 and 6.

    Example:
        >>> from jchop.compat.pychop import Chopf
        >>> Chopf(ibits=4, fbits=4)([0.1, 100.0]).tolist()
        [0.125, 7.9375]
    """

    def __init__(self, ibits: int = 4, fbits: int = 4, rmode: int | str = 1, *, random_state: int = 42) -> None:
        self.ibits, self.fbits, self.rmode = int_if_whole(ibits), int_if_whole(fbits), _rmode_number(rmode, 6)
        self.u = 2.0 ** -(self.fbits + 1)
        super().__init__(Spec(FixedFormat(self.ibits, self.fbits), RMODES[self.rmode]), random_state)


# -- integers ----------------------------------------------------------------------------------------------------------


class Chopi:
    """Integers under a scale.

    Args:
        bits: width of a code, 2 to 8.
        symmetric: signed codes under a scale, amax / (2^(bits - 1) - 1); else codes from 0 with a zero point.
        per_channel: whether each index of an axis has a separate scale.
        axis: that axis.
        num_bits: the name of `bits` in earlier versions.
        channel_dim: the name of `axis` in earlier versions.

    Example:
        >>> import numpy as np
        >>> from jchop.compat.pychop import Chopi
        >>> ch = Chopi(bits=8, symmetric=False)
        >>> codes = ch.quantize(np.array([[0.1, -0.2], [0.3, 0.4]]))
        >>> codes.tolist()
        [[128, 0], [213, 255]]
        >>> [[round(x, 4) for x in row] for row in ch.dequantize(codes).tolist()]
        [[0.1012, -0.2], [0.3012, 0.4]]
    """

    def __init__(
        self,
        bits: int = 8,
        symmetric: bool = False,
        per_channel: bool = False,
        axis: int = 0,
        *,
        num_bits: int | None = None,
        channel_dim: int | None = None,
    ) -> None:
        bits = int_if_whole(bits if num_bits is None else num_bits)
        axis = int_if_whole(axis if channel_dim is None else channel_dim)
        self.bits, self.symmetric = check_int("bits", bits, 2, 8), check_bool("symmetric", symmetric)
        self.per_channel, self.axis = check_bool("per_channel", per_channel), axis
        self.qmin, self.qmax = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if symmetric else (0, (1 << bits) - 1)
        self.scale: Any = None
        self.zero_point: Any = None
        self._fixed = False
        self._dtype: Any = None

    def spec_for(self, x: Any) -> Spec:
        """The spec of an array; a vector has no channels.

        Args:
            x: the array.
        """
        channel = self.axis if self.per_channel and x.ndim > 1 else None
        element = IntegerFormat(self.bits, signed=self.symmetric)
        return Spec(ScaledFormat(element, channel=channel, zero_point=None if self.symmetric else "integer"))

    def calibrate(self, x: Any) -> None:
        """Choose scale and zero point for `x`, and keep them for all later arrays.

        Args:
            x: numbers.
        """
        _arrays.apply_to_arrays(self._fit, _arrays.as_numbers(x))
        self._fixed = True

    def _fit(self, x: Any) -> Any:
        # Not converted to tensors, as in `quantize`.
        self.scale, self.zero_point = fit_scale(x, self.spec_for(x))
        return self.scale

    def quantize(self, x: Any) -> Any:
        """The codes of `x`, as int8 or uint8, under its own scale unless `calibrate` chose one.

        Args:
            x: numbers.
        """
        return _arrays.apply_to_arrays(self._codes, _arrays.as_numbers(x))

    def _codes(self, x: Any) -> Any:
        qarray = self._as_qarray(x)
        self.scale, self.zero_point = qarray.scale, qarray.zero_point
        self._dtype = np.promote_types(x.dtype, qarray.scale.dtype)
        fmt = qarray.spec.element
        codes = unpack_entries(load_codes(qarray.qvalue, fmt), fmt, x.shape[-1] if x.ndim else 1)
        if not self.symmetric:
            return codes
        return ((codes.astype("int32") ^ -self.qmin) + self.qmin).astype("int8")

    def _as_qarray(self, x: Any) -> QArray:
        if self._fixed:
            return quantize(x, self.spec_for(x), scale=self.scale, zero_point=self.zero_point)
        return quantize(x, self.spec_for(x))

    def dequantize(self, codes: Any) -> Any:
        """The numbers of codes, under the scale of the last quantized array.

        Args:
            codes: a result of `quantize`.

        Raises:
            ValueError: if no array was quantized.
        """
        check(self.scale is not None, "no array was quantized, so there is no scale to dequantize with")
        shift = 0 if self.zero_point is None else self.zero_point
        dtype = self.scale.dtype if self._dtype is None else self._dtype
        return _arrays.apply_to_arrays(lambda array: (array.astype("int32") - shift).astype(dtype) * self.scale, codes)

    def __call__(self, x: Any) -> Any:
        """`x` rounded to the values of its codes.

        Args:
            x: numbers.
        """
        x = _arrays.as_numbers(x)
        if self._fixed:
            return _arrays.apply_to_arrays(lambda array: dequantize(self._as_qarray(array)), x)
        return _arrays.round_any_array(x, self.spec_for(x))


# -- the arguments of the paper's layers and optimizers, instead of a quantizer ----------------------------------------

_FLOAT_WORDS = {"exp_bits": "exp_bits", "sig_bits": "sig_bits", "rmode": "rmode"}
_FIXED_WORDS = {"ibits": "ibits", "fbits": "fbits", "int_bits": "ibits", "frac_bits": "fbits", "rmode": "rmode"}


@dataclass(frozen=True)
class QuantizerWords:
    """The arguments of the classes of one prefix, in place of ``chop=``.

    Args:
        kind: the class of the quantizer.
        names: the quantizer's argument for each word.
        defaults: default arguments of the quantizer; without defaults and words there is no quantizer.
    """

    kind: Callable[..., Any]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def quantizer(self, chop: Any, options: dict[str, Any]) -> Any:
        """`chop`, or the quantizer of the words in `options`, which are removed from it.

        Raises:
            TypeError: if both are given, or an argument twice.
        """
        given_names = [name for name in self.names if name in options]
        if not given_names:
            return self.kind(**self.defaults) if chop is None and self.defaults else chop
        if chop is not None:
            raise TypeError(f"chop= and {given_names[0]}= both define the quantizer; pass one of them")
        arguments = {self.names[name]: options.pop(name) for name in given_names}
        if len(arguments) < len(given_names):
            raise TypeError(f"{' and '.join(given_names)} set an argument of {self.kind.__name__} twice")
        return self.kind(**{**self.defaults, **arguments})


QUANTIZER_WORDS = {
    "Quantized": QuantizerWords(Chop, _FLOAT_WORDS),
    "IQuantized": QuantizerWords(Chopi),
    "FPQuantized": QuantizerWords(Chopf, _FIXED_WORDS, {"ibits": 8, "fbits": 8}),
    "IntQuantized": QuantizerWords(Chopi, {"num_bits": "bits"}, {"bits": 8, "symmetric": True}),
}


def class_lookup(base: type, library: Any, torch_names: Mapping[str, str], texts: Mapping[str, str]) -> Any:
    """The function ``__getattr__`` of a module that has a class for each prefix and name, made when first used.

    Args:
        base: the first base of the classes, of the module; they have ``prefix`` and ``of``, the name in torch.
        library: a module of torch, which has the second base.
        torch_names: the name in torch for each name after a prefix.
        texts: the docstring of classes, by their prefix, with a place for the name in torch.
    """
    names = {prefix + name: (prefix, of) for prefix in texts for name, of in torch_names.items()}

    @lru_cache(maxsize=len(names))
    def load(name: str) -> type:
        if name not in names:
            raise AttributeError(f"module {base.__module__!r} has no attribute {name!r}")
        prefix, of = names[name]
        body = {"__doc__": texts[prefix].format(of), "__module__": base.__module__, "prefix": prefix, "of": of}
        return type(name, (base, getattr(library, of)), body)

    return load


# -- properties of formats, in Pychop's order --------------------------------------------------------------------------

FloatParams = tuple[float, float, float, float, int, int, int, int]


def float_params(prec: str | None = None, binary: bool = False) -> FloatParams | dict[str, Any]:
    """(u, xmins, xmin, xmax, p, emins, emin, emax) of a format: MATLAB chop's ``float_params``.

    Args:
        prec: a format's name, as in `jchop.matlab.chop`. Default None: a dict of all formats by name.
        binary: whether the dict has texts of the nearest powers of two, like ``"2^-11"``, in place of the first four
            numbers. Default False. It has no effect on one format.

    Returns:
        Unit roundoff, smallest positive and smallest normal value, largest value, significand bits, and the exponents
        of these three values, emins, emin and emax.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> from jchop.compat.pychop import float_params
        >>> float_params("q43")
        (0.0625, 0.001953125, 0.015625, 240.0, 4, -9, -6, 7)
    """
    check_bool("binary", binary)
    if prec is None:
        table = {name: _params_of(*facts) for name, facts in CHOP_FORMATS.items()}
        if binary:
            table = {name: (*(f"2^{round(math.log2(x))}" for x in row[:4]), *row[4:]) for name, row in table.items()}
        return table
    return _params_of(*CHOP_FORMATS[check_choice("prec", prec, tuple(CHOP_FORMATS))])


def _params_of(t: int, emax: int) -> FloatParams:
    fmt = chop_float_format(t, emax)
    xmins, xmin, xmax = (float(value) for value in (fmt.smallest, fmt.smallest_normal, fmt.max))
    return 2.0**-t, xmins, xmin, xmax, t, fmt.emin - fmt.frac_bits, fmt.emin, fmt.emax
