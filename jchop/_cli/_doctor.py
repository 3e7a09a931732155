"""``jchop doctor``: what is installed, which devices there are, and what jchop runs on them."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from jchop._cli._command import Command, argument
from jchop._cli._text import text_table
from jchop._common.files import INSTALL_EXTRA
from jchop._common.settings import has_fast_math
from jchop._kernels.primitive import devices_at_hand
from jchop._quantized.program.report import OPERANDS_BY_PLATFORM

#: The extras that users install: the distributions that each brings, and what needs them.
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
    print(text_table([*facts["versions"].items(), *facts["settings"].items()], "<<", rule=False))
    print()
    if "error" in facts:
        print(f"no devices: {facts['error']}")
    else:
        rows = [("device", "number", "jchop runs", "products of int8", "of float8", "of codes and floats")]
        print(text_table([*rows, *(tuple(str(v or "-") for v in row.values()) for row in facts["devices"])], "<><<<<"))
    print()
    rows = [("extra", "for", "installed", "to install")]
    for row in facts["extras"]:
        versions = ", ".join(f"{name} {v or 'missing'}" for name, v in row["installed"].items())
        rows.append((row["extra"], row["for"], versions, row["install"] or "-"))
    print(text_table(rows, "<<<<"))


def environment_facts() -> dict[str, Any]:
    """Versions, settings, devices and extras, as plain data."""
    facts: dict[str, Any] = {
        "versions": {
            "Python": platform.python_version(),
            **{name: _distribution_version(name) or "(not installed)" for name in _CORE_DISTRIBUTIONS},
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
    letters = "cpu" if backend == "cpu" else _platform_letters(device_kind)
    units = next((units for name, units in OPERANDS_BY_PLATFORM.items() if name in letters), {})
    return {
        "device": f"{backend}: {device_kind}" if device_kind != backend else device_kind,
        "number": count,
        "runs": "XLA, Pallas kernels" if kernels else "XLA",
        "int8": units.get("int8"),
        "float8": units.get("float8"),
        "alone": units.get("alone"),
    }


def _platform_letters(device_kind: str) -> str:
    """The kind of a device as `OPERANDS_BY_PLATFORM` writes it: a TPU "v5 lite" is a v5e."""
    return device_kind.lower().replace(" ", "").replace("lite", "e").replace("tpu7x", "tpuv7x")


def _extra_facts(name: str, row: tuple[tuple[str, ...], str]) -> dict[str, Any]:
    versions = {distribution: _distribution_version(distribution) for distribution in row[0]}
    install = None if all(versions.values()) else INSTALL_EXTRA.format(extra=name)
    return {"extra": name, "for": row[1], "installed": versions, "install": install}


def _distribution_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


DOCTOR = Command(
    "doctor",
    _run_doctor,
    "show versions, devices, what runs on them, and missing extras",
    [argument("--json", help="print JSON")],
)
