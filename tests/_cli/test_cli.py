"""The command line: what each command prints and writes, and that an error is one line and status 2."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.__main__ import main
from jchop._cli._command import json_value
from jchop._round.round_to_format import round_to_format
from jchop.formats import CATALOGUE, parse_format

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"flax", "optax", "torch", "matplotlib", "sklearn", "dask", "treescope", "equinox"}
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
    # jaxlib writes to standard error if it loads a compiled program on some machines.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run([sys.executable, *argv], capture_output=True, timeout=120, env=environment, **options)


# -- formats, info ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["formats", "doctor", "round 1e-300 1.1 --to binary64 --carrier float64"])
def test_tables_fit_the_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, lines(capsys, *command.split()))) <= 100
    monkeypatch.setenv("COLUMNS", "300")
    assert "…" not in "".join(lines(capsys, *command.split()))


def test_formats_lists_the_catalogue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
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


@each(
    "name",
    [
        *CATALOGUE,
        "fixed4.4",
        "ufixed1.7",
        "integer8",
        "uinteger4",
        "binary8p3se",
        "binary16p1uf",
        "codebook(-1,0,0.5)",
        "e6m9",
    ],
)
def test_info_knows_every_kind_of_format(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = lines(capsys, "info", name)
    assert any(line.split() and line.split()[0] == "bits" for line in text)
    assert any(line.endswith("largest") or "largest," in line for line in text)


@each("name", ["float6_e3m2fn", "posit8", "fixed3.3", "mxfp4", "nvfp4", "int4(group=32)"])
def test_info_lists_every_code_as_csv(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The values are those of the codes: elements, then scales that are stored as codes; JSON has the same."""
    fmt = parse_format(name)
    rows = list(csv.DictReader(lines(capsys, "info", name, "--all", "--csv")))
    report = json.loads("\n".join(lines(capsys, "info", name, "--all", "--json")))
    parts = {None: (fmt, "codes")} if isinstance(fmt, jc.formats.ElementFormat) else {
        "element": (fmt.element, "codes"), "scale": (fmt.scale_format, "scale codes")
    }  # fmt: skip
    for part, (own, in_json) in parts.items():
        values = [row["value"] for row in rows if row.get("part") == part]
        if own.bits > 16:
            assert not values and in_json not in report
            continue
        exact = [own.value_of(code) for code in range(1 << own.bits)]
        assert [None if v == "" else v for v in values] == [None if v is None else str(json_value(v)) for v in exact]
        assert [row["code"] for row in report[in_json]] == [row["code"] for row in rows if row.get("part") == part]
        assert "\n".join(lines(capsys, "info", name, "--all")).count("\n0x") >= len(values)


def test_info_shows_every_digit_of_an_integer(capsys: pytest.CaptureFixture[str]) -> None:
    text = lines(capsys, "info", "integer64")
    assert "  max                 9223372036854775807" in text
    assert "  min                 -9223372036854775808  = -2^63" in text
    ends = [line.split()[2:] for line in text if line.startswith("0x")]
    assert ends[-2:] == [["9223372036854775807", "largest"], ["-9223372036854775808", "lowest"]]


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
    assert spec == lines(capsys, "round", "1e9", "--to", "e5m2", "--rounding", "up", "--overflow", "saturate")
    assert spec == lines(capsys, "round", "1e9", "--to", "e5m2:saturate", "--rounding", "ru")
    assert spec[-1].split()[1] == "57344"


@each(
    ("spec", "option", "said"),
    [
        ("e4m3:up", "--rounding=down", "'e4m3:up:down' gives rounding twice"),
        ("e4m3:nearest_even", "--rounding=down", "gives rounding twice"),
        ("e4m3:saturate", "--overflow=ieee", "gives overflow twice"),
        ("e4m3:sr:random_bits=4", "--random-bits=8", "gives random_bits twice"),
        ("e4m3", "--rounding=saturate", "rounding='saturate' is not known"),
    ],
)
def test_round_takes_a_field_from_one_place(
    capsys: pytest.CaptureFixture[str], spec: str, option: str, said: str
) -> None:
    assert said in error(capsys, "round", "1", "--to", spec, option, "--seed", "0")


