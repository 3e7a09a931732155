"""``jchop formats``, ``jchop info`` and ``jchop doctor``."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import platform
from collections.abc import Callable
from fractions import Fraction
from textwrap import fill
from typing import Any

import jax

from jchop import formats
from jchop._cli import _command as cli
from jchop._common.checks import check, place_in_errors
from jchop._common.files import INSTALL_EXTRA, distribution_version
from jchop._common.on_demand import load_name
from jchop._common.settings import has_fast_math
from jchop._kernels.primitive import devices_at_hand
from jchop._quantized.program.report import OPERANDS_BY_PLATFORM

_PATTERNS = (
    "Patterns: e5m10 e5m3fn e5m3fnuz ue5m3 fixed4.4 ufixed4.4 integer8 uinteger4 binary8p3se posit16 takum_linear16 "
    "codebook(-1,0,0.5)"
)
_SCALED_PATTERNS = "bfp8(group=16) int8 int4(group=128) e4m3fn(channel=0)"


def _run_formats(options: argparse.Namespace) -> None:
    widths, facts, specials = "bits exp frac bias p", ("max", "min normal", "min subn.", "roundoff"), "inf nan -0"
    head = ("name", *widths.split(), *facts, *specials.split(), "also")
    rows = [
        (
            name,
            *(fmt.bits, fmt.exp_bits, fmt.frac_bits, fmt.bias, fmt.precision),
            *(fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.unit_roundoff),
            *(fmt.has_inf, fmt.has_nan, fmt.has_negative_zero),
            " ".join(other for other, main in formats.ALIASES.items() if main == name),
        )
        for name, fmt in formats.CATALOGUE.items()
    ]
    if options.json:
        cli.print_json([dict(zip(head, map(cli.json_value, row), strict=True)) for row in rows])
        return
    cells = [[_cell_text(value, cli.short_decimal) for value in row] for row in rows]
    print(cli.text_table([head, *cells], "<" + ">" * 12 + "<", optional=("bias", "p", "roundoff", "min subn.")))
    print()
    for line in (_PATTERNS, f"Scaled: {' '.join(formats.SCALED_CATALOGUE)} {_SCALED_PATTERNS}"):
        print(fill(line, cli.output_width(), subsequent_indent="  "))


def _run_info(options: argparse.Namespace) -> None:
    parsed_format = formats.parse_format(options.format)
    fmt = parsed_format.element if isinstance(parsed_format, formats.ScaledFormat) else parsed_format
    cli.check_pictures(options)
    with place_in_errors("--plot"):
        picture = None if options.plot is None else load_name("jchop.plot", "value_grid")(fmt)
    head, codes = _CODE_COLUMNS, _rows_of_codes(fmt, options.all)
    scale_format = parsed_format.scale_format if isinstance(parsed_format, formats.ScaledFormat) else None
    scales: _CodeRows = []
    if options.all and scale_format is not None and scale_format.bits <= _MAX_LISTED_BITS:
        scales = _rows_of_codes(scale_format, True)
    if options.csv:
        check(picture is None and not options.json, "--csv prints codes alone, without --plot and --json")
        print(_codes_as_csv(parsed_format, codes, scales), end="")
        return
    if options.json:
        report: dict[str, Any] = {"format": str(parsed_format), "element": str(fmt)}
        report |= {name: cli.json_value(value) for name, value in _element_facts(fmt).items()}
        report |= _scaling_facts(parsed_format) if isinstance(parsed_format, formats.ScaledFormat) else {}
        for name, rows in ({"codes": codes} | ({"scale codes": scales} if scales else {})).items():
            report[name] = [dict(zip(head, map(cli.json_value, row), strict=True)) for row in rows]
        cli.print_json(report)
        cli.write_pictures(options, lambda: picture)
        return
    if isinstance(parsed_format, formats.ScaledFormat):
        facts, bits = _scaling_facts(parsed_format), parsed_format.bits_per_element()
        facts["bits per element"] = f"{bits:g}{' in a large array' if parsed_format.bits == bits else ''}"
        print(f"{parsed_format}\n\n{_facts_table(facts)}\n\nElements:")
    text = getattr(fmt, "text", str(fmt))
    print(f"{fmt}" + (f"  ({text})" if text != str(fmt) else ""))
    print(_code_layout(fmt))
    print(_facts_table(_element_facts(fmt)))
    for rows in (codes, scales):
        if rows:
            print("\nScales:" if rows is scales else "")
            print(cli.text_table([head, *((*row[:2], _value_text(row[2]), row[3]) for row in rows)], "<<><"))
    if picture is not None:
        print()
    cli.write_pictures(options, lambda: picture)


def _code_layout(fmt: formats.ElementFormat) -> str:
    """The fields of a code, highest bit first."""
    if isinstance(fmt, formats.FloatFormat):
        fields = [("sign", int(fmt.signed)), ("exponent", fmt.exp_bits), ("fraction", fmt.frac_bits)]
    elif isinstance(fmt, formats.TaperedFormat):
        fields = [(fmt.parts, fmt.bits)]
    else:
        uniform = isinstance(fmt, formats.UniformFormat)
        fields = [(("two's complement" if fmt.signed else "unsigned") if uniform else "index", fmt.bits)]
    boxes, bits_left = [], fmt.bits
    for name, width in fields:
        if width:
            bit_range = f"bit {bits_left - 1}" if width == 1 else f"bits {bits_left - 1}..{bits_left - width}"
            box_width = max(len(name), len(bit_range))
            boxes.append((name.center(box_width), bit_range.center(box_width), "-" * (box_width + 2)))
            bits_left -= width
    edge = "  +" + "+".join(box[2] for box in boxes) + "+"
    return "\n".join(["", edge, *("  | " + " | ".join(box[line] for box in boxes) + " |" for line in (0, 1)), edge, ""])


def _element_facts(fmt: formats.ElementFormat) -> dict[str, Any]:
    numbers = ("max", "min", "smallest_normal", "smallest_subnormal", "smallest", "eps", "unit_roundoff")
    facts: dict[str, Any] = {"bits": fmt.bits, "precision": fmt.precision}
    if isinstance(fmt, formats.FloatFormat):
        facts |= {"bias": fmt.bias, "smallest exponent": fmt.emin, "largest exponent": fmt.emax}
    facts |= {name.replace("_", " "): getattr(fmt, name) for name in numbers}
    return facts | {"infinities": fmt.has_inf, "NaN": fmt.has_nan, "-0": fmt.has_negative_zero}


def _facts_table(facts: dict[str, Any]) -> str:
    return cli.facts_table({name: _cell_text(value, cli.fact_text) for name, value in facts.items()})


def _cell_text(value: Any, format_number: Callable[[Any], str]) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, str | int) else format_number(value)


def _scaling_facts(fmt: formats.ScaledFormat) -> dict[str, Any]:
    """The grouping of a scaled format, and the choice and format of its scales."""
    group = f"{fmt.group} along axis {fmt.axis}" if fmt.group is not None else "the whole tensor"
    return {
        "group": group if fmt.channel is None else f"each index of axis {fmt.channel}",
        "scale": str(fmt.scale),
        "rule": f"{fmt.rule}: {fmt.scale_rule.formula}",
        "zero point": None if fmt.zero_point is None else str(fmt.zero_point),
        **({"sparse": "{} of every {} along axis {}".format(*fmt.sparse, fmt.axis_of_sparse)} if fmt.sparse else {}),
        "bits per element": fmt.bits_per_element(),
    }


def _value_text(value: float | Fraction | None) -> str:
    return cli.short_decimal(value) if value is None else cli.integer_digits(value) or cli.short_decimal(value)


#: The columns of a table of codes.
_CODE_COLUMNS = ("code", "binary", "value", "which")
_MAX_LISTED_BITS = 16
_CodeRows = list[tuple[str, str, Any, str]]


def _codes_as_csv(fmt: formats.ElementFormat | formats.ScaledFormat, codes: _CodeRows, scales: _CodeRows) -> str:
    """A line for each code, with its exact value; of a scaled format for codes of elements, then of scales."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    has_parts = isinstance(fmt, formats.ScaledFormat)
    writer.writerow((*["part"] * has_parts, *_CODE_COLUMNS))
    for part, rows in {"element": codes, "scale": scales}.items():
        writer.writerows((*[part] * has_parts, *map(cli.json_value, row)) for row in rows)
    return text.getvalue()


