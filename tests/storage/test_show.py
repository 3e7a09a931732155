"""QArrays, specs, formats and reports as HTML and in treescope: well formed, without codes, in time."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from html_check import check_html

import jchop as jc
from jchop._common import html
from jchop._storage import _notebook

further = Further()

X = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
#: treescope lists the modules of NumPy for their names, and newer ones warn about some.
LISTS_NUMPY = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SPECS = ["nvfp4", "int4(group=64)", "nf4", "e5m2", "bfloat16", "binary32", "int4(group=32,zero_point=integer)",
         "int4(group=16,scale=int8(group=4))", "int8(channel=0)", "int8"]  # fmt: skip


def pixels(text: str) -> np.ndarray:
    """The colours of the first image of HTML: rows, columns, (red, green, blue)."""
    found = re.search(r'base64,([^"]+)"', text)
    assert found is not None
    data = base64.b64decode(found[1])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    columns, rows = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    length, start = int.from_bytes(data[33:37]), 41
    lines = np.frombuffer(zlib.decompress(data[start : start + length]), np.uint8).reshape(rows, -1)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:].reshape(rows, columns, 3)


@further.first
@pytest.mark.parametrize("spec", SPECS)
def the_page_says_what_the_array_is(spec: str) -> None:
    q = jc.quantize(X, spec)
    page = q._repr_html_()
    text = check_html(page)
    assert f"QArray {q.spec} [6, 128], {q.bits_per_element:.4g} bits per element" in text
    assert f"{q.nbytes:,} bytes ({32 / q.bits_per_element:.3g}× less than float32)" in text
    y = np.asarray(jc.dequantize(q))
    assert f"numbers, {y.min():.4g} to {y.max():.4g}, the largest of each block" in text
    assert f"zero: {100 * np.mean(y == 0):.3g} %" in text
    assert pixels(page).shape == (6, 64, 3)
    scales = text.count("scales, logarithmic")
    assert scales == (q.spec.scaled is not None and spec != "int8")
    assert len(page) < 12_000


def test_the_heat_map_is_of_numbers_not_codes() -> None:
    q = jc.quantize(np.array([[0.0, 7.0], [-3.5, np.nan]], np.float32), "e5m2")
    white, red, blue, lost = pixels(q._repr_html_()).reshape(4, 3).astype(int)
    assert (white == 247).all() and red.tolist() == [178, 24, 43] and lost.tolist() == [150, 150, 150]
    assert blue.tolist() == [140, 174, 210]  # half the way from white to blue (33, 102, 172)
    assert "infinite or NaN: 1" in check_html(q._repr_html_())


def test_an_outlier_stays_in_sight() -> None:
    x = np.full((3, 500, 501), 0.01, np.float32)
    x[1, 250, 77] = -90
    cells = _notebook._heat_map_cells(x)
    assert cells.shape == (47, 84) and cells.size * 6 * 32 >= x.size
    assert (cells.min(), np.count_nonzero(cells < 0)) == (-90, 1)
    assert cells[750 // 32, 77 // 6] == -90


def test_shares_at_the_ends_and_scales() -> None:
    x = np.array([[6.0, -6.0, 3.0, 0.0] * 8, [12.0, 1.0, 1.0, 0.0] * 8], np.float32)
    q = jc.quantize(x, "mxfp4")
    text = check_html(q._repr_html_())
    assert "zero: 25 %" in text and "at the ends of the range: 37.5 %" in text  # 16 of 6 · 1, and 8 of 6 · 2
    assert "2 scales, logarithmic" in text and "2^0" in text and "2^1" in text
    counted = [float(h) for h in re.findall(r'height="([\d.]+)" fill', q._repr_html_())]
    assert [i for i, height in enumerate(counted) if height] == [0, len(counted) - 1]


@further
def nested_scales_are_numbers() -> None:
    q = jc.quantize(X, "int4(group=16,scale=int8(group=4))")
    found = _notebook._scale_magnitudes(q, q._quantized_scale)
    assert found is not None
    s = found.reshape(6, 8)
    assert np.allclose(np.abs(np.asarray(jc.dequantize(q)).reshape(6, 8, 16) / s[..., None] % 1 - 0.5), 0.5)


def test_arrays_without_axes_and_empty_ones() -> None:
    for q in (jc.quantize(np.ones((0, 4), np.float32), "nf4"), jc.quantize(np.float32(3), "e5m2")):
        assert ("numbers" in check_html(q._repr_html_())) == (q.shape == ())


def test_abstract_arrays_show_facts() -> None:
    seen = []

    def look(x: Any) -> Any:
        q = jc.quantize(x, "nvfp4")
        seen.append(q._repr_html_())
        return q

    abstract = jax.eval_shape(look, X)
    deleted = jax.tree.map(jnp.asarray, jc.quantize(jnp.asarray(X), "nvfp4"))
    jax.tree.map(lambda leaf: leaf.delete(), deleted)
    for page in (*seen, abstract._repr_html_(), deleted._repr_html_()):
        text = check_html(page)
        assert "QArray nvfp4 [6, 128], 4.542 bits per element" in text
        assert "<img" not in page


@further
def a_large_array_is_decoded_once_and_drawn_in_few_cells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that it is shown in time: one program, compiled already, gives all numbers, and the page is short."""
    q = jc.quantize(jnp.ones((512, 2048)), "nvfp4")
    q._repr_html_()  # compiles
    decoded, calls = _notebook._compiled_decode, []
    monkeypatch.setattr(_notebook, "_compiled_decode", lambda *given: (calls.append(given), decoded(*given))[1])
    with jax.log_compiles():
        page = q._repr_html_()
    assert not [record.message for record in caplog.records if "Compiling" in record.message]
    assert len(calls) == 1 and pixels(page).shape <= (48, 96, 3) and len(page) < 12_000