def test_round_starts_from_the_carrier(capsys: pytest.CaptureFixture[str]) -> None:
    # 1 + 2^-4 + 2^-30 lies above a tie of e4m3; float32 holds no trace of the last term, so there it is the tie itself.
    value = "0x1.10000004p0"
    assert lines(capsys, "round", value, "--to", "e4m3")[-1].split()[1] == "1.125"
    assert lines(capsys, "round", value, "--to", "e4m3", "--carrier", "float32")[-1].split()[1] == "1"
    assert lines(capsys, "round", value, "--to", "e4m3", "--carrier", "bfloat16")[0].endswith("bfloat16")


@each(
    ("word", "options", "row"),
    [
        ("70000", "--to e5m10 --carrier float16", "70000 inf 0x7c00 inf inf"),
        ("1e400", "--to e5m2", "1e400 inf 0x7c inf inf"),
        ("-1e400", "--to e5m2:saturate", "-1e400 -57344 0xfb 1e+400 1"),
        ("1e-400", "--to e5m2", "1e-400 0 0x00 1e-400 1"),
        # Numbers beyond float64, and beside a tie of its numbers, are rounded once.
        ("1e400", "--to e4m3fn:toward_zero", "1e400 448 0x7e 1e+400 1"),
        ("1e400", "--to binary64", "1e400 inf 0x7ff0000000000000 inf inf"),
        ("1e-400", "--to e5m2:up", "1e-400 1.52587890625e-05 0x01 1.526e-05 1.526e+395"),
        ("1.12500000000000000001", "--to e5m2", "1.12500000000000000001 1.25 0x3d 0.125 0.1111"),
        ("1.12500000000000000001", "--to e5m2 --carrier float64", "1.12500000000000000001 1 0x3c 0.125 0.1111"),
        ("0.1", "--to binary64", "0.1 0.1 0x3fb999999999999a 5.551e-18 5.551e-17"),
        ("0.1", "--to binary64 --carrier float16", "0.1 0.1 0x3fb9980000000000 2.441e-05 0.0002441"),
        ("0x1.00000000000008p0", "--to binary64", "0x1.00000000000008p0 1 0x3ff0000000000000 1.11e-16 1.11e-16"),
        # 1 + 2^-8 + 2^-56 is above a tie of bfloat16; its float64 is the tie.
        ("0x1.01000000000001p0", "--to bf16 --carrier bfloat16", "0x1.01000000000001p0 1.00781 0x3f81 0.003906 0.003891"),  # noqa: E501
        ("1" * 1000, "--to e2m1fn", f"{'1' * 60}... 6 0x7 1.111e+999 1"),
        ("-inf", "--to e2m1fn", "-inf -6 0xf inf nan"),
        ("-0", "--to e5m2", "-0 -0 0x80 0 0"),
        ("-0x1.8p3", "--to e5m2", "-12 -12 0xca 0 0"),
        ("0", "--to e8m0fnu", "0 5.877471754111438e-39 0x00 5.877e-39 inf"),
        (".5", "--to e5m2", "0.5 0.5 0x38 0 0"),
        ("5.", "--to e5m2", "5 5 0x45 0 0"),
    ],
)  # fmt: skip
def test_round_shows_the_error_of_the_number_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str, options: str, row: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    value, rounded, code, *rest = lines(capsys, "round", word, *options.split())[-1].split()
    assert " ".join([value, rounded, code, *rest[-2:]]) == row


def test_round_draws_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def draw(seed: int) -> list[str]:
        words = f"--to e5m2 --rounding stochastic --random-bits 8 --seed {seed}"
        return lines(capsys, "round", *["1.1"] * 64, *words.split())[3:]

    assert draw(0) == draw(0) != draw(1)
    assert {row.split()[1] for row in draw(0)} == {"1", "1.25"}


@each("values", [[], ["-"]])
def test_round_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("0.3 7\n  100\n"))
    rows = lines(capsys, "round", *values, "--to", "e2m1fn:saturate")[3:]
    assert [row.split()[:3] for row in rows] == [["0.3", "0.5", "0x1"], ["7", "6", "0x7"], ["100", "6", "0x7"]]