def _rows_of_codes(fmt: formats.ElementFormat, every: bool = False) -> _CodeRows:
    """Codes with their values: every one, or the notable ones that the format has."""
    candidates = {
        "zero": 0.0,
        "minus zero": -0.0 if fmt.has_negative_zero else None,
        "smallest positive": fmt.smallest,
        "smallest normal": fmt.smallest_normal,
        "one": 1.0,
        "largest": fmt.max,
        "lowest": fmt.min,
        "infinity": math.inf if fmt.has_inf else None,
        "NaN": math.nan if fmt.has_nan else None,
    }
    names: dict[int, list[str]] = {}
    for name, value in candidates.items():
        code = None if value is None else fmt.code_of(value)
        if code is not None:
            names.setdefault(code, []).append(name)
    if every:
        check(fmt.bits <= _MAX_LISTED_BITS, f"--all lists codes of up to {_MAX_LISTED_BITS} bits; {fmt} has {fmt.bits}")
        names = {code: names.get(code, []) for code in range(1 << fmt.bits)}
    return [(*cli.code_texts(fmt, code), fmt.value_of(code), ", ".join(words)) for code, words in names.items()]


FORMAT_LIST = cli.Command("formats", _run_formats, "list the named formats", [cli.argument("--json")])
INFO = cli.Command(
    "info",
    _run_info,
    "show the properties of one format, its bit layout, its values",
    (
        cli.argument("format", "FORMAT", "a name or pattern: e4m3fn, bfloat16, e6m9, fixed4.4, ..."),
        cli.argument("--plot", help="draw its values (needs matplotlib)"),
        cli.argument("--json", help="print JSON in place of the tables"),
        cli.flag("--all", "list every code, and the codes of scales"),
        cli.flag("--csv", "print the codes alone, as CSV"),
    ),
)


