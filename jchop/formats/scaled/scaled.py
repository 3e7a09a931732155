"""Scaled formats: their groups and other fields, the checks of these, and their text grammar."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from jchop._common.checks import check, check_bool, check_instance, check_int, check_text, quote
from jchop.formats import _element_text
from jchop.formats._base import ElementFormat, format_html
from jchop.formats._binary import FloatFormat, IntegerFormat
from jchop.formats._catalogue import binary32, float8_e8m0fnu
from jchop.formats._codebook import CodebookFormat
from jchop.formats._tapered import TaperedFormat
from jchop.formats.scaled.scale_rules import ScaleRule, as_scale_rule_name, scale_rule_of

# == groups and axes ===================================================================================================


#: A size, or "all" of an axis.
GroupSize = int | str


#: The largest m of n:m. Each number is compared with the others of its m.
_MAX_SPARSE_GROUP = 64


def as_sparse_pair(value: object) -> tuple[int, int] | None:
    """The n and m of n:m as they are stored, from a pair or its text."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", value) if isinstance(value, str) else None
    pair = value if match is None else tuple(map(int, match.groups()))
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"sparse={value!r} must be two integers n and m, or text such as '2:4'")
    m = check_int(f"sparse={value!r} keeps n of every m: m", pair[1], 2, _MAX_SPARSE_GROUP)
    return check_int(f"sparse={value!r} keeps n of every m: n", pair[0], 1, m - 1), m


def sparse_length(sparse: tuple[int, int], length: int) -> int:
    """How many numbers of an axis n:m keeps; the last group may be shorter."""
    whole, rest = divmod(length, sparse[1])
    return whole * sparse[0] + min(sparse[0], rest)


def as_format_axes(name: str, value: object) -> int | tuple[int, ...]:
    """An axis, or several, as they are stored: a tuple of one axis becomes that axis."""
    if isinstance(value, tuple | list):
        check(value, f"{name}={value!r} must name at least one axis")
        axes = tuple(check_int(name, axis, -(1 << 15), 1 << 15) for axis in value)
        return axes[0] if len(axes) == 1 else axes
    return check_int(name, value, -(1 << 15), 1 << 15)


def as_group_and_axis(
    group: object, axis: object
) -> tuple[GroupSize | tuple[GroupSize, ...] | None, int | tuple[int, ...]]:
    """Group and axis as they are stored: a tuple of one group becomes that group, and "tensor" becomes None."""
    axes = as_format_axes("axis", axis)
    if group is None or group == "tensor":
        return None, axes
    sizes = group if isinstance(group, tuple | list) else (group,)
    groups: tuple[GroupSize, ...] = tuple("all" if size == "all" else check_int("group", size, 1) for size in sizes)
    check(groups, "group=() must have a size for each of its axes")
    if len(groups) == 1:
        if isinstance(axes, tuple):
            raise ValueError(f"group={group!r} is one size, and axis={axis!r} names {len(axes)} axes")
        return groups[0], axes
    if axes == -1:
        axes = tuple(range(-len(groups), 0))
    if not isinstance(axes, tuple) or len(axes) != len(groups):
        raise ValueError(f"group={group!r} has {len(groups)} sizes; axis={axis!r} must name as many axes")
    return groups, axes


def group_fits_axis(group: object, axis: object) -> bool:
    """Whether a group may keep an axis that another one had."""
    count = len(group) if isinstance(group, tuple | list) and len(group) > 1 else 1
    return group is not None and group != "tensor" and count == (len(axis) if isinstance(axis, tuple) else 1)


