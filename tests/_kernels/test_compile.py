"""Every kernel compiled for every chip, without the chips; and the proof that a fault would be seen."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jax
import pytest
from _kernels import code_table, compile_aligned, compile_codes, compiling

import jchop as jc

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def require_compiler(target: str, config: pytest.Config) -> None:
    """Skips where the target's compiler is missing; fails under `--compilers`, which says that it has to be there."""
    reason = compiling.available()[target]
    if reason is None:
        return
    if config.getoption("--compilers", default=False):
        pytest.fail(f"no compiler for {target}: {reason}")
    pytest.skip(f"no compiler for {target}: {reason}")


#: Every family of kernels for every chip, also where the body runs; and the table of products on this machine.
COMPILED = [
    pytest.param(target, file, id=f"{target}-{file.stem.removeprefix('compile_')}")
    for file in compiling.families()
    for target in compiling.TARGETS
    if compiling.is_tpu(target) or file.stem != "compile_round"  # rounding has a kernel for hardware bits alone
]
COMPILED += [pytest.param(compiling.CPU, Path(compile_codes.__file__), id="cpu-codes", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("target", "file"), COMPILED)
def test_kernels_compile(target: str, file: Path, pytestconfig: pytest.Config) -> None:
    if target == compiling.CPU:
        check_table(target, compiling.run(target, file))
        return
    require_compiler(target, pytestconfig)
    results = compiling.run(target, file)
    print("\n".join(map(str, results)))
    assert results, f"{file.name} has no case for {target}"
    faults = [str(result) for result in results if result.fault]
    assert not faults, f"{len(faults)} of {len(results)} for {target}:\n" + "\n".join(faults)
    if file.stem == "compile_codes":
        check_table(target, results)


def check_table(target: str, results: list[compiling.Result]) -> None:
    """The column of a target in docs/kernels.md, if it was written by this version of JAX."""
    version, columns = compile_codes.committed(PAGE.read_text())
    if version == jax.__version__:
        assert compile_codes.told(results) == columns[target], "write the table again: compile_codes.py --table"


def test_the_table_of_products_is_read_as_it_is_written() -> None:
    version, columns = compile_codes.committed(PAGE.read_text())
    assert set(columns) == {*compiling.TARGETS, compiling.CPU}
    again = compile_codes.table(columns).replace(f"JAX {jax.__version__} ", f"JAX {version} ")
    assert again in PAGE.read_text()


def test_the_table_of_code_has_every_kernel_on_every_chip() -> None:
    """And decoding keeps its bounds: no spill; of int4 few instructions, and enough bytes in flight."""
    page = PAGE.read_text()
    for row in code_table.ROWS:
        for target in code_table.RATES:
            cells = re.findall(rf"^\| {re.escape(row.name)} \| {target} \| (.*) \|$", page, re.MULTILINE)
            assert len(cells) == 1, (row.name, target)
            if not row.loaded or cells[0].startswith("XLA"):
                continue
            _, spilled, unit, _, in_flight, each, _ = cells[0].split(" | ")
            assert spilled == "0" and "mma.sync" in unit
            assert not row.name.startswith("int4") or (float(each) <= 2.5 and int(in_flight) >= 64)


def test_instructions_of_a_loop_count_for_each_pass() -> None:
    row = code_table.Row("", "", numbers=4, passes=3, count=12)
    assert row.instructions(20, [10, 6]) == (20 + 2 * 10) / 12


def test_every_tensor_core_is_compiled() -> None:
    presets = {f"{unit} {dtype}" for unit, types in jc.TENSOR_CORES.items() for dtype in types}
    for target in compiling.TARGETS:
        names = [name for case in compile_aligned.cases(target) for name in case.name.split(", ") if name in presets]
        assert presets <= set(names) and len(names) == len(set(names))


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"libtpu": "0.9.1"}, None),
        ({"libtpu": "0.9"}, None),
        ({"libtpu": "0.8.7"}, "libtpu 0.8.7 is installed, but JAX 9.9 needs ==0.9.*"),
        ({}, "libtpu is not installed"),
    ],
    ids=str,
)
def test_a_compiler_is_there_at_the_version_that_jax_asks_for(installed, reason, monkeypatch) -> None:
    monkeypatch.setattr(compiling.metadata, "version", lambda name: version_of(name, {"jax": "9.9", **installed}))
    monkeypatch.setattr(compiling.metadata, "requires", lambda name: ["numpy>=2", 'libtpu==0.9.*; extra == "tpu"'])
    found = compiling.available()
    assert found["v5e"] == found["v7x"]
    assert (found["v5e"] is None) if reason is None else (reason in str(found["v5e"]))
    assert "jax-cuda13-plugin is not installed" in str(found["h200"])


def version_of(name: str, installed: dict[str, str]) -> str:
    if name not in installed:
        raise compiling.metadata.PackageNotFoundError(name)
    return installed[name]


FAULTY = Path(__file__).with_name("faulty_cases.py")
# The quirk `float8_without_tiles_at_highest_precision`: of all tested versions but 0.10.
HIGHEST_FAILS = jax.__version__.rsplit(".", jax.__version__.count(".") - 1)[0] != "0.10"
# What each case of faulty_cases.py must be reported as: part of its fault, or None.
FAULTS: dict[str, str | None] = {
    "sound": None,
    "raises": "ValueError: this is why",
    "dies": "the process ended with -6",
    "sound again": None,
}
TPU_FAULTS = {"modest": None, "greedy": "asks for 50000000 bytes of VMEM"}
GPU_FAULTS = {
    "vectors": None,
    "scalar loads": "no vector load among 1",
    "spills": "bytes spill" if shutil.which("ptxas") else None,
    "float8, HIGH": None,
    "float8, HIGHEST": "failed to legalize" if HIGHEST_FAILS else None,
    "float8, small tile": "mma.sync",
    "no kernel": "no PTX of a kernel was found",
}


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_faults_are_reported(target: str, pytestconfig: pytest.Config) -> None:
    """Wrong kernels and a case that ends the process: each is named, and the rest go on."""
    require_compiler(target, pytestconfig)
    expected = FAULTS | (TPU_FAULTS if compiling.is_tpu(target) else GPU_FAULTS)
    check_faults(compiling.run(target, FAULTY), expected)


def test_a_case_that_never_ends_is_reported(pytestconfig: pytest.Config) -> None:
    require_compiler("a100", pytestconfig)
    expected = {"sound": None, "hangs": "still running after", "never reached": "not reached in time"}
    check_faults(compiling.run("a100", FAULTY, timeout=30), expected)


def check_faults(results: list[compiling.Result], expected: dict[str, str | None]) -> None:
    assert {result.name for result in results} == set(expected)
    for result in results:
        wanted = expected[result.name]
        assert (result.fault is None) if wanted is None else (wanted in str(result.fault)), result
