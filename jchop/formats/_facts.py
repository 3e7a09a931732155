"""The facts of a format as pairs of texts, for its HTML."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from jchop._common.text import html


def format_facts(fmt: Any) -> list[tuple[str, str]]:
    """Names and values of the properties of an element format or a scaled format.

    Example:
        >>> import jchop as jc
        >>> format_facts(jc.formats.float4_e2m1fn)[:2]
        [('bits', '4'), ('values', 'from -6 to 6')]
    """
    if hasattr(fmt, "element"):
        return _scaled_format_facts(fmt)
    facts = [("bits", str(fmt.bits)), ("values", f"from {short_number(fmt.min)} to {short_number(fmt.max)}")]
    for name, value in {
        "significand bits": fmt.precision,
        "smallest normal": fmt.smallest_normal,
        "smallest": fmt.smallest,
        "unit roundoff": fmt.unit_roundoff,
    }.items():
        facts += [] if value is None else [(name, short_number(value))]
    special = [
        name
        for name, has in {"infinities": fmt.has_inf, "NaN": fmt.has_nan, "-0": fmt.has_negative_zero}.items()
        if has
    ]
    return [*facts, ("also has", ", ".join(special) or "no infinities, no NaN, no -0")]


def _scaled_format_facts(fmt: Any) -> list[tuple[str, str]]:
    if fmt.channel is not None:
        groups = f"one scale for each index of axis {fmt.channel}"
    elif fmt.group is None:
        groups = "one scale for the tensor"
    else:
        groups = f"{fmt.group} elements along axis {fmt.axis} share a scale"
    facts = [("bits per element", f"{fmt.bits_per_element():.4g}"), ("groups", groups)]
    facts += [("element", f"{fmt.element}, from {short_number(fmt.element.min)} to {short_number(fmt.element.max)}")]
    facts += [("scale", f"{fmt.scale}, rule {fmt.rule}")]
    if fmt.sparse is not None:
        facts += [("sparse", f"{fmt.sparse[0]} of every {fmt.sparse[1]} numbers along axis {fmt.axis_of_sparse}")]
    return facts + ([("zero point", fmt.zero_point)] if fmt.zero_point else [])


def short_number(value: Any) -> str:
    """At most six digits; a power of two or another exact number that no float holds as c · 2^k."""
    if not isinstance(value, Fraction):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return f"{float(value / Fraction(2) ** exponent):.4g} · 2^{exponent}"


def format_html(fmt: Any) -> str:
    """A format as a fragment of HTML: its text, and its facts below."""
    return html.box(str(fmt), format_facts(fmt))
