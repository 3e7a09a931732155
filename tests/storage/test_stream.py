"""Files quantized chunk by chunk: the same as whole, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._storage._chunks import TensorReport, TensorRule, chunks, plan_chunk_cut, quantize_file
from jchop._storage._files.safetensors import TensorEntry, TensorFile, TensorWriter

further = Further()

ROOT = Path(__file__).resolve().parents[2]


def rules(**texts: str) -> list[TensorRule]:
    return [TensorRule(name, jc.Spec(text)) for name, text in texts.items()]


def numbers(*shape: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[x.size // 2] = np.inf
    return x


def same(got: object, wanted: object) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@further.first
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("int4(group=16,scale=bfloat16)", (6, 40)),
        ("int4(group=2,axis=0)", (9, 8)),
        ("int8(group=tensor)", (3, 5, 8)),
        ("int5(channel=-1)", (12, 9)),
        ("int8(channel=1)", (4, 3, 8)),
        ("uint4(channel=0,zero_point=integer)", (2, 37)),
        ("int4(channel=0,zero_point=float,scale=bfloat16)", (2, 37)),
        ("nvfp4", (101,)),
        ("int8(group=tensor,rule=percentile(90))", (9, 8)),
        ("int4(group=4,scale=int8(channel=0))", (6, 40)),
        ("e3m2fn:stochastic", (7, 9)),
        ("int4(channel=-1):stochastic", (12, 8)),
    ],
)
def chunks_are_the_whole(tmp_path: Path, text: str, shape: tuple[int, ...]) -> None:
    x, source, targets = numbers(*shape), tmp_path / "in.safetensors", []
    jc.save(source, {"x": x})
    reports = []
    for chunk in (1 << 20, 128):
        targets.append(tmp_path / f"{chunk}.safetensors")
        reports += quantize_file(source, targets[-1], rules(x=text), seed=3, chunk=chunk)
    whole, cut = map(jc.load, targets)
    same(cut, whole)
    if "stochastic" not in text:
        same(whole["x"], jc.quantize(x, text))
    values = np.asarray(jc.dequantize(whole["x"]), np.float64)
    finite = np.isfinite(x)
    error = (values - x)[finite]
    for report in reports:
        assert (report.before, report.after) == (x.nbytes, whole["x"].nbytes)
        assert report.largest == np.abs(error).max() and not any(fate.startswith("finite") for fate in report.fates)
        assert sum(report.fates.values()) == np.count_nonzero(~finite)
        assert report.sqnr == pytest.approx(10 * np.log10((x[finite].astype(np.float64) ** 2).sum() / (error**2).sum()))


def test_each_tensor_of_a_file_draws_for_itself(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    jc.save(tmp_path / "in.safetensors", {"a": x, "b": x})
    quantize_file(
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        rules(a="e3m2fn:stochastic", b="e3m2fn:stochastic"),
        seed=3,
    )
    found = jc.load(tmp_path / "out.safetensors")
    one, other = (np.asarray(jc.dequantize(found[name])) for name in "ab")
    for stored in (one, other):  # on one side or the other
        assert (np.abs(stored - x) < 0.25 * np.maximum(np.abs(x), 0.25)).all()
    assert (one != other).any()


def test_cuts_keep_groups_and_bytes_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 4)))
        group, axis = int(rng.integers(1, 20)), -int(rng.integers(1, len(shape) + 1))
        fmt = jc.formats.int3(group=group, axis=axis)
        cut = plan_chunk_cut(shape, 4, fmt, int(rng.integers(1, 4096)))
        start = 0
        for chunk in chunks(shape, cut):
            assert chunk.start == start
            start += int(np.prod(chunk.shape))
            at, n = chunk.starts[axis], chunk.shape[axis]
            assert at % group == 0 and (n % group == 0 or at + n == shape[axis])
            assert chunk.starts[-1] * 3 % 8 == 0
        assert start == np.prod(shape) and not cut.needs_extremes


@further
def rules_by_name(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    x = numbers(4, 32)
    stored = jc.quantize(x, "mxfp4")
    tree = {"a": {"kernel": x, "bias": x[0].astype(np.float64)}, "b": {"kernel": x.astype(np.float16)}, "old": stored}
    jc.save(source, tree | {"step": np.int32(3)}, metadata={"format": "pt"})
    told: list[tuple[str, int, int]] = []
    listed = rules(**{"a.kernel": "int4(group=16)", "*kernel": "bfloat16", "old* step bias": "e3m2fn"})
    reports = quantize_file(source, target, listed, progress=lambda *now: told.append(now))
    out = jc.load(target)
    same(out["a"]["kernel"], jc.quantize(x, "int4(group=16)"))
    same(out["a"]["bias"], jc.quantize(x[0].astype(np.float64), "e3m2fn"))
    same(out["b"]["kernel"], x.astype(np.float16).astype(np.float32).astype(ml_dtypes.bfloat16))
    same(out["old"], jc.load(source)["old"])
    assert out["step"] == 3 and out["step"].dtype == np.int32
    copied = {report.name: report.to for report in reports if report.copied}
    assert copied == {
        "old.qvalue": "copied: part of a QArray",
        "old.scale": "copied: part of a QArray",
        "step": "copied: int32 is not quantized",
    }
    total = sum(report.before for report in reports)
    assert told[-1][1:] == (total, total) and told == sorted(told, key=lambda now: now[1])
    with TensorFile(target) as file:
        assert file.metadata["format"] == "pt"
    assert quantize_file(target, target, rules(**{"b.kernel": "float8_e4m3fn"}))  # in its own place
    assert jc.load(target)["b"]["kernel"].dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.smoke
def test_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    jc.save(source, {"w": numbers(4, 8), "w.scale": numbers(2), "step": np.int32(3)})
    for said, texts in (
        ("no tensor is quantized by 'v=int4.*nearest paths are", {"w/": "mxfp4", "v": "int4(group=4)"}),
        ("no tensor is quantized by 'step=bfloat16'", {"step": "bfloat16"}),
        ("no tensor is quantized by 'w=mxfp4'", {"w*": "bfloat16", "w": "mxfp4"}),
        ("names of others: w.scale", {"w/": "mxfp4"}),
        ("needs a seed", {"w": "e3m2fn:stochastic"}),
        ("tensor 'w' of shape .4, 8.: .*axis", {"w": "mxfp4(axis=2)"}),
    ):
        with pytest.raises(ValueError, match=said):
            quantize_file(source, target, rules(**texts))
    assert list(tmp_path.iterdir()) == [source]
    jc.save(source, {"w": jc.quantize(numbers(4, 8), "int8"), "b": numbers(8)})
    for said, texts in (
        ("by 'w=int8'; packed already: 'w'. `jchop", {"w": "int8"}),
        ("by 'w=int8', 'c=int8'; packed already: 'w'; the nearest paths are", {"w": "int8", "c": "int8"}),
    ):
        with pytest.raises(ValueError, match=said):
            quantize_file(source, target, rules(**texts))


def test_reports() -> None:
    report = TensorReport("x", "float32", (3,), "e2m1fn", 12, 2)
    assert report.sqnr == np.inf
    report.add(np.array([3.0, 4.0, np.inf, 1e9]), np.array([3.0, 3.0, 6.0, np.inf]))
    assert (report.square, report.error, report.largest) == (25.0, 1.0, 1.0)
    assert report.fates == {"finite to inf": 1, "inf to finite": 1}
    assert report.sqnr == pytest.approx(10 * np.log10(25))
    kept = TensorReport("x", "float32", (2,), "bfloat16", 8, 4)
    kept.add(np.array([np.nan, -np.inf]), np.array([np.nan, -np.inf]))
    assert kept.sqnr == np.inf and kept.fates == {"nan kept": 1, "inf kept": 1}
    kept.add(np.array([np.nan, np.inf, 1.0]), np.array([7.0, np.nan, 1.0]))
    assert np.isnan(kept.sqnr) and kept.fates == {"nan kept": 1, "inf kept": 1, "nan to finite": 1, "inf to nan": 1}


def read_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read and no write is larger than a chunk, though the arrays are."""
    source, target, chunk = folder / "in.safetensors", folder / "out.safetensors", 1 << 14
    jc.save(source, {"a": numbers(128, 256), "b": numbers(1 << 15)})
    read, write, sizes = TensorFile.read, TensorWriter.write, []

    def counted_read(self: TensorFile, name: str, *more: int) -> np.ndarray:
        found = read(self, name, *more)
        sizes.append(found.nbytes)
        return found

    def counted_write(self: TensorWriter, name: str, array: np.ndarray, *more: int) -> None:
        sizes.append(array.nbytes)
        write(self, name, array, *more)

    monkeypatch.setattr(TensorFile, "read", counted_read)
    monkeypatch.setattr(TensorWriter, "write", counted_write)
    quantize_file(source, target, rules(a="int4(group=128,scale=bfloat16)", b="nvfp4"), chunk=chunk)
    assert max(sizes) <= chunk and len(sizes) >= 2 * (1 << 18) // chunk


