"""The command line: what each command prints and writes, and that an error is one line and status 2."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jchop.__main__ import main
from jchop._round import round_to_format
from jchop.formats import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Runs a command that must succeed in silence on standard error; what it prints."""
    status = main(argv)
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out.splitlines()


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must fail; its one line on standard error, without the prefix."""
    status = main(argv)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("jchop: error: ") and printed.err.endswith("\n") and printed.err.count("\n") == 1
    return printed.err.removeprefix("jchop: error: ").strip()


def python(*argv: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *argv], capture_output=True, timeout=120, env=environment, **options)


# -- formats, info ---------------------------------------------------------------------------------------------------
def test_formats_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    head, rule, *rows = lines(capsys, "formats")
    rows = rows[: len(CATALOGUE)]
    assert head.split()[:3] == ["name", "bits", "exp"] and set(rule) == {"-"}
    assert [row.split()[0] for row in rows] == list(CATALOGUE)
    binary16 = rows[0].split()
    assert binary16[:7] == ["binary16", "16", "5", "10", "15", "11", "65504"]
    assert binary16[10:] == ["yes", "yes", "yes", "float16", "half", "fp16", "h"]
    assert all(len(row) <= len(rule) for row in rows)


def test_info_shows_facts_fields_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines(capsys, "info", "e4m3fn"))
    assert text.startswith("float8_e4m3fn")
    assert "| bit 7 | bits 6..3 | bits 2..0 |" in text
    for line in (
        "  max                 448",
        "  smallest subnormal  0.001953125  = 2^-9",
        "  infinities          no",
        "0x7e  0 1111 110       448  largest",
        "0x7f  0 1111 111       nan  NaN",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    "name",
    [*CATALOGUE, "fixed4.4", "ufixed1.7", "int8", "uint4", "binary8p3se", "binary16p1uf", "codebook(-1,0,0.5)", "e6m9"],
)
def test_info_knows_every_kind_of_format(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = lines(capsys, "info", name)
    assert any(line.split() and line.split()[0] == "bits" for line in text)
    assert any(line.endswith("largest") or "largest," in line for line in text)


def test_info_draws_the_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "grid.png"
    assert lines(capsys, "info", "e2m1fn", "--plot", str(file))[-1] == f"wrote {file}"
    assert file.read_bytes().startswith(PNG)
    assert list(tmp_path.iterdir()) == [file]


# -- round -----------------------------------------------------------------------------------------------------------
def test_round_shows_value_code_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    head, columns, _, *rows = lines(capsys, "round", "0.1", "1e9", "-1e9", "-inf", "nan", "--to", "e5m2:up")
    assert head == "to float8_e5m2:up, carrier float64"
    assert columns.split() == ["value", "rounded", "code", "binary", "abs.", "error", "rel.", "error"]
    assert [row.split() for row in rows] == [
        ["0.1", "0.109375", "0x2f", "0", "01011", "11", "0.009375", "0.09375"],
        ["1000000000", "inf", "0x7c", "0", "11111", "00", "inf", "inf"],
        ["-1000000000", "-57344", "0xfb", "1", "11110", "11", "9.999e+08", "0.9999"],
        ["-inf", "-inf", "0xfc", "1", "11111", "00", "0", "0"],
        ["nan", "nan", "0x7e", "0", "11111", "10", "nan", "nan"],
    ]


def test_round_takes_fields_from_the_spec_and_from_options(capsys: pytest.CaptureFixture[str]) -> None:
    spec = lines(capsys, "round", "1e9", "--to", "e5m2:up:saturate")
    options = lines(capsys, "round", "1e9", "--to", "e5m2:down", "--rounding", "up", "--overflow", "saturate")
    assert spec == options
    assert spec[-1].split()[1] == "57344"


def test_round_starts_from_the_carrier(capsys: pytest.CaptureFixture[str]) -> None:
    # 1 + 2^-4 + 2^-30 lies above a tie of e4m3; float32 holds no trace of the last term, so there it is the tie itself.
    value = "0x1.10000004p0"
    assert lines(capsys, "round", value, "--to", "e4m3")[-1].split()[1] == "1.125"
    assert lines(capsys, "round", value, "--to", "e4m3", "--carrier", "float32")[-1].split()[1] == "1"
    assert lines(capsys, "round", value, "--to", "e4m3", "--carrier", "bfloat16")[0].endswith("bfloat16")


def test_round_draws_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def draw(seed: int) -> list[str]:
        words = f"--to e5m2 --rounding stochastic --random-bits 8 --seed {seed}"
        return lines(capsys, "round", *["1.1"] * 64, *words.split())[3:]

    assert draw(0) == draw(0) != draw(1)
    assert {row.split()[1] for row in draw(0)} == {"1", "1.25"}


@pytest.mark.parametrize("values", [[], ["-"]])
def test_round_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("0.3 7\n  100\n"))
    rows = lines(capsys, "round", *values, "--to", "e2m1fn:saturate")[3:]
    assert [row.split()[:3] for row in rows] == [["0.3", "0.5", "0x1"], ["7", "6", "0x7"], ["100", "6", "0x7"]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_round_keeps_the_type_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: type) -> None:
    source, target = tmp_path / "x.npy", tmp_path / "y.npy"
    array = np.array([[0.1, -3.0, 1e4], [1e-4, 0.0, np.nan]]).astype(dtype)
    np.save(source, array)
    text = lines(capsys, "round", str(source), "--to", "e4m3", "--out", str(target))
    written = np.load(target)
    assert written.dtype == array.dtype
    np.testing.assert_array_equal(written, round_to_format(array, "e4m3"))
    facts = {line.split("  ")[1].strip(): line.split("  ")[-1].strip() for line in text[1:-1]}
    assert facts["elements"] == "6, shape (2, 3)"
    assert facts["changed"] == "3"
    assert facts["overflows"] == "1 to inf or nan, 0 to a finite value"
    assert facts["underflows"] == "1 to zero"
    assert facts["nan in the input"] == "1"
    assert facts["largest rel. error"] == "1 (overflows apart)"
    assert text[-1] == f"wrote {target}"


def test_round_counts_saturation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1000.0, -1000.0, 448.0, np.inf]))
    text = "\n".join(lines(capsys, "round", str(tmp_path / "x.npy"), "--to", "e4m3fn:saturate"))
    assert "0 to inf or nan, 2 to a finite value" in text
    assert "largest abs. error  552" in text


def test_round_converts_a_file_only_without_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole, fine = tmp_path / "whole.npy", tmp_path / "fine.npy"
    np.save(whole, np.arange(5))
    np.save(fine, np.array([0.1]))
    assert "carrier float32" in lines(capsys, "round", str(whole), "--to", "e4m3", "--carrier", "float32")[0]
    assert "say --carrier float64" in error(capsys, "round", str(whole), "--to", "e4m3")
    assert "rounded twice" in error(capsys, "round", str(fine), "--to", "e4m3", "--carrier", "float32")


def test_a_failed_write_leaves_the_old_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "y.npy"
    target.write_bytes(b"old")

    def broken(file, array, **options) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(np, "save", broken)
    assert main(["round", "1", "--to", "e4m3", "--out", str(target)]) == 2
    assert capsys.readouterr().err == f"jchop: error: {target}: No space left on device\n"
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["info", "e4m3xx"], "e4m3xx"),
        (["info", "binary32", "--plot", "x.png"], "32 bits"),
        (["info", "e4m3", "--plot", "x.pdf"], "must end in .png"),
        (["info", "e4m3", "--plot", "no-such-folder/x.png"], "no folder"),
        (["round", "1", "--to", "e5m2z"], "close: e5m2"),
        (["round", "1", "--to", "e5m2", "--rounding", "sideways"], "sideways"),
        (["round", "1", "--to", "e5m2", "--overflow", "explode"], "explode"),
        (["round", "abc", "--to", "e5m2"], "bad number 'abc'"),
        (["round", "1"], "--to"),
        (["round", "1", "--to", "e5m2:stochastic"], "--seed"),
        (["round", "1", "--to", "e5m2", "--random-bits", "8"], "random_bits"),
        (["round", "1", "--to", "e9m10", "--carrier", "float32"], "float64"),
        (["round", "no-such-file.npy", "--to", "e5m2"], "no-such-file.npy: No such file"),
        (["round", "a.npy", "1", "--to", "e5m2"], "stands alone"),
        (["round", "1", "--to", "e5m2", "--out", "y.txt"], "must end in .npy"),
        (["study", "--dataset", "mnist"], "mnist"),
        (["study", "--formats", "e9x", "--out", "{tmp}"], "e9x"),
        (["study", "--formats", "e9m10", "--out", "{tmp}"], "float64"),
        (["study", "--formats", "e5m2:up", "--out", "{tmp}"], "--modes"),
        (["study", "--modes", "sideways", "--out", "{tmp}"], "sideways"),
        (["study", "--seeds", "0", "--out", "{tmp}"], "seeds"),
        (["study", "--epochs", "0", "--out", "{tmp}"], "epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], said: str) -> None:
    assert said in error(capsys, *[word.replace("{tmp}", str(tmp_path)) for word in argv])


def test_a_file_that_is_no_array_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for content in (b"", b"not an array"):
        (tmp_path / "x.npy").write_bytes(content)
        assert "x.npy" in error(capsys, "round", str(tmp_path / "x.npy"), "--to", "e5m2")


def test_no_values_on_a_terminal_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert "no values" in error(capsys, "round", "--to", "e5m2")


@pytest.mark.parametrize(
    ("package", "argv", "extra"),
    [
        ("matplotlib", ["info", "e4m3", "--plot", "x.png"], "plot"),
        *((p, ["study"], "study") for p in ("flax", "sklearn")),
    ],
)
def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    package: str,
    argv: list[str],
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    said = error(capsys, *argv)
    assert package in said and f'pip install "jchop[{extra}]"' in said
    assert list(tmp_path.iterdir()) == []


# -- as a process ----------------------------------------------------------------------------------------------------
def test_as_a_process() -> None:
    good = python("-m", "jchop", "round", "--to", "e5m2", input=b"0.1\n")
    assert (good.returncode, good.stderr) == (0, b"")
    assert b"0.09375  0x2e  0 01011 10" in good.stdout
    bad = python("-m", "jchop", "round", "abc", "--to", "e5m2")
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"jchop: error: bad number 'abc'") and bad.stderr.count(b"\n") == 1
    assert b"{formats" not in python("-m", "jchop", "--help").stdout


def test_light_commands_load_no_extra() -> None:
    code = (
        "import sys; from jchop.__main__ import main; main(['formats']); main(['info', 'e4m3']);"
        "print(sorted({'flax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    assert python("-c", code, text=True).stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(os.name != "posix", reason="pipes of another kind")
def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "jchop", "round", *["0.1"] * 5000, "--to", "e5m2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), said) == (141, b"")
