"""`jchop.compare` and `jchop compare`: every figure from `round_to_format` and its definition."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _cli.test_cli import error, lines
from further import Further
from html_check import check_html

import jchop as jc
from jchop.__main__ import main
from jchop._insight.compare import default_formats

further = Further()

X = np.random.default_rng(0).standard_t(3, size=(16, 128)).astype(np.float32)
X[0, :3] = 0, 500, -1e-9


def exact(x: np.ndarray, y: np.ndarray) -> tuple[float, Fraction, Fraction]:
    """Signal-to-noise ratio, worst absolute and worst relative error, in fractions."""
    pairs = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(x.ravel(), y.ravel(), strict=True)]
    errors = [abs(a - b) for a, b in pairs]
    ratio = sum(a * a for a, _ in pairs) / sum(e * e for e in errors)
    return 10 * math.log10(ratio), max(errors), max(e / abs(a) for e, (a, _) in zip(errors, pairs, strict=True) if a)


def test_the_figures_are_those_of_the_rounded_array() -> None:
    formats = ["bfloat16", "float8_e4m3fn:saturate", "int4(group=32)", "nvfp4"]
    seen = jc.compare(X, formats)
    for row, text in zip(seen.rows, formats, strict=True):
        y = jc.round_to_format(X, text)
        ratio, absolute, relative = exact(X, y)
        assert row.format == text
        assert row.snr == pytest.approx(ratio, rel=1e-12)
        assert (row.worst_absolute, row.worst_relative) == (float(absolute), pytest.approx(float(relative), rel=1e-15))
        assert row.underflow == np.mean((X != 0) & (y == 0)) and row.overflow == 0
    assert [row.bits for row in seen.rows] == [16, 8, 5, 4.5 + 32 / X.size]
    assert (seen.shape, seen.dtype, seen.lost) == ((16, 128), "float32", 0)


def test_a_format_that_float32_cannot_hold_is_rounded_in_float64() -> None:
    x = np.array([1 / 3, -2.7, 40.0], np.float32)
    for text in ("fixed4.40", "takum_linear32", "fixed2.30"):
        own, wide = (jc.compare(numbers, ["bfloat16", text]).rows for numbers in (x, x.astype(np.float64)))
        assert own == wide
    assert jc.compare(x, ["fixed4.40"]).rows[0].worst_absolute == 40 - (8 - 2**-40)


def test_overflow_and_clipping_are_told_apart() -> None:
    x = np.array([1.0, 449.0, 463.9, 464.1, -1000.0, np.inf, np.nan])
    nan, cut, half = jc.compare(x, ["float8_e4m3fn", "float8_e4m3fn:saturate", "binary16"]).rows
    assert (nan.overflow, nan.clipped, nan.snr, nan.worst_absolute) == (2 / 5, 0, -math.inf, math.inf)
    # 464 is half the distance of 32 beyond 448: below, a format of a longer range would give 448 as well.
    assert (cut.overflow, cut.clipped, cut.worst_absolute, cut.largest) == (0, 2 / 5, 552, 448)
    assert half.overflow == half.clipped == 0 and half.largest == 65504
    assert jc.compare(x, ["binary16"]).lost == 2
    assert "2 numbers are infinite or NaN" in str(jc.compare(x, ["binary16"]))
    # Half the distance to the next value is 2 beyond -4, and 1/2 beyond 1: -6.5 and 1.75 lie further out.
    assert jc.compare([-5.0, -6.5, 1.4, 1.75, 1.0], ["codebook(-4,0,1)"]).rows[0].clipped == 2 / 5


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("zero_point", ["", ",zero_point=integer", ",zero_point=float"])
def test_clipping_under_scales(zero_point: str) -> None:
    """A percentile leaves the largest number beyond the range; the largest magnitude does not."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    x[7] = 100
    whole = jc.compare(x, [f"int8(group=64{zero_point})"]).rows[0]
    assert whole.clipped == 0
    if not zero_point:
        assert jc.compare(x, ["int8(group=64,rule=percentile(90))"]).rows[0].clipped >= 1 / 64
        # Elements up to 6 under 2^(floor(log2 7.9) - 2) = 1: 7.9 lies beyond 6 + 1.
        assert jc.compare([7.9, 6.9, 1.0], ["mxfp4"]).rows[0].clipped == 1 / 3


