"""Pychop's integers: codes under a scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from jchop._common.checks import check_bool, check_int
from jchop._spec.spec import Spec
from jchop.compat._arrays import apply_to_arrays, as_numbers, round_any_array
from jchop.formats import IntegerFormat, ScaledFormat
from jchop.matlab import int_if_whole
from jchop.storage import QArray, dequantize, fit_scale, quantize
from jchop.storage._codes import load_codes, unpack_entries


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
        bits, axis = (
            int_if_whole(bits if num_bits is None else num_bits),
            int_if_whole(axis if channel_dim is None else channel_dim),
        )
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
        apply_to_arrays(self._fit, as_numbers(x))
        self._fixed = True

    def _fit(self, x: Any) -> Any:
        # Not converted to tensors, like those of `quantize`.
        self.scale, self.zero_point = fit_scale(x, self.spec_for(x))
        return self.scale

    def quantize(self, x: Any) -> Any:
        """The codes of `x`, as int8 or uint8, under its own scale unless `calibrate` chose one.

        Args:
            x: numbers.
        """
        return apply_to_arrays(self._codes, as_numbers(x))

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
        if self.scale is None:
            raise ValueError("no array was quantized, so there is no scale to dequantize with")
        shift = 0 if self.zero_point is None else self.zero_point
        dtype = self.scale.dtype if self._dtype is None else self._dtype
        return apply_to_arrays(lambda array: (array.astype("int32") - shift).astype(dtype) * self.scale, codes)

    def __call__(self, x: Any) -> Any:
        """`x` rounded to the values of its codes.

        Args:
            x: numbers.
        """
        x = as_numbers(x)
        if self._fixed:
            return apply_to_arrays(lambda array: dequantize(self._as_qarray(array)), x)
        return round_any_array(x, self.spec_for(x))