# -- treescope ---------------------------------------------------------------------------------------------------------
@LISTS_NUMPY
def test_treescope_shows_facts_and_pictures_without_codes() -> None:
    treescope = pytest.importorskip("treescope")
    q = jc.quantize(X, "nvfp4")
    page = treescope.render_to_html(q, compressed=False)
    assert "QArray nvfp4 [6, 128], 4.542 bits per element" in page and "data:image/png;base64" in page
    text = treescope.render_to_text(q)
    assert "dtype: float32" in text
    assert "qvalue" not in page and "uint8" not in page and "uint8" not in text
    assert "nvfp4" in treescope.render_to_text(jax.eval_shape(lambda x: jc.quantize(x, "nvfp4"), X))
    assert "<QArray" in treescope.render_to_text({"w": q}, roundtrip_mode=True)


@further
@LISTS_NUMPY
def within_a_module() -> None:
    treescope, nnx = pytest.importorskip("treescope"), pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    packed = jc.quantize(model, jc.Rule("*", weight="nf4(group=8)"))
    page = treescope.render_to_html(packed, compressed=False)
    assert page.count("QArray nf4(group=8) [8, 8]") >= 1 and "qvalue" not in page
    assert "value=<QArray nf4(group=8)" in treescope.render_to_text(packed)


@further
def nothing_is_imported_to_be_shown() -> None:
    code = "import sys, jchop as jc; jc.quantize([1.0], 'e5m2')._repr_html_(); print('treescope' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- formats, specs, reports ------------------------------------------------------------------------------------------
PLAIN = [*jc.formats.CATALOGUE, "fixed4.4", "binary8p3se", "binary16p1uf"]
SCALED = [*jc.formats.SCALED_CATALOGUE, "int8(channel=(0,1))", "int4(group=(2,32),zero_point=float)"]


def test_formats_show_their_facts() -> None:
    for text in (*PLAIN, *SCALED):
        spec = jc.Spec(text)
        shown = check_html(spec.format._repr_html_())
        assert shown.startswith(str(spec.format)) and "bits" in shown, text


def test_specs_show_what_they_do() -> None:
    text = check_html(jc.Spec("e5m2:stochastic:random_bits=8:gradient=clipped:flush")._repr_html_())
    for part in ("rounding: stochastic", "random bits: 8", "gradient: clipped", "subnormal numbers become zero"):
        assert part in text


def test_reports_show_their_tables() -> None:
    def f(params: Any, x: Any) -> Any:
        return jnp.exp(x @ params["<w>"])

    low = jc.quantize_fn(f, jc.Rule("*", weight="e5m2"))
    params, x = {"<w>": jnp.ones((4, 4))}, jnp.ones((2, 4))
    reports = [low.report(params, x), jc.emulate(lambda x: jnp.exp(x), "e5m2").report(x[0])]
    reports.append(jc.optim.state_report(jc.optim.adamw8bit(1e-3).init(params)))
    for report in reports:
        page = report._repr_html_()
        words = set(re.findall(r"\S+", check_html(page)))
        assert set(re.findall(r"\S+", str(report))) <= words
    assert "&lt;w&gt;" in reports[0]._repr_html_()


def test_a_page_escapes_its_title() -> None:
    assert check_html(html.page("<a>", html.table_element([("&",), ("<b>",)]))).split() == ["<a>", "<a>", "&", "<b>"]


test_further = further.test()
