"""Scaled formats: an element format, groups of elements that share a scale, and how the scales are chosen and kept."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jchop._checks import check_bool
from jchop.formats._base import ElementFormat
from jchop.formats._catalogue import (
    binary32,
    float4_e2m1fn,
    float6_e2m3fn,
    float6_e3m2fn,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
)
from jchop.formats._codebook import CodebookFormat
from jchop.formats._fixed import FixedFormat, IntegerFormat
from jchop.formats._float import FloatFormat
from jchop.formats._grouping import PERCENTILE, Group, as_axes, as_groups, as_rule, axis_indexes, same_count
from jchop.formats._tables import dynamic_levels, nf4_levels
from jchop.formats._text import CALL, options_of, parse_element, split_options, truth_of, unknown

#: The widest zero points are those of integers of so many bits.
MOST_SHIFTED_BITS = 16


@dataclass(frozen=True)
class ScaledFormat:
    """Elements e of a format, in groups that share a scale s > 0: the values s e, or s (e - z) with a zero point z.

    The scale comes from the data, so a value is rounded as one of its group. Infinities and NaN do not count when a
    scale is chosen; then they obey the element's overflow rule, and a NaN without a code becomes the largest element.
    A group without a finite number other than zero has scale 1.

    A scaled format is callable: ``fmt(group=64)`` is the format with that changed.

    Args:
        element: what x / s (or x / s + z) is rounded to, once: an element format, or its text.
        group: how many consecutive elements along `axis` share a scale, the last group of a row maybe fewer; ``"all"``
            for the whole axis; or one such for each of several axes (tiles). Default None, with no `channel` either:
            the whole tensor, also written ``"tensor"``.
        axis: of `group`, an axis or one for each group. Default -1, and for n groups the last n axes.
        channel: an axis, or several, each index of which has a scale of its own, shared over all other axes.
        scale: format of the scales, or its text. Default binary32. A ScaledFormat quantizes the scales again: the
            scale is rounded to binary32, quantized under it to nearest and never to zero.
        rule: one of `SCALE_RULES`; ``"percentile(99.9)"`` takes up to two decimals. Default "absmax", and "minmax" with
            `zero_point`.
        zero_point: shift integers by z = clamp(m - rne((least x) / s)), for numbers that lie about anything but 0.
        nan_block: a group that holds an infinity or NaN, or asks for a larger scale than there is, becomes NaN as a
            whole (OCP MX 1.0, 5.3).

    Raises:
        TypeError, ValueError: for a field out of range, or a combination that says nothing.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.ScaledFormat("int4", group=128, scale="bfloat16")
        >>> str(fmt), fmt.bits_per_element(), fmt.scale_shape((3, 300))
        ('int4(group=128,scale=bfloat16)', 4.125, (3, 3))
    """

    element: ElementFormat
    group: Group | tuple[Group, ...] | None = None
    axis: int | tuple[int, ...] = -1
    channel: int | tuple[int, ...] | None = None
    scale: FloatFormat | ScaledFormat = binary32
    rule: str = None  # type: ignore[assignment]
    zero_point: bool = False
    nan_block: bool = False

    #: The named format that this one was called from, and the name of a named one: for `str` alone.
    base: ClassVar[ScaledFormat | None] = None
    name: ClassVar[str | None] = None

    if TYPE_CHECKING:  # what may be given is more than what is stored

        def __init__(
            self,
            element: ElementFormat | str,
            group: Group | Literal["tensor"] | Sequence[Group] | None = ...,
            axis: int | Sequence[int] = ...,
            channel: int | Sequence[int] | None = ...,
            scale: FloatFormat | ScaledFormat | str = ...,
            rule: str | None = ...,
            zero_point: bool = ...,
            nan_block: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_bool("zero_point", self.zero_point)
        check_bool("nan_block", self.nan_block)
        stored = {
            "element": _as_format("element", self.element, ElementFormat),
            "scale": _as_format("scale", self.scale, FloatFormat | ScaledFormat),
            "channel": None if self.channel is None else as_axes("channel", self.channel),
            "rule": as_rule(self.rule, self.zero_point),
        }
        stored["group"], stored["axis"] = as_groups(self.group, self.axis)
        for name, value in stored.items():
            object.__setattr__(self, name, value)
        for check in (self._check_grouping, self._check_zero_point, self._check_rule, self._check_scale):
            check()

    def __call__(self, **changes: Any) -> ScaledFormat:
        """This format with fields changed; a `channel` takes the place of a group, and the reverse.

        Args:
            changes: fields by name.

        Example:
            >>> import jchop as jc
            >>> str(jc.mxfp4(axis=0)), str(jc.int8(channel=0))
            ('mxfp4(axis=0)', 'int8(channel=0)')
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name, value in changes.items():
            if name not in known:
                raise TypeError(f"{name}={value!r} is no field of a scaled format; allowed: {', '.join(known)}")
        given = set(changes)
        if "channel" in given and "group" not in given:
            changes |= {"group": None} | ({} if "axis" in given else {"axis": -1})
        elif "group" in given and "channel" not in given:
            changes["channel"] = None
        if "group" in given and "axis" not in given and not same_count(changes["group"], self.axis):
            changes["axis"] = -1
        if changes.get("zero_point", self.zero_point) != self.zero_point and "rule" not in given:
            changes["rule"] = None
        result = dataclasses.replace(self, **changes)
        object.__setattr__(result, "base", None if "element" in given else self.base)
        return result

    # -- checks --------------------------------------------------------------------------------------------------------
    def _check_grouping(self) -> None:
        if self.channel is not None and self.group is not None:
            raise ValueError(f"channel={self.channel} and group={self.group} exclude each other")
        if self.group is None and self.axis != -1:
            raise ValueError(f"axis={self.axis} is the axis of a group; without group= it says nothing")

    def _check_zero_point(self) -> None:
        if self.zero_point != (self.rule == "minmax"):
            raise ValueError(f"zero_point={self.zero_point} with rule={self.rule!r}: zero points go with rule='minmax'")
        if not self.zero_point:
            return
        if not isinstance(self.element, IntegerFormat) or self.element.bits > MOST_SHIFTED_BITS:
            raise ValueError(
                f"zero_point=True needs an integer element of at most {MOST_SHIFTED_BITS} bits, "
                f"not element={self.element}"
            )

    def _check_rule(self) -> None:
        fmt = self.element
        if fmt.max <= 0:
            raise ValueError(f"element={fmt} has no positive value to scale to")
        if self.rule in ("half_range", "no_clip") and not fmt.min < 0:
            raise ValueError(f"rule={self.rule!r} needs an element format with negative values, not element={fmt}")
        if self.rule == "even" and isinstance(fmt, CodebookFormat):
            raise ValueError(f"rule='even' needs an element format with fraction bits, not element={fmt}")

    def _check_scale(self) -> None:
        scale = self.scale
        if isinstance(scale, FloatFormat):
            if scale.max < 1:
                raise ValueError(f"scale={scale} has no number from 1 on, and scales need one")
            if self.nan_block and not scale.has_nan:
                raise ValueError(f"nan_block=True needs a scale format with a NaN, not scale={scale}")
            if self.nan_block and (self.zero_point or self.percentile is not None or self.rule == "mse"):
                raise ValueError(f"nan_block=True does not go with rule={self.rule!r}")
            return
        if isinstance(scale.scale, ScaledFormat) or scale.zero_point or scale.nan_block or scale.rule == "two_level":
            raise ValueError(f"scale={scale} must have scales of its own that are numbers, without zero_point, "
                             "nan_block or rule='two_level'")  # fmt: skip
        if scale.element.bits > 8:
            raise ValueError(f"scale={scale} has codes of {scale.element.bits} bits; at most 8 are stored")
        if self.nan_block or self.rule == "two_level":
            raise ValueError(f"scale={scale} is quantized again: nan_block and rule='two_level' do not go with that")

    # -- groups --------------------------------------------------------------------------------------------------------
    def group_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How far a group extends along each axis of an array: 1, a block's size, or the whole axis.

        Args:
            shape: of the array.

        Raises:
            ValueError: for an array without the axes that the format names.

        Example:
            >>> import jchop as jc
            >>> jc.int8(channel=0).group_shape((3, 4, 5)), jc.mxfp4.group_shape((8, 100))
            ((1, 4, 5), (1, 32))
        """
        whole = tuple(max(size, 1) for size in shape)
        if self.group is None:
            sizes = list(whole)
            for axis in axis_indexes("channel", self.channel, shape) if self.channel is not None else ():
                sizes[axis] = 1
            return tuple(sizes)
        sizes = [1] * len(shape)
        groups = self.group if isinstance(self.group, tuple) else (self.group,)
        for axis, group in zip(axis_indexes("axis", self.axis, shape), groups, strict=True):
            sizes[axis] = min(group, whole[axis]) if isinstance(group, int) else whole[axis]
        return tuple(sizes)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of an array: one for each group, in as many axes.

        Args:
            shape: of the array.

        Example:
            >>> import jchop as jc
            >>> jc.int4(group=(2, 128)).scale_shape((5, 3, 128)), jc.int8.scale_shape((5, 3))
            ((5, 2, 1), (1, 1))
        """
        return tuple(-(-size // group) for size, group in zip(shape, self.group_shape(shape), strict=True))

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def bits(self) -> int:
        """Width of an element's code in bits."""
        return self.element.bits

    @property
    def percentile(self) -> Fraction | None:
        """The q of the rule "percentile(q)"; None for another rule."""
        found = PERCENTILE.fullmatch(self.rule)
        return Fraction(found[1]) if found else None

    @property
    def is_two_part(self) -> bool:
        """Whether a stored scale has two parts: under the rule "two_level", and where scales are quantized again."""
        return self.rule == "two_level" or isinstance(self.scale, ScaledFormat)

    def bits_per_element(self, shape: Sequence[int] | None = None) -> float:
        """Bits of an element with its share of scales and zero points (of 32 bits each).

        Args:
            shape: of the array. Default None: any large one of whole groups, of which a scale of a whole axis or tensor
                takes no share.

        Example:
            >>> import jchop as jc
            >>> jc.nvfp4.bits_per_element(), jc.int8(channel=0).bits_per_element((4, 100))
            (4.5, 8.32)
        """
        if shape is not None:
            count, scales = math.prod(shape), math.prod(self.scale_shape(shape))
            if isinstance(self.scale, ScaledFormat):
                scale_bits = scales * self.scale.bits_per_element(self.scale_shape(shape)) if scales else 0.0
            else:
                scale_bits = scales * self.scale.bits + 32 * (self.rule == "two_level")
            return self.bits + (scale_bits + 32 * self.zero_point * scales) / count if count else float(self.bits)
        groups = self.group if isinstance(self.group, tuple) else (self.group,)
        sizes = [group for group in groups if isinstance(group, int)]
        if len(sizes) < len(groups):
            return float(self.bits)
        each = self.scale.bits_per_element() if isinstance(self.scale, ScaledFormat) else self.scale.bits
        return self.bits + (each + 32 * self.zero_point) / math.prod(sizes)

    # -- text ----------------------------------------------------------------------------------------------------------
    @property
    def text(self) -> str:
        """The format in the text grammar: its element with options, or a name with what is different from it."""
        base = self.base or ScaledFormat(self.element)
        rule = base.rule if self.zero_point == base.zero_point else as_rule(None, self.zero_point)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in fields.items() if value != getattr(base, name)}
        if self.rule == rule:
            changed.pop("rule", None)
        if self.channel is not None:
            changed = {name: value for name, value in changed.items() if name not in ("group", "axis")}
        elif self.group is None and (base.group is not None or self.base is None):
            changed = {"group": "tensor"} | {name: value for name, value in changed.items() if name != "group"}
        options = ",".join(f"{name}={_shown(value)}" for name, value in changed.items())
        stem = self.base.name if self.base is not None else str(self.element)
        assert stem is not None
        return f"{stem[:-1]},{options})" if stem.endswith(")") else f"{stem}({options})" if options else stem

    def __str__(self) -> str:
        return self.text

    def named(self, name: str) -> ScaledFormat:
        """A copy that prints as `name`, which the text grammar has to know, and so do the formats called from it."""
        result = copy.copy(self)
        object.__setattr__(result, "name", name)
        object.__setattr__(result, "base", result)
        return result


def _shown(value: object) -> str:
    """An option's value in text."""
    if isinstance(value, tuple):
        return f"({','.join(map(_shown, value))})"
    return str(value).lower()


def _as_format(name: str, value: object, kinds: Any) -> Any:
    fmt = parse_format(value) if isinstance(value, str) else value
    if not isinstance(fmt, kinds):
        what = "an element format" if kinds is ElementFormat else "a FloatFormat or ScaledFormat"
        raise TypeError(f"{name}={value!r} must be {what}, or its text")
    return fmt


# -- formats in use ----------------------------------------------------------------------------------------------------


def _mx(element: ElementFormat, name: str) -> ScaledFormat:
    return ScaledFormat(element, 32, scale=float8_e8m0fnu, rule="floor").named(name)


#: OCP Microscaling Formats (MX) specification 1.0: 32 elements under a power of two.
mxfp8_e4m3 = _mx(float8_e4m3fn, "mxfp8_e4m3")
mxfp8_e5m2 = _mx(float8_e5m2, "mxfp8_e5m2")
mxfp6_e3m2 = _mx(float6_e3m2fn, "mxfp6_e3m2")
mxfp6_e2m3 = _mx(float6_e2m3fn, "mxfp6_e2m3")
mxfp4 = _mx(float4_e2m1fn, "mxfp4")
#: A sign, an integer bit and six fraction bits, without -2.
mxint8 = _mx(FixedFormat(2, 6, symmetric=True), "mxint8")
#: NVFP4: e2m1 in groups of 16, e4m3 scales from 2^-6 on, under a binary32 scale of the tensor (NVIDIA, 2025).
_E4M3 = dataclasses.replace(float8_e4m3fn, subnormals=False)
nvfp4 = ScaledFormat(float4_e2m1fn, 16, scale=_E4M3, rule="two_level").named("nvfp4")
#: Integers under one binary32 scale of the whole tensor, until a call says otherwise.
int2, int3, int4, int8 = (ScaledFormat(IntegerFormat(bits)) for bits in (2, 3, 4, 8))
uint4, uint8 = (ScaledFormat(IntegerFormat(bits, signed=False)) for bits in (4, 8))
#: NormalFloat4 in groups of 64 (Dettmers et al., arXiv 2305.14314).
nf4 = ScaledFormat(nf4_levels(), 64).named("nf4")
#: The dynamic maps of 8-bit optimizers in groups of 256 (Dettmers et al., arXiv 2110.02861).
dynamic8 = ScaledFormat(dynamic_levels(8), 256).named("dynamic8")
dynamic4 = ScaledFormat(dynamic_levels(4), 256).named("dynamic4")

#: The named scaled formats of the text grammar. Plain ``int8`` and its kin name the integers, not scaled ones.
SCALED_CATALOGUE: Mapping[str, ScaledFormat] = MappingProxyType(
    {
        str(fmt): fmt
        for fmt in (
            mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4, mxint8, nvfp4, nf4, dynamic8, dynamic4,
        )
    }
)  # fmt: skip


def bfp(bits: int, group: Any = None, **options: Any) -> ScaledFormat:
    """Block floating point: integers of `bits` bits, sign included, under a power of two.

    With E = floor(log2 a) of a group's largest magnitude a, the values are the multiples of 2^(E + 2 - bits) up to
    2^E (2 - 2^(2 - bits)) either way.

    Args:
        bits: width of an element, 2 to 64.
        group: as in `ScaledFormat`. Default: the whole tensor.
        options: the other fields of `ScaledFormat`; `scale` is e8m0 by default.

    Returns:
        A `ScaledFormat`; in text ``bfp8(group=16)``.

    Example:
        >>> import jchop as jc
        >>> jc.round_to_format([1.0, 0.3, -1.99], jc.bfp(4)).tolist()
        [1.0, 0.25, -1.75]
    """
    element = IntegerFormat(bits, narrow=True)
    fmt = ScaledFormat(element, scale=float8_e8m0fnu, rule="floor").named(f"bfp{element.bits}")
    return fmt(**({} if group is None else {"group": group}), **options)


# -- the text grammar --------------------------------------------------------------------------------------------------


def parse_format(text: str) -> ElementFormat | ScaledFormat:
    """The format that a text names.

    Args:
        text: a name (``binary16``, ``float8_e4m3fn``, ``e4m3fn``, MATLAB chop's ``h s d b t q43 q52``), a pattern
            (``e5m10``, ``e5m3fn``, ``e5m3fnuz``, ``fixed4.4``, ``ufixed4.4``, ``int8``, ``uint4``, ``binary8p3se``),
            or ``codebook(-1,0,1)``. Options follow in parentheses: ``e4m3(bias=11,subnormals=false)``,
            ``fixed4.4(symmetric=true)``, ``int8(narrow=true)``. Any of these is scaled where the options name a field
            of `ScaledFormat`: ``int4(group=128,axis=0,scale=bfloat16)``, ``e4m3fn(channel=-1)``,
            ``int8(group=tensor)``, ``e2m1fn(group=(2,16))``; so are the names ``mxfp4``, ``nvfp4``, ``nf4`` and their
            like, and ``bfp8(group=16)``, with such options or without.

    Raises:
        TypeError: where `text` is no text.
        ValueError: for text that names no format, with the closest names.

    Example:
        >>> import jchop as jc
        >>> jc.formats.parse_format("e5m10") == jc.binary16
        True
        >>> jc.formats.parse_format("mxfp4(rule=rceil,axis=0)") == jc.mxfp4(rule="rceil", axis=0)
        True
    """
    if not isinstance(text, str):
        raise TypeError(f"text={text!r} must be a format's text such as 'e5m10'")
    return _parse(re.sub(r"\s", "", text).lower() if "(" in text else text.strip().lower())


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ElementFormat | ScaledFormat:
    match = CALL.fullmatch(text)
    if match is None:
        raise unknown(text, SCALED_CATALOGUE)
    stem, items = match[1], split_options(match[2])
    ours = [item for item in items if item.partition("=")[0] in _OPTIONS]
    base, rest = _base(stem), [item for item in items if item not in ours]
    if base is None and not ours:
        return parse_element(text, SCALED_CATALOGUE)
    options = options_of(text, ",".join(ours if base is None else items), _OPTIONS)
    if base is None:
        base = ScaledFormat(parse_element(f"{stem}({','.join(rest)})" if rest else stem, SCALED_CATALOGUE))
    try:
        return base(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"format text {text!r}: {error}") from None


def _base(stem: str) -> ScaledFormat | None:
    if found := re.fullmatch(r"bfp(\d{1,2})", stem):
        return bfp(int(found[1]))
    return SCALED_CATALOGUE.get(stem)


def _sizes(value: str) -> Any:
    """``128``, ``all``, ``tensor``, or several in parentheses."""
    if value.startswith("(") and value.endswith(")"):
        return tuple(_sizes(item) for item in value[1:-1].split(",") if item)
    return value if value in ("all", "tensor") else int(value)


#: The options that make a format scaled, each with what reads its value.
_OPTIONS: dict[str, Callable[[str], object]] = {
    "group": _sizes,
    "axis": _sizes,
    "channel": _sizes,
    "scale": str,
    "rule": str,
    "zero_point": truth_of,
    "nan_block": truth_of,
}