def axis_indexes(name: str, axes: int | tuple[int, ...] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Axes counted from the front, in an array that has each of them once."""
    axis_tuple = axes if isinstance(axes, tuple) else (axes,)
    for axis in axis_tuple:
        if axis is None or not -len(shape) <= axis < len(shape):
            raise ValueError(f"{name}={axes} is not an axis of an array of {len(shape)} dimensions")
    indexes = tuple(axis % len(shape) for axis in axis_tuple)  # type: ignore[operator]
    if len(set(indexes)) < len(indexes):
        raise ValueError(f"{name}={axes} names an axis twice in an array of {len(shape)} dimensions")
    return indexes


# == checks of the combination of fields ===============================================================================


#: The most bits of integers with zero points.
MAX_ZERO_POINT_BITS = 16


def check_scaled_format(fmt: ScaledFormat) -> None:
    """Refuse a scaled format with fields that are allowed separately, but not together.

    Raises:
        ValueError: the message names the fields.
    """
    if isinstance(fmt.element, TaperedFormat):
        raise ValueError(
            f"element={fmt.element} has its most bits next to 1, and scales would move numbers to its largest value, "
            "which has few or none; round to it without a scale, or multiply by a power of two first"
        )
    check(fmt.channel is None or fmt.group is None, f"channel={fmt.channel} and group={fmt.group} exclude each other")
    if fmt.group is None and fmt.axis != -1:
        raise ValueError(f"axis={fmt.axis} is the axis of a group; without group= it has no effect")
    _check_zero_point_fields(fmt)
    check(fmt.element.max > 0, f"element={fmt.element} has no positive value to scale to")
    if not fmt.scale_rule.takes(fmt.element):
        needs = fmt.scale_rule.needs
        raise ValueError(f"rule={fmt.rule!r} needs an element format with {needs}, not element={fmt.element}")
    _check_scale_format(fmt)
    if fmt.sparse is None and fmt.sparse_axis is not None:
        raise ValueError(f"sparse_axis={fmt.sparse_axis} is the axis of sparse=; without it it has no effect")
    if getattr(fmt.scale, "sparse", None) is not None:
        raise ValueError(f"scale={fmt.scale} would drop scales, which every group needs; leave sparse out of it")


def _check_zero_point_fields(fmt: Any) -> None:
    field = f"zero_point={fmt.zero_point}"
    if bool(fmt.zero_point) != (fmt.scale_rule.fit == "range"):
        more = "write rule=minmax, or " if fmt.zero_point else "add zero_point=integer, or "
        more *= isinstance(fmt.element, IntegerFormat)
        raise ValueError(f"{field} with rule={fmt.rule!r}: zero points go with rule='minmax'; {more}leave rule out")
    if not fmt.zero_point:
        return
    if not isinstance(fmt.element, IntegerFormat) or fmt.element.bits > MAX_ZERO_POINT_BITS:
        raise ValueError(
            f"{field} needs an integer element of at most {MAX_ZERO_POINT_BITS} bits, not element={fmt.element}"
        )
    scale = fmt.scale
    if fmt.zero_point == "float" and not (
        isinstance(scale, FloatFormat) and scale.signed and scale.zero and scale.frac_bits
    ):
        raise ValueError(f"{field} is kept in the format of the scales: with a sign, a zero and fraction bits, not "
                         f"scale={scale}")  # fmt: skip


def _check_level_scales(scale: Any) -> None:
    """Refuse other scales than levels 1 and 2, once or twice, over a format of codes."""
    level = scale
    while hasattr(level, "element") and level.element == CodebookFormat((1.0, 2.0)) and level.rule == "absmax":
        level = level.scale
    if level is scale or hasattr(level, "element") or level.bits > 8:
        raise ValueError(
            "rule='levels' needs scales that are quantized again to codebook(1,2), once or twice, under scales of at "
            f"most 8 bits, not scale={scale}"
        )


def _check_scale_format(fmt: Any) -> None:
    scale = fmt.scale
    if isinstance(scale, FloatFormat):
        check(scale.max >= 1, f"scale={scale} has no number from 1 on, and scales need one")
        check(not fmt.nan_block or scale.has_nan, f"nan_block=True needs a scale format with a NaN, not scale={scale}")
        signs = fmt.scale_rule.second is None or scale.signed
        check(signs, f"rule={fmt.rule!r} needs a scale format with a sign, not scale={scale}")
        check(not fmt.nan_block or fmt.scale_rule.by_ends, f"nan_block=True does not go with rule={fmt.rule!r}")
        if fmt.scale_rule.fit == "levels":
            _check_level_scales(scale)
        return
    has_levels = fmt.scale_rule.fit == "levels"
    if (
        not (isinstance(scale.scale, FloatFormat) or (has_levels and not scale.zero_point))
        or scale.zero_point == "integer"
        or scale.nan_block
        or scale.scale_rule.tensor_scale
    ):
        raise ValueError(f"scale={scale} must have scales of its own that are numbers, without zero_point=integer, "
                         "nan_block or a scale of the tensor")  # fmt: skip
    if scale.zero_point and scale.element.signed:
        raise ValueError(f"scale={scale}: scales are positive; with a zero point an unsigned element is for them")
    check(scale.element.bits <= 8, f"scale={scale} has codes of {scale.element.bits} bits; at most 8 are stored")
    if has_levels:
        _check_level_scales(scale)
    if fmt.nan_block or fmt.scale_rule.tensor_scale:
        raise ValueError(f"scale={scale} is quantized again: nan_block and rule={fmt.rule!r} do not go with that")
    if fmt.scale_rule.gives_powers:
        raise ValueError(
            f"scale={scale} does not keep the powers of two that rule={fmt.rule!r} gives; use rule='absmax', or a "
            "floating-point format for the scales"
        )


# == the text grammar: an element's text, or a name, with options ======================================================


def _read_sizes(value: str) -> Any:
    """``128``, ``all``, ``tensor``, or several in parentheses."""
    if value.startswith("(") and value.endswith(")"):
        return tuple(_read_sizes(item) for item in value[1:-1].split(",") if item)
    return value if value in ("all", "tensor") else _element_text.read_integer(value)


#: The options that make a format scaled, each with the function that reads its value.
_SCALED_OPTIONS: dict[str, Callable[[str], object]] = {
    "group": _read_sizes,
    "axis": _read_sizes,
    "channel": _read_sizes,
    "scale": str,
    "rule": str,
    "zero_point": lambda value: None if value == "none" else value,  # the format checks the other values
    "nan_block": _element_text.read_bool,
    "sparse": str,
    "sparse_axis": _element_text.read_integer,
}


#: Texts of integers: ``int8`` is always scaled, ``integer8`` only by an option.
_SCALED_INTEGER, _INTEGER_TAIL = re.compile(r"u?int[0-9]+"), re.compile(r"(?<=int)eger(?=[0-9])")


def option_text(value: object, name: str = "") -> str:
    """An option's value in text."""
    if name == "sparse" and isinstance(value, tuple):
        return ":".join(map(str, value))
    if isinstance(value, tuple):
        return f"({','.join(map(option_text, value))})"
    return str(value).lower()


# == the format ========================================================================================================


@dataclass(frozen=True, repr=False)
class ScaledFormat:
    """Elements e of a format, in groups that share a scale s > 0: the values s e, s (e - z) or s e + z.

    The scale comes from the data, so a value is rounded as one of its group. Infinities and NaN do not count when a
    scale is chosen. Then they obey the element's overflow rule. A NaN without a code becomes the largest element. A
    group without a finite number other than zero has scale 1.

    A scaled format is callable: ``fmt(group=64)`` is the format with that changed.

    Args:
        element: the format of x / s (or x / s + z), which is rounded once: an element format, or its text. Alone it may
            be the text of a whole scaled format: ``ScaledFormat("int4(group=32)")``.
        group: the number of consecutive elements along `axis` that share a scale. The last group of a row may be
            shorter. ``"all"`` means the whole axis. For tiles, one of these for each of several axes. Default None,
            with no `channel` either: the whole tensor, also written ``"tensor"``.
        axis: of `group`, an axis or one for each group. Default -1, and for n groups the last n axes.
        channel: an axis, or several, each index of which has its own scale, shared over all other axes.
        scale: format of the scales, or its text. Default binary32. A ScaledFormat quantizes the scales again: the
            scale is rounded to binary32, quantized under it to nearest and never to zero. Only under the rule "levels"
            may the scales of scales be quantized once more.
        rule: one of `SCALE_RULES`; ``"percentile(99.9)"`` has at most two decimals. Default "absmax", and "minmax" with
            `zero_point`.
        zero_point: "integer" shifts integers by an integer z = clamp(m - rne((least x) / s)), for numbers that are not
            centred at 0. The values are s (e - z). With "float" they are s e + z, with z = (least x) - m s rounded to
            the scale format (tinygemm's int4, whose codes are e + 8). Default None.
        nan_block: whether an infinity or NaN makes a group NaN as a whole. So does a scale that is larger than there is
            (OCP MX 1.0, 5.3).
        sparse: n and m, or a text like ``"2:4"``. Of every m consecutive numbers the n of largest magnitude are kept.
            The others become +0. Equal magnitudes keep their order, so the first ones stay. A NaN counts as larger than
            an infinity. A shorter last group keeps up to n as well. Scales are chosen for the kept numbers. Stored
            arrays hold the codes of the kept numbers, and one bit for every number. Default None: all are kept.
        sparse_axis: the axis along which `sparse` counts. Default None: the last axis of `group`, else -1.

    Raises:
        TypeError, ValueError: for a field out of range, or a combination without a meaning.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.ScaledFormat("integer4", group=128, scale="bfloat16")
        >>> str(fmt), fmt.bits_per_element(), fmt.scale_shape((3, 300))
        ('int4(group=128,scale=bfloat16)', 4.125, (3, 3))
        >>> str(fmt(sparse="2:4")), fmt(sparse="2:4").bits_per_element()
        ('int4(group=128,scale=bfloat16,sparse=2:4)', 3.125)
    """

    element: ElementFormat
    group: GroupSize | tuple[GroupSize, ...] | None = None
    axis: int | tuple[int, ...] = -1
    channel: int | tuple[int, ...] | None = None
    scale: FloatFormat | ScaledFormat = binary32
    rule: str = None  # type: ignore[assignment]
    zero_point: Literal["integer", "float"] | None = None
    nan_block: bool = False
    sparse: tuple[int, int] | None = None
    sparse_axis: int | None = None

    #: The named format that this one was called from, and the name of a named one: for `str` alone.
    base: ClassVar[ScaledFormat | None] = None
    name: ClassVar[str | None] = None

    if TYPE_CHECKING:  # arguments may have more types than the stored fields

        def __init__(
            self,
            element: ElementFormat | str,
            group: GroupSize | Literal["tensor"] | Sequence[GroupSize] | None = ...,
            axis: int | Sequence[int] = ...,
            channel: int | Sequence[int] | None = ...,
            scale: FloatFormat | ScaledFormat | str = ...,
            rule: str | None = ...,
            zero_point: Literal["integer", "float"] | None = ...,
            nan_block: bool = ...,
            sparse: tuple[int, int] | str | None = ...,
            sparse_axis: int | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.element, str) and isinstance(whole := parse_format(self.element), ScaledFormat):
            others = dataclasses.fields(self)[1:]
            if all(getattr(self, field.name) == field.default for field in others):
                vars(self).update(vars(whole))
                return
        check_bool("nan_block", self.nan_block)
        if self.zero_point is not None and (
            not isinstance(self.zero_point, str) or self.zero_point not in ("integer", "float")
        ):
            raise ValueError(f"zero_point={self.zero_point!r} must be None, 'integer' or 'float'")
        fields = {
            "element": _as_format_of_kind("element", self.element, ElementFormat),
            "scale": _as_format_of_kind("scale", self.scale, FloatFormat | ScaledFormat),
            "channel": None if self.channel is None else as_format_axes("channel", self.channel),
            "rule": as_scale_rule_name(self.rule, self.zero_point),
            "sparse": as_sparse_pair(self.sparse),
        }
        if self.sparse_axis is not None:
            check_int("sparse_axis", self.sparse_axis, -(1 << 15), 1 << 15)
        fields["group"], fields["axis"] = as_group_and_axis(self.group, self.axis)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        check_scaled_format(self)

    def __call__(self, **changes: Any) -> ScaledFormat:
        """This format with fields changed; a `channel` replaces a group, and the reverse.

        Args:
            changes: fields by name.

        Example:
            >>> import jchop as jc
            >>> str(jc.formats.mxfp4(axis=0)), str(jc.formats.int8(channel=0))
            ('mxfp4(axis=0)', 'int8(channel=0)')
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in changes.items():
            if name not in names:
                raise TypeError(f"{name}={value!r} is no field of a scaled format; allowed: {', '.join(names)}")
        arguments = set(changes)
        if "channel" in arguments and "group" not in arguments:
            changes |= {"group": None} | ({} if "axis" in arguments else {"axis": -1})
        elif "group" in arguments and "channel" not in arguments:
            changes["channel"] = None
        if "group" in arguments and "axis" not in arguments and not group_fits_axis(changes["group"], self.axis):
            changes["axis"] = -1
        if changes.get("zero_point", self.zero_point) != self.zero_point and "rule" not in arguments:
            changes["rule"] = None
        if changes.get("sparse", self.sparse) is None and "sparse_axis" not in arguments:
            changes["sparse_axis"] = None
        if "axis" in changes and "scale" not in arguments:
            changes["scale"] = self._scale_with_axis(changes["axis"])
        result = replace(self, **changes)
        object.__setattr__(result, "base", None if "element" in arguments else self.base)
        return result

    def _scale_with_axis(self, axis: Any) -> FloatFormat | ScaledFormat:
        """The format of scales with its levels along another axis, as the rule "levels" wants them."""
        if self.scale_rule.fit == "levels" and isinstance(self.scale, ScaledFormat) and isinstance(axis, int):
            scale_format = self.scale
            inner_scale_format = (
                replace(scale_format.scale, axis=axis)
                if isinstance(scale_format.scale, ScaledFormat)
                else scale_format.scale
            )
            return replace(scale_format, axis=axis, scale=inner_scale_format)
        return self.scale

    # -- groups --------------------------------------------------------------------------------------------------------
    def group_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How far a group extends along each axis of an array: 1, a block's size, or the whole axis.

        Args:
            shape: of the array.

        Raises:
            ValueError: for an array without the axes that the format names.

        Example:
            >>> import jchop as jc
            >>> jc.formats.int8(channel=0).group_shape((3, 4, 5)), jc.formats.mxfp4.group_shape((8, 100))
            ((1, 4, 5), (1, 32))
        """
        whole = tuple(max(size, 1) for size in shape)
        if self.sparse is not None:
            axis_indexes("sparse_axis", self.axis_of_sparse, shape)
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
            >>> jc.formats.int4(group=(2, 128)).scale_shape((5, 3, 128)), jc.formats.int8.scale_shape((5, 3))
            ((5, 2, 1), (1, 1))
        """
        return tuple(-(-size // group) for size, group in zip(shape, self.group_shape(shape), strict=True))

    # -- numbers that are dropped --------------------------------------------------------------------------------------
    @property
    def axis_of_sparse(self) -> int:
        """The axis along which `sparse` counts: `sparse_axis`, else the last axis of `group`, else -1."""
        if self.sparse_axis is not None:
            return self.sparse_axis
        return self.axis[-1] if isinstance(self.axis, tuple) else self.axis

    @property
    def dense(self) -> ScaledFormat:
        """This format without `sparse`."""
        return self if self.sparse is None else self(sparse=None)

    def kept_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the numbers of an array that are stored: all, or n of every m.

        Args:
            shape: of the array.

        Example:
            >>> import jchop as jc
            >>> jc.formats.int4(group=32, axis=0, sparse="2:4").kept_shape((64, 5)), jc.formats.int4.kept_shape((64, 5))
            ((32, 5), (64, 5))
        """
        sizes = list(shape)
        if self.sparse is not None:
            (axis,) = axis_indexes("sparse_axis", self.axis_of_sparse, shape)
            sizes[axis] = sparse_length(self.sparse, shape[axis])
        return tuple(sizes)

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def bits(self) -> int:
        """Width of an element's code in bits."""
        return self.element.bits

    @property
    def scale_rule(self) -> ScaleRule:
        """The rule as a value."""
        return scale_rule_of(self.rule)

    @property
    def scale_format(self) -> FloatFormat:
        """The format of scales before they are quantized again: binary32 if `scale` is a ScaledFormat."""
        return binary32 if isinstance(self.scale, ScaledFormat) else self.scale

    @property
    def percentile(self) -> Fraction | None:
        """The q of the rule "percentile(q)"; None for another rule."""
        return self.scale_rule.percentile

    @property
    def scale_parts(self) -> tuple[str, ...]:
        """The parts of a stored scale by name: several if the tensor has a scale, or scales are quantized again."""
        if self.scale_rule.tensor_scale:
            return ("scale", "tensor_scale")
        if isinstance(self.scale, ScaledFormat):
            inner_parts = (*self.scale.scale_parts, *(("zero_point",) if self.scale.zero_point else ()))
            return ("scale", *(f"scale_{part}" for part in inner_parts))
        return ("scale",)

    def bits_per_element(self, shape: Sequence[int] | None = None) -> float:
        """Bits of an element with its share of scales and zero points (integers of 32 bits, or as wide as a scale).

        With `sparse`, also one bit that says whether a number is stored, and the code of n of every m.

        Args:
            shape: of the array. Default None: any large shape of whole groups. The scale of a whole axis or tensor does
                not count there.

        Example:
            >>> import jchop as jc
            >>> jc.formats.nvfp4.bits_per_element(), jc.formats.int8(channel=0).bits_per_element((4, 100))
            (4.5, 8.32)
        """
        bits = float(self.bits)
        if self.sparse is not None:
            n, m = self.sparse
            count = 1 if shape is None else math.prod(shape)
            bits = 1 + bits * (n / m if shape is None or not count else math.prod(self.kept_shape(shape)) / count)
        if shape is not None:
            scales = self.scale_shape(shape)
            if not math.prod(scales):
                return bits
            scale_bits = self._scale_bits(scales)
            return bits + (math.prod(scales) * scale_bits + 32 * self.scale_rule.tensor_scale) / math.prod(shape)
        groups = self.group if isinstance(self.group, tuple) else (self.group,)
        sizes = [group for group in groups if isinstance(group, int)]
        if len(sizes) < len(groups):
            return bits
        return bits + self._scale_bits(None) / math.prod(sizes)

    def _scale_bits(self, shape: Sequence[int] | None) -> float:
        """Bits of a scale and its zero point; `shape` is the shape of the scales."""
        if isinstance(self.scale, ScaledFormat):
            return self.scale.bits_per_element(shape) + 32 * bool(self.zero_point)
        return self.scale.bits + {None: 0, "integer": 32, "float": self.scale.bits}[self.zero_point]

    # -- text ----------------------------------------------------------------------------------------------------------
    @property
    def text(self) -> str:
        """The format in the text grammar: its element with options, or a name with the changed options."""
        base = self.base or ScaledFormat(self.element)
        stem = self.base.name if self.base is not None else _INTEGER_TAIL.sub("", str(self.element))
        assert stem is not None
        rule = base.rule if self.zero_point == base.zero_point else as_scale_rule_name(None, self.zero_point)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        differences = {name: value for name, value in fields.items() if value != getattr(base, name)}
        if self.scale == base._scale_with_axis(self.axis):
            differences.pop("scale", None)
        if self.rule == rule:
            differences.pop("rule", None)
        if self.channel is not None:
            differences = {name: value for name, value in differences.items() if name not in ("group", "axis")}
        elif self.group is None and (base.group is not None or (self.base is None and stem == str(self.element))):
            differences = {"group": "tensor"} | {name: value for name, value in differences.items() if name != "group"}
        options = ",".join(f"{name}={option_text(value, name)}" for name, value in differences.items())
        if not options:
            return stem
        return f"{stem[:-1]},{options})" if stem.endswith(")") else f"{stem}({options})"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"ScaledFormat({self.text!r})"

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") or not hasattr(ElementFormat, name) else f"; see those of {self}.element"
        raise AttributeError(f"a scaled format has no {name!r}{hint}", name=name, obj=self)

    def _repr_html_(self) -> str:
        return format_html(self)

    def named(self, name: str) -> ScaledFormat:
        """A copy that prints as `name`, which the text grammar has to know, and so do the formats called from it."""
        result = copy.copy(self)
        object.__setattr__(result, "name", name)
        object.__setattr__(result, "base", result)
        return result


def _as_format_of_kind(name: str, value: object, kinds: Any) -> Any:
    fmt = as_format(value)
    if not isinstance(fmt, kinds):
        expectation = (
            "an element format such as 'integer8'" if kinds is ElementFormat else "a FloatFormat or ScaledFormat"
        )
        raise TypeError(f"{name}={value!r} must be {expectation}, or its text")
    return fmt


# -- formats in use ----------------------------------------------------------------------------------------------------


_SCALED_FORMATS: dict[str, ScaledFormat] = {}
#: The named scaled formats of the text grammar, without ``int8`` and the like, which match a pattern.
SCALED_CATALOGUE: Mapping[str, ScaledFormat] = MappingProxyType(_SCALED_FORMATS)


def add_to_catalogue(fmt: ScaledFormat) -> ScaledFormat:
    """Makes the name of a format, which is returned, known to the text grammar."""
    _SCALED_FORMATS[str(fmt)] = fmt
    return fmt


def bfp(bits: int, group: Any = None, **options: Any) -> ScaledFormat:
    """Block floating point: integers of `bits` bits, sign included, under a power of two.

    Let a be a group's largest magnitude and E = floor(log2 a). The values are the multiples of 2^(E + 2 - bits) up to
    2^E (2 - 2^(2 - bits)) either way.

    Args:
        bits: width of an element, 2 to 64.
        group: as in `ScaledFormat`. Default: the whole tensor.
        options: the other fields of `ScaledFormat`; `scale` is e8m0 by default.

    Returns:
        A `ScaledFormat`; in text ``bfp8(group=16)``.

    Example:
        >>> import jchop as jc
        >>> jc.round_to_format([1.0, 0.3, -1.99], jc.formats.bfp(4)).tolist()
        [1.0, 0.25, -1.75]
    """
    element = IntegerFormat(bits, narrow=True)
    fmt = ScaledFormat(element, scale=float8_e8m0fnu, rule="floor").named(f"bfp{element.bits}")
    return fmt(**({} if group is None else {"group": group}), **options)


# -- the text grammar --------------------------------------------------------------------------------------------------


def parse_format(text: str) -> ElementFormat | ScaledFormat:
    """The format that a text names.

    Args:
        text: a name, a pattern, or ``codebook(-1,0,1)``, in upper or lower case. Names are ``binary16``,
            ``float8_e4m3fn``, ``e4m3fn``, and MATLAB chop's ``h s d b t q43 q52``. Patterns are like ``e5m10``,
            ``e5m3fn``, ``e5m3fnuz``, ``ue5m3``, ``fixed4.4``, ``ufixed4.4``, ``integer8``, ``uinteger4``,
            ``binary8p3se``, ``posit16`` and ``takum_linear16``. Options follow in parentheses: ``e4m3(bias=11)``,
            ``fixed4.4(symmetric=true)``, ``integer8(narrow=true)``. Any of these is scaled if the options name a field
            of `ScaledFormat`: ``e4m3fn(channel=-1)``, ``fixed4.4(group=tensor)``, ``e2m1fn(group=(2,16))``. Some texts
            are always scaled: the names ``mxfp4``, ``nvfp4``, ``nf4`` and their like, and ``bfp8(group=16)``. So are
            integers, ``int8``, ``uint4`` and their like. They have one scale of the tensor unless an option says
            otherwise (``int4(group=128,axis=0,scale=bfloat16)``, ``int4(group=32,sparse=2:4)``).

    Raises:
        TypeError: if `text` is not a str.
        ValueError: for text that names no format, with the closest names, and for one of more than 4096 characters
            beside the levels of codebooks.

    Example:
        >>> import jchop as jc
        >>> jc.formats.parse_format("e5m10") == jc.formats.binary16
        True
        >>> jc.formats.parse_format("mxfp4(rule=rceil,axis=0)") == jc.formats.mxfp4(rule="rceil", axis=0)
        True
    """
    check_instance("text", text, str, "a format's text such as 'e5m10'")
    text = check_text("format text", text)
    return _parse_format_text(re.sub(r"\s", "", text) if "(" in text else text)


def as_format(value: Any) -> Any:
    """The format of a text or of a dtype of NumPy, ml_dtypes, JAX or PyTorch; any other value unchanged."""
    if isinstance(value, str):
        return parse_format(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return parse_format(str(value).removeprefix("torch."))
    # A dtype is a np.dtype or a class with one: np.float16, jnp.bfloat16, not Python's float.
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return parse_format(np.dtype(value).name)
    return value


@functools.lru_cache(maxsize=256)
def _parse_format_text(text: str) -> ElementFormat | ScaledFormat:
    match, names = _element_text.FORMAT_CALL.fullmatch(text), (*SCALED_CATALOGUE, "bfp8")
    if match is None:
        raise _element_text.unknown_format_error(text, names)
    if ")(" in text:
        raise ValueError(
            f"format text {quote(text)}: all that belongs to a format stands in one pair of parentheses, as in "
            f"{quote(text.replace(')(', ','))}"
        )
    stem, items = match[1], _element_text.split_options(match[2])
    ours, rest = (
        [item for item in items if (item.partition("=")[0] in _SCALED_OPTIONS) is belongs] for belongs in (True, False)
    )
    base = _scaled_format_of_name(stem)
    if base is None and not ours and not _SCALED_INTEGER.fullmatch(stem):
        return _element_text.parse_element(text, names, _SCALED_OPTIONS)
    options = _element_text.read_options(text, ",".join(ours if base is None else items), _SCALED_OPTIONS)
    if base is None:
        element = _element_text.parse_element(f"{stem}({','.join(rest)})" if rest else stem, names, _SCALED_OPTIONS)
        base = ScaledFormat(element)
    return _element_text.build_format(text, base, **options)


def _scaled_format_of_name(stem: str) -> ScaledFormat | None:
    if match := re.fullmatch(r"bfp([0-9]{1,4})", stem):
        return _element_text.build_format(stem, bfp, int(match[1]))
    return SCALED_CATALOGUE.get(stem)