# -- doctor: the installed packages, the devices, and the parts of jchop that run on them ------------------------------


#: The extras that users install: the distributions that each brings, and the parts that need them.
USER_EXTRAS = {
    "flax": (("flax",), "jchop.nn"),
    "equinox": (("flax", "equinox"), "jchop.nn of Equinox modules"),
    "optax": (("optax",), "jchop.optim"),
    "torch": (("torch",), "jchop.torch"),
    "plot": (("matplotlib",), "jchop.plot, --plot"),
    "qwix": (("qwix",), "to_qwix, from_qwix"),
    "dask": (("dask",), "round_to_format of dask arrays"),
    "study": (("flax", "optax", "matplotlib", "scikit-learn"), "jchop study without a function"),
}
_CORE_DISTRIBUTIONS = ("jchop", "jax", "jaxlib", "numpy")


def _run_doctor(options: argparse.Namespace) -> None:
    """Prints the `environment_facts`, as tables or as JSON."""
    facts = environment_facts()
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    print(cli.text_table([*facts["versions"].items(), *facts["settings"].items()], "<<", rule=False))
    print()
    if "error" in facts:
        print(f"no devices: {facts['error']}")
    else:
        rows = [("device", "number", "jchop runs", "products of int8", "of float8", "of codes and floats")]
        rows += [tuple(str(value or "-") for value in row.values()) for row in facts["devices"]]
        print(cli.text_table(rows, "<><<<<"))
    print()
    rows = [("extra", "for", "installed", "to install")]
    for row in facts["extras"]:
        versions = ", ".join(f"{name} {v or 'missing'}" for name, v in row["installed"].items())
        rows.append((row["extra"], row["for"], versions, row["install"] or "-"))
    print(cli.text_table(rows, "<<<<"))


def environment_facts() -> dict[str, Any]:
    """Versions, settings, devices and extras, as plain data."""
    facts: dict[str, Any] = {
        "versions": {
            "Python": platform.python_version(),
            **{name: distribution_version(name) or "(not installed)" for name in _CORE_DISTRIBUTIONS},
        },
        "settings": {
            "machine": f"{platform.system()} {platform.machine()}",
            "64-bit mode": "on" if jax.config.jax_enable_x64 else "off",  # type: ignore[attr-defined]
        },
    }
    try:
        devices = devices_at_hand()
    except RuntimeError as error:  # a backend that does not start
        facts["error"] = " ".join(str(error).split())
    else:
        facts["settings"]["fast math of XLA"] = "on: jchop refuses to compute" if has_fast_math() else "off"
        facts["devices"] = [_device_facts(*key, count) for key, count in devices.items()]
    facts["extras"] = [_extra_facts(*row) for row in USER_EXTRAS.items()]
    return facts


def _device_facts(device_kind: str, backend: str, kernels: bool, count: int) -> dict[str, Any]:
    letters = device_kind.lower().replace(" ", "").replace("lite", "e").replace("tpu7x", "tpuv7x")
    letters = "cpu" if backend == "cpu" else letters
    units = next((units for name, units in OPERANDS_BY_PLATFORM.items() if name in letters), {})
    device = f"{backend}: {device_kind}" if device_kind != backend else device_kind
    facts = {"device": device, "number": count, "runs": "XLA, Pallas kernels" if kernels else "XLA"}
    return facts | {name: units.get(name) for name in ("int8", "float8", "alone")}


def _extra_facts(name: str, row: tuple[tuple[str, ...], str]) -> dict[str, Any]:
    versions = {distribution: distribution_version(distribution) for distribution in row[0]}
    install = None if all(versions.values()) else INSTALL_EXTRA.format(extra=name)
    return {"extra": name, "for": row[1], "installed": versions, "install": install}


DOCTOR = cli.Command(
    "doctor",
    _run_doctor,
    "show versions, devices, what runs on them, and missing extras",
    [cli.argument("--json", help="print JSON")],
)