@each("dtype", [np.float16, np.float32, np.float64, np.complex64])
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
    assert facts["finite overflows"] == "1 to inf or nan, 0 to a finite value"
    assert facts["underflows"] == "1 to zero"
    assert facts["inf in the input"] == "0, 0 to nan, 0 to a finite value"
    assert facts["nan in the input"] == "1, 0 to a finite value"
    assert facts["largest rel. error"] == "1 (overflows apart)"
    assert text[-1] == f"wrote {target}"


def test_round_counts_a_complex_number_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1.1 + 2.3j, 1 + 1e9j, 1e-9 + 1e-9j, 1 + 2j, np.nan + 1j], np.complex64))
    text = "\n".join(lines(capsys, "round", str(tmp_path / "x.npy"), "--to", "e5m2"))
    counts = re.findall(r"(elements|changed|overflows|underflows|nan in the input) +(\d+)", text)
    assert [int(count) for _, count in counts] == [5, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("to", "to_nan", "to_finite", "nans_to_finite"),
    [("e5m2", 0, 0, 0), ("e4m3fn", 3, 0, 0), ("e2m1fn", 0, 3, 0), ("int8(group=2)", 0, 3, 1)],
)
def test_round_counts_what_became_of_infinities_and_nan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, to: str, to_nan: int, to_finite: int, nans_to_finite: int
) -> None:
    x = np.array([np.inf, -np.inf, 1e9, np.inf, np.nan, 1.0])
    np.save(path := tmp_path / "x.npy", x)
    found = json.loads("\n".join(lines(capsys, "round", str(path), "--to", to, "--json")))
    names = ("infinities", "infinities to nan", "infinities to finite", "nans", "nans to finite", "underflows")
    assert [found[name] for name in names] == [3, to_nan, to_finite, 1, nans_to_finite, 0]
    same = np.isclose(x, np.asarray(round_to_format(x, to)), rtol=0, atol=0, equal_nan=True)
    assert found["changed"] == np.count_nonzero(~same)
    text = "\n".join(lines(capsys, "round", str(path), "--to", to))
    assert f"inf in the input    3, {to_nan} to nan, {to_finite} to a finite value" in text
    assert f"nan in the input    1, {nans_to_finite} to a finite value" in text


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
    assert "pass --carrier float64" in error(capsys, "round", str(whole), "--to", "e4m3")
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
    assert main(["round", "1", "--to", "e4m3", "--out", str(target), "--force"]) == 2
    assert capsys.readouterr().err == f"jchop: error: {target}: No space left on device\n"
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@each("value", ["1.1", "{tmp}/x.npy"])
def test_round_replaces_a_file_only_with_force(capsys: pytest.CaptureFixture[str], tmp_path: Path, value: str) -> None:
    out = tmp_path / "x.npy"
    np.save(out, np.array([1.1]))
    argv = ["round", value.format(tmp=tmp_path), "--to", "e5m2", "--out", str(out)]
    assert f"--out {out} exists; --force replaces it" in error(capsys, *argv)
    assert np.load(out).tolist() == [1.1]
    lines(capsys, *argv, "--force")
    assert np.load(out).tolist() == [1.0]


@pytest.mark.parametrize("count", [1 << 11, pytest.param(1 << 24, marks=pytest.mark.slow)])
def test_round_takes_a_file_in_pieces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    """Progress is shown, the whole is never in memory, and the bytes are those of the array rounded whole."""
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    argv = ("round", str(tmp_path / "x.npy"), "--to", "bf16", "--out", str(tmp_path / "y.npy"))
    if count < 1 << 24:
        monkeypatch.setattr("jchop._cli._round._CHUNK_BYTES", 512)
        assert main(argv) == 0
        out, said = capsys.readouterr()
    else:
        if os.name != "posix":
            pytest.skip("measures a process")
        code = (
            "import resource, sys; from jchop.__main__ import main\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
            "assert main(['round', '1.1', '--to', 'bf16', '--carrier', 'float32']) == 0\n"
            "before = peak(); assert main(sys.argv[1:]) == 0; print(peak() - before)"
        )
        done = python("-c", code, *argv, text=True)
        assert done.returncode == 0, done.stderr
        out, said = done.stdout, done.stderr
        assert int(out.splitlines()[-1]) < 192  # MiB; the array has 64
    assert said.splitlines()[-1].split()[:4] == ["round", f"[{'#' * 24}]", "100/100", "x.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), round_to_format(x, "bf16"))
    assert f"  elements            {count}, shape ({count},)" in out.splitlines()


def test_a_summary_is_of_all_pieces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).standard_normal((70, 30)).astype(np.complex64) * 1e3
    x[3, 4], x[50, 2], x[69, 29] = np.nan, np.inf, 1e-9
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    argv = ("round", str(tmp_path / "x.npy"), "--to", "e4m3")
    whole = lines(capsys, *argv)
    monkeypatch.setattr("jchop._cli._round._CHUNK_BYTES", 512)
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines() == whole


