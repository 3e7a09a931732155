"""The text grammar of element formats, which `parse_element` reads and `str` prints."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jchop._common.checks import close_names_hint, quote, split_outside_brackets
from jchop.formats._base import ElementFormat
from jchop.formats._binary import FLOAT_OPTIONS, FixedFormat, FloatFormat, IntegerFormat
from jchop.formats._catalogue import ALIASES, CATALOGUE, p3109
from jchop.formats._codebook import CodebookFormat
from jchop.formats._tapered import HiFloat8Format, LogTakumFormat, PositFormat, TakumFormat
from jchop.formats.rounding import ROUNDING_ALIASES, Overflow, Rounding

FORMAT_CALL = re.compile(r"([a-z0-9_.-]+)(?:\((.*)\))?")
_OptionReaders = dict[str, Callable[[str], object]]

#: Suffixes of e{E}m{M}, as in ml_dtypes: finite with one NaN; the same without -0 and with the bias one higher.
_FLOAT_SUFFIXES = ("fn", "fnuz")


def parse_element(text: str, more: Iterable[str] = (), scaling_options: Iterable[str] = ()) -> ElementFormat:
    """The element format of a lower-case text.

    Args:
        text: see `jchop.formats.parse_format`.
        more: further known names, which the error of an unknown name suggests.
        scaling_options: the options that make an element a scaled format, which the error of an unknown option lists,
            too.

    Raises:
        ValueError: for any other text; the message has the closest names.
    """
    match = FORMAT_CALL.fullmatch(text.replace(" ", ""))
    if match is None:
        raise unknown_format_error(text, more)
    stem, inside = match[1], match[2]
    if stem == "codebook":
        return build_format(text, CodebookFormat, _read_levels(text, inside))
    name = ALIASES.get(stem, stem)
    if name in CATALOGUE:
        fmt = CATALOGUE[name]
        options = read_options(text, inside, _FLOAT_OPTIONS, scaling_options)
        return build_format(text, dataclasses.replace, fmt, **options) if options else fmt
    for pattern, build, readers in _FORMAT_PATTERNS:
        if pattern_match := re.fullmatch(pattern, stem):
            if stem.startswith(_TAPERED_STEMS):
                scaling_options = ()
            return build_format(
                text, build, *pattern_match.groups(), **read_options(text, inside, readers, scaling_options)
            )
    raise unknown_format_error(text, more)


def build_format(text: str, build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``build(*args, **options)`` for a text, which its errors name."""
    try:
        return build(*args, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"format text {quote(text)}: {error}") from None


def _build_float(exp_bits: str, frac_bits: str, suffix: str | None, **options) -> FloatFormat:
    exp, sig = int(exp_bits), int(frac_bits)
    if suffix == "fn":
        options = {"infinities": False, "nans": "top"} | options
    elif suffix == "fnuz":
        options = {"infinities": False, "nans": "negative_zero", "bias": FloatFormat.default_bias(exp) + 1} | options
    return FloatFormat(exp, sig, **options)


def read_integer(value: str) -> int:
    """A decimal integer; `int` also accepts underscores and digits of other scripts."""
    if not _INTEGER_TEXT.fullmatch(value):
        raise ValueError
    return int(value)


_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,20}")
_LEVEL_TEXT = re.compile(r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|nan)")


def read_bool(value: str) -> bool:
    return {"true": True, "false": False}[value]


#: The options in parentheses, each with the function that reads its value.
_FLOAT_OPTIONS: _OptionReaders = {
    option.name: {"bool": read_bool, "str": str}.get(str(option.type), read_integer) for option in FLOAT_OPTIONS
}

_FORMAT_PATTERNS: tuple[tuple[str, Callable[..., ElementFormat], _OptionReaders], ...] = (
    (rf"e([0-9]{{1,4}})m([0-9]{{1,4}})({'|'.join(_FLOAT_SUFFIXES)})?", _build_float, _FLOAT_OPTIONS),
    # Without a sign and infinities, NaN in the all-ones code, as the formats of scales.
    (
        r"ue([0-9]{1,4})m([1-9][0-9]{0,3})",
        lambda exp, frac, **more: _build_float(exp, frac, "fn", **{"signed": False} | more),
        _FLOAT_OPTIONS,
    ),
    (
        r"binary([0-9]{1,4})p([0-9]{1,4})([su])([ef])",
        lambda bits, precision, sign, domain: p3109(int(bits), int(precision), sign == "s", domain == "e"),
        {},
    ),
    (
        r"(u?)fixed(-?[0-9]{1,4})\.(-?[0-9]{1,4})",
        lambda unsigned, whole, frac, **more: FixedFormat(int(whole), int(frac), not unsigned, **more),
        {"symmetric": read_bool},
    ),
    (
        r"(u?)int(?:eger)?([0-9]{1,4})",
        lambda unsigned, bits, **more: IntegerFormat(int(bits), not unsigned, **more),
        {"narrow": read_bool},
    ),
    (r"posit([0-9]{1,4})", lambda bits: PositFormat(int(bits)), {}),
    (r"takum([0-9]{1,4})", lambda bits: LogTakumFormat(int(bits)), {}),
    (r"takum_linear([0-9]{1,4})", lambda bits: TakumFormat(int(bits)), {}),
    (r"hif(?:loat)?8", HiFloat8Format, {}),
)


#: Beginnings of the texts of tapered formats, which are no elements of scaled formats.
_TAPERED_STEMS = ("posit", "takum", "hif")