def test_fitted_range() -> None:
    x = X * np.float32(2.0**-30)
    plain, fitted = (jc.compare(x, ["float8_e4m3fn", "int8"], scale=scale).rows for scale in ("none", "fit"))
    assert plain[0].underflow > 0.99 and fitted[0].overflow == fitted[0].clipped == 0
    k = fitted[0].exponent
    assert np.abs(x).max() * 2.0**k <= 448 < np.abs(x).max() * 2.0 ** (k + 1)
    y = jc.round_to_format(x.astype(np.float64) * 2.0**k, "float8_e4m3fn") / 2.0**k
    assert fitted[0].snr == pytest.approx(exact(x, y)[0], rel=1e-12)
    assert (fitted[1].exponent, fitted[1].snr) == (0, plain[1].snr)
    assert f"float8_e4m3fn · 2^{-k}" in str(jc.compare(x, ["float8_e4m3fn"], scale="fit"))


def test_every_range_can_be_fitted() -> None:
    formats = ["float8_e4m3fn", "integer8", "binary64", "float8_e8m0fnu"]
    for top in (5e-324, 1.0, 448.0, 449.0, 1.7e308):
        for row in jc.compare(np.array([top]), formats, scale="fit").rows:
            assert row.overflow == row.clipped == 0 and row.snr >= 10, (top, row.format)


def test_extremes_of_float64_have_a_ratio() -> None:
    for size in (1e-300, 1e300):
        assert jc.compare(np.array([1.0, 0.3]) * size, ["e11m4"]).rows[0].snr == pytest.approx(
            jc.compare(np.array([1.0, 0.3]) * size, ["e11m4"], scale="fit").rows[0].snr, abs=3
        )


@further
@pytest.mark.parametrize("x", [X, pytest.param(3, marks=pytest.mark.slow)], ids=["matrix", "number"])
def the_default_formats_fit_any_array(x: Any) -> None:
    seen = jc.compare(x)
    assert len(seen.rows) == len(default_formats(np.ndim(x)))
    assert len(str(seen).splitlines()) == len(seen.rows) + 2
    assert jc.compare([[True, False]], ["e5m2"]).rows[0].snr == math.inf
    assert len(default_formats(2)) == len(default_formats(1)) + 2


@pytest.mark.smoke
def test_16_bit_floats_are_rounded_as_float32() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    low, wide = jc.compare(x, ["binary16", "mxfp8_e4m3"]), jc.compare(x.astype(jnp.float32), ["binary16", "mxfp8_e4m3"])
    assert low.rows == wide.rows and low.dtype == "bfloat16"


def test_stochastic_rounding_takes_a_key() -> None:
    key = jax.random.key(1)
    row = jc.compare(X, ["e5m2:stochastic"], key=key).rows[0]
    y = jc.round_to_format(X, "e5m2:stochastic", key)
    assert row.worst_absolute == np.abs(X.astype(np.float64) - y).max()
    with pytest.raises(ValueError, match="key"):
        jc.compare(X, ["e5m2:stochastic"])


def test_the_rounding_of_gradients_has_no_effect() -> None:
    for text in ("e5m2", "mxfp4"):
        plain, own = jc.compare([7.9, 6.9, 1.0], [text, f"{text}:gradient=[e4m3:stochastic]"]).rows
        assert replace(own, format=plain.format) == plain