def test_compare_shows_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.array([1.1, -3.0]))
    argv = ["compare", str(tmp_path / "x.npy"), "--formats", "e5m2,bf16"]
    assert main(argv) == 0
    plain = capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(argv) == 0
    told = capsys.readouterr()
    assert told.out == plain.out and plain.err == ""
    assert "1/2  x.npy float8_e5m2" in told.err and told.err.endswith("2/2  x.npy bfloat16\n")
    assert str(jc.compare(np.array([1.1, -3.0]), ["e5m2", "bf16"])) in plain.out


# -- errors ----------------------------------------------------------------------------------------------------------
@each(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["info", "e4m3xx"], "e4m3xx"),
        (["info", "binary32", "--all"], "--all lists codes of up to 16 bits; binary32 has 32"),
        (["info", "e4m3", "--csv", "--json"], "--csv prints codes alone"),
        (["info", "binary32", "--plot", "x.png"], "--plot: fmt=binary32 has 32 bits; formats of at most 16 bits can"),
        (["info", "e4m3", "--plot", "x.pdf"], "must end in .png"),
        (["info", "e4m3", "--plot", "no-such-folder/x.png"], "no folder"),
        (["round", "1", "--to", "e5m2z"], "did you mean e5m2"),
        (["round", "1", "--to", "e5m2", "--rounding", "sideways"], "sideways"),
        (["round", "1", "--to", "e5m2", "--overflow", "explode"], "explode"),
        (["round", "abc", "--to", "e5m2"], "bad number 'abc'"),
        (["round", "1"], "--to"),
        (["round", "1", "--to", "e5m2:stochastic"], "float8_e5m2:stochastic rounds stochastically and needs --seed N"),
        (["compare", "{tmp}", "--formats", "e5m2", "e5m2:sr"], "rounds stochastically and needs --seed N"),
        (["blame", "m:f", "--data", "x.npz", "--to", "e5m2:sr"], "rounds stochastically and needs --seed N"),
        (["round", "1", "--to", "e5m2", "--random-bits", "8"], "random_bits"),
        (["round", "1", "--to", "e9m10", "--carrier", "float32"], "float64"),
        (["round", "no-such-file.npy", "--to", "e5m2"], "no-such-file.npy: No such file"),
        (["round", "a.npy", "1", "--to", "e5m2"], "must be the only value"),
        (["round", "1", "--to", "e5m2", "--out", "y.txt"], "must end in .npy"),
        (
            ["round", "1", "--to", "e5m2:sr", "--seed", str(2**63)],
            f"'{2**63}' must be an integer from -2^63 to 2^63 - 1",
        ),
        (["round", "1", "--to", "e5m2:sr", "--seed", "9" * 30], "must be an integer from"),
        (["study", "--seed", "1.5"], "must be an integer from"),
        (["round", "1e99999", "--to", "e5m2"], "'1e99999' is too long: 1000 characters, an exponent to 20000"),
        (["round", "1" * 1001, "--to", "e5m2"], "is too long"),
        (["round", "0x1p999999999999", "--to", "e5m2"], "is too long"),
        (["round", "\u0661", "--to", "e5m2"], "bad number"),
        (["round", "{tmp}", "--to", "e5m2"], "is a folder"),
        (
            ["round", "{tmp}/one.npz", "--to", "e5m2"],
            "one.npz' holds the array 'x'; allowed are numbers, or one .npy file",
        ),
        (["round", "{tmp}/many.npz", "--to", "e5m2"], "holds the arrays 'arr_0', 'arr_1', 'arr_2' and 1 more; allowed"),
        (["round", "{tmp}/broken.npz", "--to", "e5m2"], "holds no arrays that numpy.load can read"),
        (["info", "e4m3fn:saturate"], "':saturate' belongs to a spec; pass the format alone, 'e4m3fn'"),
        (["compare", "x.npy", "--tensor", "w"], "--tensor 'w' belongs to a .safetensors file; x.npy has one array"),
        (["compare", "x.npy", "--formats", ","], "--formats ',' must name at least one format"),
        (["round", "{tmp}/numbers.txt", "--to", "e5m2"], "numbers in a text file are read from standard input"),
        (["round", "1", "--to", "fp8"], "did you mean float8_e4m3fn"),
        (["round", "1", "--to", "stochastic"], "stochastic belongs after a format, as in e5m2:stochastic"),
        (["round", "1", "--to", "e5m2:neerest_even"], "did you mean nearest_even"),
        (["round", "1", "--to", "e5m2", "--rounding", "neerest"], "did you mean nearest"),
        (["info", "e4m3fm"], "did you mean e4m3fn"),
        (["study", "--dataset", "mnist"], "mnist"),
        (["study", "--formats", "e9x", "--out", "{tmp}"], "e9x"),
        (["study", "--formats", "e9m10", "--out", "{tmp}"], "float64"),
        (["study", "--formats", "e5m2:up", "--out", "{tmp}"], "--modes"),
        (["study", "--modes", "sideways", "--out", "{tmp}"], "sideways"),
        (["study", "--seeds", "0", "--out", "{tmp}"], "seeds"),
        (["study", "--epochs", "0", "--out", "{tmp}"], "epochs"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], said: str) -> None:
    for name in ("numbers.txt", "broken.npz"):
        (tmp_path / name).write_text("1 2 3")
    np.savez(tmp_path / "one.npz", x=np.ones(2))
    np.savez(tmp_path / "many.npz", *np.ones((4, 2)))
    assert said in error(capsys, *[word.replace("{tmp}", str(tmp_path)) for word in argv])