def two_gibibytes_in_less_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folder / "in.safetensors", folder / "out.safetensors"
    kind = np.dtype(np.float32)
    entries = {"a": TensorEntry(kind, (16, 4096, 4096)), "b": TensorEntry(kind, (1 << 28,), 1 << 30)}
    with source.open("wb") as out:
        TensorWriter(out, entries, {})
        out.truncate(out.tell() + (1 << 31))  # zeros that take no room
        for place in range(0, 1 << 31, 1 << 24):
            out.seek(4096 + place)
            out.write(np.full(64, place % 97 - 48, np.float32).tobytes())
    code = (  # the peak of this program alone: ru_maxrss keeps that of the process which started it
        "import pathlib, sys; from jchop.__main__ import main;"
        "print(main(['quantize', *sys.argv[1:], '--rule', 'a=int4(group=128,scale=bfloat16)', '--rule', 'b=nvfp4']));"
        "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    argv = [sys.executable, "-c", code, str(source), str(target)]
    run = subprocess.run(argv, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    *_, status, kibibytes = run.stdout.split()
    assert status == "0" and int(kibibytes) < 1.5 * (1 << 20), kibibytes
    assert target.stat().st_size < 0.16 * (1 << 31)


@further
@pytest.mark.parametrize(
    "check",
    [
        read_in_parts,
        pytest.param(
            two_gibibytes_in_less_memory,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
                ),
            ],
        ),
    ],
)
def files_pass_in_less_memory_than_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    check(tmp_path, monkeypatch)


test_further = further.test()