def test_it_is_data_a_page_and_a_picture() -> None:
    seen = jc.compare(X, ["e5m2", "integer8", "binary64", "nf4"])
    told = json.loads(seen.to_json())
    assert told["rows"][2]["snr"] == "inf" and told["rows"][3]["largest"] is None
    assert told["shape"] == [16, 128] and len(told["rows"]) == 4
    assert [line.split()[-1] for line in str(seen).splitlines()[2:]] == ["5.734e+04", "127", "1.798e+308", "-"]
    check_html(seen._repr_html_())
    figure = seen.plot()
    assert [text.get_text() for text in figure.axes[0].texts] == ["exact", *(row.format for row in seen.rows)]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ([], {}, "empty"),
        ([np.nan, np.inf], {}, "no finite number"),
        ([1j], {}, "complex128"),
        (["a"], {}, "dtype"),
        ([1.0], {"formats": []}, "at least one"),
        ([1.0], {"scale": "best"}, "scale='best'"),
        ([1.0], {"formats": ["int8(channel=1)"]}, "axis"),
    ],
)
def test_what_it_refuses(x: list, options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        jc.compare(x, **options)


@pytest.mark.parametrize("one", ["e5m2", jc.Spec("e5m2:up"), jc.formats.FloatFormat(5, 2), jc.Spec("int8").format])
def test_one_format_is_a_list_of_it(one: Any) -> None:
    assert jc.compare(X, one) == jc.compare(X, [one])
    assert jc.compare(X, jnp.bfloat16) == jc.compare(X, ["bfloat16"])  # type: ignore[arg-type]


@further.first
def a_traced_array_is_refused() -> None:
    with pytest.raises(TypeError, match="traced"):
        jax.jit(jc.compare)(jnp.ones(3))


# -- the command -------------------------------------------------------------------------------------------------------
def test_the_command_shows_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, X)
    assert lines(capsys, "compare", str(file)) == f"x.npy: {jc.compare(X)}".splitlines()
    np.save(file, np.asfortranarray(X))
    told = json.loads("\n".join(lines(capsys, "compare", str(file), "--formats", "nf4,e5m2", "--json")))
    assert told == {"x.npy": jc.compare(X, ["nf4", "e5m2"]).as_dict()}
    picture = tmp_path / "x.png"
    fitted = lines(capsys, "compare", str(file), "--scale", "fit", "--plot", str(picture))
    assert fitted[:-1] == f"x.npy: {jc.compare(X, scale='fit')}".splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_takes_integers_and_names_what_it_leaves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, x = tmp_path / "w.safetensors", np.arange(-3, 4)
    tree = {"n": x, "on": x > 0, "f8": x.astype(ml_dtypes.float8_e5m2), "none": np.zeros((0, 3))}
    jc.save(file, {"a": tree})
    assert main(["compare", str(file), "--formats", "e2m1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {f"a.{name}": jc.compare(tree[name], ["e2m1"]).as_dict() for name in ("n", "on")}
    assert told.err == "note: without a table, since empty or of a type that has none: 'a.none', 'a.f8'\n"
    assert main(["compare", str(file), "--formats", "e2m1", "--tensor", "n"]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_reads_tensors_by_pattern(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    jc.save(file, {"mlp": {"w": X, "b": X[0]}, "head": {"w": X}, "steps": np.arange(3)})
    told = json.loads("\n".join(lines(capsys, "compare", str(file), "--json", "--formats", "e5m2")))
    assert sorted(told) == ["head.w", "mlp.b", "mlp.w", "steps"]
    told = json.loads("\n".join(lines(capsys, "compare", str(file), "--json", "--tensor", "mlp/b", "--formats", "nf4")))
    assert told == {"mlp.b": jc.compare(X[0], ["nf4"]).as_dict()}
    assert "matches no tensor" in error(capsys, "compare", str(file), "--tensor", "nlp")
    picture = str(tmp_path / "x.png")
    assert "choose one by --tensor" in error(capsys, "compare", str(file), "--plot", picture, "--formats", "e5m2")
    assert error(capsys, "compare", str(file), "--formats", "e5m2(channel=1)", "--tensor", "b").startswith("mlp.b: ")
    assert "must end in .npy or .safetensors" in error(capsys, "compare", "x.txt")


test_further = further.test()