def test_a_seed_may_be_as_large_as_jax_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (2**63 - 1, -(2**63), -1):
        lines(capsys, "round", "1.1", "--to", "e5m2:sr", "--seed", str(seed))


@each(
    ("fault", "said"),
    [
        (MemoryError("no room"), "not enough memory. no room"),
        (MemoryError(), "not enough memory."),
        (OverflowError("too large"), "too large"),
        (TypeError("no such type\x1b[2J"), r"no such type\x1b[2J"),
    ],
)
def test_other_faults_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str
) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr("jchop._cli._round._round_to_carrier", broken)
    assert error(capsys, "round", "1", "--to", "e5m2") == said


def test_a_file_that_is_no_array_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    contents = {b"": "it is empty", b"not an array": "does not begin like one", b"PK\3\4rest": "it is a zip archive"}
    for content, said in contents.items():
        path.write_bytes(content)
        assert f"{path} is not a .npy file that can be read: " in error(capsys, "round", str(path), "--to", "e5m2")
        assert said in error(capsys, "round", str(path), "--to", "e5m2")
    path.unlink()
    path.mkdir()
    assert error(capsys, "round", str(path), "--to", "e5m2") == f"{path} is a folder, not a .npy file"


def test_no_values_on_a_terminal_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert "no values" in error(capsys, "round", "--to", "e5m2")


def test_no_values_in_standard_input_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", " \n\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert error(capsys, "round", "--to", "e5m2") == "no values: standard input is empty"