#: A text of each pattern, for errors.
_FORMAT_EXAMPLES = (
    "e5m10", "e5m3fn", "ue5m3", "fixed4.4", "ufixed4.4", "integer8", "int8", "uint4", "binary8p3se", "posit16",
    "takum16", "takum_linear16", "hif8",
)  # fmt: skip

#: Options of other programs, with those that mean the same here.
_OPTIONS_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("group_size", "block_size", "tile_size", "block", "tile", "blocksize"), "group"),
    **dict.fromkeys(("per_channel", "channelwise", "channel_axis", "channelwise_axes"), "channel"),
}

_OPTION_TYPES: dict[object, str] = {read_integer: "an integer", read_bool: "true or false"}


def split_options(inside: str | None) -> list[str]:
    """The text in parentheses, split at commas outside of nested parentheses."""
    return [item for item in split_outside_brackets(inside or "", ",") if item]


def read_options(text: str, inside: str | None, readers: _OptionReaders, more: Iterable[str] = ()) -> dict[str, Any]:
    """The values of the options in parentheses; `more` are further names for the error of an unknown one."""
    options: dict[str, Any] = {}
    for item in split_options(inside):
        name, equals, value = item.partition("=")
        if not equals or name in options:
            meaning = "; did you mean channel=0?" if _OPTIONS_ELSEWHERE.get(name) == "channel" else ""
            raise ValueError(f"format text {quote(text)}: option {item!r} must be name=value, each name once{meaning}")
        if name not in readers:
            names = [*readers, *more]
            hint = close_names_hint(_OPTIONS_ELSEWHERE.get(name, name), names)
            hint = hint or (f"; allowed: {', '.join(names)}" if names else "; there are none for it")
            raise ValueError(f"format text {quote(text)}: unknown option {name!r}{hint}")
        try:
            options[name] = readers[name](value)
        except (ValueError, KeyError):
            expectation = _OPTION_TYPES.get(readers[name], "integers, several in parentheses")
            raise ValueError(f"format text {quote(text)}: option {name}={value!r} must be {expectation}") from None
    return options


def _read_levels(text: str, inside: str | None) -> tuple[float, ...]:
    items = (inside or "").split(",")
    if not all(map(_LEVEL_TEXT.fullmatch, items)):
        raise ValueError(f"format text {quote(text)}: levels must be numbers, as in codebook(-1,0,1)")
    return tuple(map(float, items))


def unknown_format_error(text: str, more: Iterable[str] = ()) -> ValueError:
    """The error for a text that is not a format."""
    stem = text.partition("(")[0]
    if text.count("(") != text.count(")"):
        hint = "; it has not as many closing as opening parentheses"
    elif stem in (*ROUNDING_ALIASES, *(member.value for member in (*Rounding, *Overflow))):
        hint = f"; {stem} belongs after a format, as in e5m2:{stem}"
    elif (name := split_outside_brackets(text, ":")[0]) != text and name:
        hint = f"; {text.removeprefix(name)!r} belongs to a spec; pass the format alone, {name.strip()!r}"
    elif stem in _SEVERAL_MEANINGS:
        hint = f"; did you mean {_SEVERAL_MEANINGS[stem]}?"
    else:
        names = [*CATALOGUE, *ALIASES, *more, *_examples_like(stem)]
        head = stem.partition("_")[0]
        # The names fp8_e4m3 and mxfp4_e2m1 of others are float8_e4m3 and mxfp4 here.
        ours = head if head in names else re.sub("^fp", "float", stem)
        hint = close_names_hint(ours, names) or close_names_hint(stem, names) or _NO_NAME_IS_CLOSE
    return ValueError(f"format text {quote(text)} is not known{hint}")


_NO_NAME_IS_CLOSE = (
    "; it is a name such as bfloat16, float8_e4m3fn, nf4, mxfp4, a pattern such as e5m10, fixed4.4, posit16, "
    "int4(group=32), or codebook(-1,0,1)"
)

#: Texts that several formats are called by, with the texts to choose from.
_SEVERAL_MEANINGS = {
    "fp8": "float8_e4m3fn (weights, activations) or float8_e5m2 (gradients)",
    "fp8_e4m3": "float8_e4m3fn (largest value 448) or float8_e4m3 (IEEE 754, 240)",
    "bf8": "float8_e5m2 or float8_e5m2fnuz",
    "hf8": "float8_e4m3fn or hif8",
    "fp6": "float6_e2m3fn or float6_e3m2fn",
    "mxfp8": "mxfp8_e4m3 or mxfp8_e5m2",
    "mxfp6": "mxfp6_e2m3 or mxfp6_e3m2",
    "float": "float32, float16 or float64",
    "int": "int8, int4(group=32) or integer8 (no scale)",
    "w8a8": "Rule(weight='int8(channel=0)', activation='int8')",
}
_SEVERAL_MEANINGS |= {"float8": _SEVERAL_MEANINGS["fp8"], "float6": _SEVERAL_MEANINGS["fp6"]}


def _examples_like(stem: str) -> Iterator[str]:
    """A text of each pattern with the numbers of `stem`, if that is a format."""
    for example in _FORMAT_EXAMPLES:
        numbers = iter(re.findall("[0-9]+", stem))
        text = re.sub("[0-9]+", lambda digits, numbers=numbers: next(numbers, digits[0]), example)
        for pattern, build, _ in _FORMAT_PATTERNS:
            if match := re.fullmatch(pattern, text):
                with contextlib.suppress(ValueError):
                    build(*match.groups())
                    example = text
        yield example