@each(
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
    assert package in said and f'pip install ".[{extra}]"' in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.smoke
def test_extras_load_on_first_use_and_a_missing_one_is_named_in_one_line() -> None:
    """Light commands and the names of modules load none; pyplot stays out where a picture is drawn."""
    cases = {
        "jc.nn": ("flax", "flax"),
        "jc.optim": ("optax", "optax"),
        "jc.torch": ("torch", "torch"),
        "jc.plot.value_grid('e4m3')": ("matplotlib", "plot"),
        "jc.plot.dot_plot({}, [], xlabel='', title='')": ("matplotlib", "plot"),
        "jc.plot.pareto(['a'], [1], [1], ylabel='')": ("matplotlib", "plot"),
        "jc.study.run()": ("flax, optax, sklearn", "study"),
        "jc.to_qwix(None)": ("qwix", "qwix"),
    }
    names = ("formats", "math", "plot", "study")
    program = f"import contextlib, io, sys, jchop as jc; extras = {EXTRAS}\n"
    program += "print(extras & set(sys.modules), 'jchop.plot' in sys.modules, 'plot' in dir(jc))\n"
    program += f"print(*(getattr(jc, name).__name__ for name in {names}))\n"
    program += "from jchop.__main__ import main\n"
    program += "with contextlib.redirect_stdout(io.StringIO()): main(['formats']); main(['info', 'e4m3'])\n"
    program += "names = jc.plot.pareto.__name__, jc.study.StudyResult.__name__\n"
    program += "print(*names, extras & set(sys.modules))\n"
    program += "jc.plot.value_grid('e2m1fn'); print('matplotlib.pyplot' in sys.modules)\n"
    program += "sys.modules |= dict.fromkeys(('flax', 'optax', 'torch', 'matplotlib', 'sklearn', 'qwix'))\n"
    for code in cases:
        program += f"try: {code}\nexcept ModuleNotFoundError as error: print(error)\n"
    done = python("-c", program, text=True)
    imported, modules, light, pyplot, *errors = done.stdout.splitlines()
    assert imported == "set() False True" and modules.split() == [f"jchop.{name}" for name in names], done.stderr
    assert (light, pyplot) == ("pareto StudyResult set()", "False")
    for said, (packages, extra) in zip(errors, cases.values(), strict=True):
        assert f'needs {packages}: pip install ".[{extra}]" in a clone of jchop' in said


def test_every_page_installs_extras_in_the_same_way() -> None:
    """From a clone: an index has no jchop yet. The extras named are those of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pages = [
        ROOT / "README.md",
        *(path for kind in ("docs/*.md", "examples/*.py", "jchop/**/*.py") for path in ROOT.glob(kind)),
    ]
    named = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "jchop[" not in text, page
        found = re.findall(r'pip install (?:--?[a-z-]+ )*"\.\[([a-z,]+)\]"', text)
        named |= {name for names in found for name in names.split(",")}
    assert {"flax", "optax", "plot", "study", "test", "torch"} <= named <= set(extras)


# -- as a process ----------------------------------------------------------------------------------------------------
#: Shell commands of `jchop`, their status, the beginning of what they say, and words of what they print.
PROCESSES = [
    ("echo 0.1 | jchop round --to e5m2", 0, "", "0.09375  0x2e  0 01011 10"),
    ("jchop round abc --to e5m2", 2, "jchop: error: bad number 'abc'", ""),
    ("jchop formats >&-", 2, "jchop: error: standard output is closed\n", ""),
    ("jchop --help 1</dev/null", 2, "jchop: error: Bad file descriptor\n", ""),
    ("jchop formats >/dev/full", 2, "jchop: error: No space left on device\n", ""),
    ("PYTHONUNBUFFERED=1 jchop formats >/dev/full", 2, "jchop: error: No space left on device\n", ""),
    ("jchop -V >/dev/full", 2, "jchop: error: No space left on device\n", ""),
    # More than one piece, so there is progress to show.
    ("jchop round x.npy --to e5m2 2>&-", 0, "", "elements"),
    ("jchop round abc --to e5m2 2>&-", 2, "", ""),
    # A reader that leaves is no error.
    ("set -o pipefail; jchop round $(yes 0.1 | head -5000) --to e5m2 | head -1", 141, "", "float8_e5m2"),
]


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(("command", "status", "said", "printed"), PROCESSES, ids=[row[0] for row in PROCESSES])
def test_as_a_process(tmp_path: Path, command: str, status: int, said: str, printed: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    if "x.npy" in command:
        np.save(tmp_path / "x.npy", np.zeros(3 << 20, np.float32))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    # jaxlib writes to standard error if it loads a compiled program on some machines.
    environment |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    shell = command.replace("jchop", f"{sys.executable} -m jchop", 1)
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)
    assert printed in done.stdout and bool(done.stdout) == bool(printed)


def test_the_help_names_no_table_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("{formats" in line for line in lines(capsys, "--help"))


@each("option", ["-V", "--version"])
def test_the_version(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert lines(capsys, option)[0].startswith("jchop ")
