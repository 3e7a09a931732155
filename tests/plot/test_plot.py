"""The pictures: what stands in them, read from the figure's parts."""

from __future__ import annotations

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

import jchop as jc
from jchop._spec.spec import parse
from jchop.formats import CATALOGUE, ElementFormat, parse_format
from jchop.plot import dot_plot, value_grid


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def texts(figure: Figure, index: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[index].texts]


@pytest.mark.smoke
def test_dot_plot_has_a_row_for_each_name_and_a_dot_for_each_series() -> None:
    values = {"nearest": [0.5, 40.0], "up": [np.nan, -1.0]}
    figure = dot_plot(values, ["e4m3", "e2m1"], xlabel="points", title="digits", note="of 9 samples")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["e4m3", "e2m1"]
    assert axes.get_xlabel() == "points\nof 9 samples" and figure.get_suptitle() == "digits"
    dots = [np.asarray(dot.get_offsets()).tolist() for dot in axes.collections[1:]]  # after the lines of the rows
    assert dots == [[[0.5, 0.0], [40.0, 1.0]], [], [[0.0, 1.0]], [[60.0, 0.0]]]
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["nearest", "up"]
    assert png(figure).startswith(b"\x89PNG")


@each("numbers", [[0.0], [np.nan], [np.inf], [1e9], [-5.0]])
def test_dot_plot_draws_whatever_comes(numbers: list[float]) -> None:
    assert png(dot_plot({"a": numbers}, ["r"], xlabel="x", title="t"))


def test_dot_plot_refuses_another_length() -> None:
    with pytest.raises(ValueError, match="'a' has 1 numbers, and rows has 2"):
        dot_plot({"a": [1.0]}, ["r", "s"], xlabel="x", title="t")


def drawn(figure: Figure) -> np.ndarray:
    """The magnitudes that have a line in the upper panel, all rows together."""
    segments = [segment for lines in figure.axes[0].collections for segment in lines.get_segments()]  # type: ignore[attr-defined]
    return np.sort([segment[0][0] for segment in segments])


#: A format of each shape of the picture, the smallest first.
DRAWN = ("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3b11fnuz", "float6_e3m2fn")


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", DRAWN)
def test_value_grid_draws_each_magnitude_once(name: str) -> None:
    fmt = CATALOGUE[name]
    values = fmt.values()
    figure = value_grid(fmt)
    np.testing.assert_array_equal(drawn(figure), values[values > 0])
    assert figure.get_suptitle().startswith(f"{name}: {fmt.bits} bits, {values.size} finite values")
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "text", ["fixed4.4", "integer8", "uinteger4", "codebook(-1,-0.5,0.25)", "codebook(2)", "e4m3(subnormals=false)"]
)
def test_value_grid_draws_both_signs_of_uneven_formats(text: str) -> None:
    values = parse(text).format.values()
    magnitudes = np.sort(np.abs(values[values != 0]))
    same = np.array_equal(values[values > 0], -values[values < 0][::-1])
    figure = value_grid(text)
    np.testing.assert_array_equal(drawn(figure), values[values > 0] if same else magnitudes)
    axes = figure.axes[0]
    heights = [np.mean(lines.get_segments(), 1)[:, 1] for lines in axes.collections if len(lines.get_segments())]  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.unique(np.concatenate(heights).round(9)), axes.get_yticks())  # names beside the lines
    assert png(figure)


def test_value_grid_marks_the_ends() -> None:
    marks = "\n".join(texts(value_grid("e4m3fn")))
    for mark in ("smallest subnormal\n$2^{-9}$", "smallest normal\n$2^{-6}$", "one\n1", "largest\n448"):
        assert mark in marks
    assert "smallest normal" not in "\n".join(texts(value_grid("integer4")))


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of labels of the upper panel whose texts, or the text of one and the line of the other, overlap."""
    figure.draw_without_rendering()
    marks = [text for text in figure.axes[0].texts if isinstance(text, Annotation) and text.arrow_patch]
    boxes = {mark.get_text(): Text.get_window_extent(mark) for mark in marks}
    lines = {mark.get_text(): mark.arrow_patch.get_window_extent() for mark in marks if mark.arrow_patch}
    others = [(a, b) for a in boxes for b in boxes if a != b]
    assert others
    return [(a, b) for a, b in others if boxes[a].overlaps(boxes[b]) or boxes[a].overlaps(lines[b])]


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("fmt", [*(CATALOGUE[name] for name in DRAWN), parse_format("e5m5")], ids=str)
def test_value_grid_labels_do_not_overlap(fmt: ElementFormat) -> None:
    assert overlaps(value_grid(fmt)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("binary32", "32 bits; formats of at most 16 bits can be drawn"),
        ("binary16p1uf", "binary64"),
        ("codebook(0)", "nothing to draw"),
    ],
)
def test_value_grid_refuses_what_it_cannot_draw(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        value_grid(text)


@pytest.mark.parametrize("text", ["e4m3fn", "posit8", "takum_linear8", "takum8"])
def test_value_grid_shows_the_largest_error_of_rounding(text: str) -> None:
    """That of numbers next to each other between two values, whichever of the two they become."""
    figure = value_grid(text)
    shown = sorted((seg[0][0], seg[1][0], seg[0][1]) for c in figure.axes[1].collections for seg in c.get_segments())  # type: ignore[attr-defined]
    below, above, error = (np.array(part)[:, None] for part in zip(*shown, strict=True))
    x = below * (above / below) ** np.linspace(0, 1, 4096)
    measured = np.max(np.abs(np.asarray(jc.round_to_format(x, text)) - x) / x, axis=1)
    np.testing.assert_allclose(measured, error[:, 0], rtol=0.06 if text == "takum8" else 0.02)
    assert figure.axes[1].get_ylim()[1] > error.max()
    if text == "posit8":  # from 2^20 to 2^24 numbers change at 2^22 (docs/formats.md)
        assert error[-1, 0] == 3


def test_titles_of_long_codebooks_count_their_levels() -> None:
    nf4 = jc.formats.nf4.element
    assert value_grid(nf4).get_suptitle() == "codebook of 16 levels: 4 bits, 16 finite values from -1 to 1"
    assert jc.plot.code_histogram([0.5], nf4).get_suptitle().startswith("codebook of 16 levels: 1 numbers")
    assert jc.plot.value_grid([nf4]).axes[0].get_yticklabels()[0].get_text() == "codebook of 16 levels\n4 bits"
    assert value_grid("codebook(-1,0.5)").get_suptitle().startswith("codebook(-1.0,0.5): 1 bits")


def test_value_grid_refuses_scaled_formats() -> None:
    with pytest.raises(
        TypeError, match="fmt='mxfp4' has no values of its own to draw; pass its element 'float4_e2m1fn'"
    ):
        value_grid("mxfp4")


def squares_and_sums(x: jax.Array) -> jax.Array:
    with jax.named_scope("squares"):
        y = x * x
    return jnp.exp(y) + 1.0


def test_report_draws_what_was_seen() -> None:
    low = jc.emulate(squares_and_sums, "e4m3")
    seen = low.report(jnp.array([0.03, 0.3, 2.0, 15.0, 40.0]), trace_values=True)
    figure = seen.plot(title="a program")
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    lines = [line.rsplit("\n", 1) for line in names]
    assert [line[0] for line in lines] == ["squares mul\nfloat8_e4m3", "exp\nfloat8_e4m3", "add\nfloat8_e4m3"]
    first = squares_and_sums.__code__.co_firstlineno
    assert [line[1] for line in lines] == [f"test_plot.py:{first + n}" for n in (2, 3, 3)]
    errors = [value for name in ("error", "deviation") for row in seen.rows if (value := getattr(row, name))]
    assert texts(figure, 0) == [f" {value:.1e}" for value in errors] and len(errors) >= 4
    fields = ("overflows", "underflows", "infinities", "nans")
    lost = [[count for row in seen.rows if (count := getattr(row, field))] for field in fields]
    assert texts(figure, 1) == [f" {count}" for counts in lost for count in counts] and all(lost[:3])
    bars = [bar for bar in left.patches if isinstance(bar, Rectangle) and bar.get_width()]
    widths = [bar.get_x() + bar.get_width() for bar in bars]
    assert np.allclose(widths, errors)
    legend = right.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["overflowed", "became zero", "infinite", "NaN"]
    assert figure.get_suptitle() == "a program" and png(figure).startswith(b"\x89PNG")


def colours(figure: Figure, index: int) -> tuple[dict[str, object], dict[str, object]]:
    """Of the legend and of the bars, by name."""
    axes = figure.axes[index]
    legend = axes.get_legend()
    assert legend is not None
    named = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    return named, {bars.get_label(): bars[0].get_facecolor() for bars in axes.containers}  # type: ignore[misc, index]


def test_report_after_an_overflow() -> None:
    """Infinities and NaN have bars of their own, and an operation without any finite result is not left empty."""
    low = jc.emulate(lambda x: (y := jnp.exp(x * 8.0)) - y, "e4m3")
    seen = low.report(jnp.array([9.0, 8.0]), trace_values=True)
    assert [(row.overflows, row.infinities, row.nans) for row in seen.rows] == [(0, 0, 0), (2, 2, 0), (0, 0, 2)]
    figure = seen.plot()
    assert texts(figure, 1) == [" 2", " 2", " 2"]
    hatched = [bar for bar in figure.axes[0].patches if bar.get_hatch()]
    low_end, high_end = figure.axes[0].get_xlim()
    assert [round(bar.get_y() + bar.get_height() / 2, 6) for bar in hatched] == [1, 2]  # type: ignore[attr-defined]
    assert all((bar.get_x(), bar.get_x() + bar.get_width()) == (low_end, high_end) for bar in hatched)  # type: ignore[attr-defined]
    for index, count in enumerate((3, 4)):
        named, drawn = colours(figure, index)
        assert named == drawn and len(set(named.values())) == len(named) == count
    assert png(figure).startswith(b"\x89PNG")


def test_report_without_losses() -> None:
    low = jc.emulate(lambda x: x + 1.0, "e5m10")
    figure = low.report(jnp.array([1.0, 2.0]), trace_values=True).plot()
    assert [texts(figure, i) for i in (0, 1)] == [[], []]
    assert png(figure).startswith(b"\x89PNG")


def test_report_that_saw_nothing() -> None:
    low = jc.emulate(jnp.exp, "e5m10")
    with pytest.raises(ValueError, match="trace_values=True"):
        low.report(jnp.ones(2)).plot()


# -- pareto ------------------------------------------------------------------------------------------------------------
def test_pareto_joins_the_best_for_their_bits() -> None:
    names, bits = ["a", "b", "c", "d", "e"], [4, 8, 8, 16, 8]
    figure = jc.plot.pareto(names, bits, [1.0, 0.5, 0.1, 0.2, np.nan], ylabel="error", log=True)
    axes = figure.axes[0]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[4, 1.0], [8, 0.1]]
    best, others, _, lost = (points.get_offsets().tolist() for points in axes.collections)
    assert best == [[4, 1.0], [8, 0.1]] and others == [[8, 0.5], [16, 0.2]]
    assert lost == [[8, pytest.approx(axes.get_ylim()[1])]]  # the bad end
    edge, *labels = axes.texts
    assert edge.get_text() == "infinite or NaN" and [text.get_text() for text in labels] == names
    assert [text.get_fontweight() for text in labels] == ["bold", "normal", "bold", "normal", "normal"]
    places = sorted(text.xyann[1] for text in labels)  # type: ignore[attr-defined]
    assert min(np.diff(places)) >= 0.2 - 1e-9 and places[0] >= 0 and places[-1] <= 1
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("log", [False, True])
def test_pareto_has_exact_points_as_crosses_at_the_edge(log: bool) -> None:
    """They are no measured values: the front joins none of them, and the edge says what they are."""
    best, worst = (0.0, np.inf) if log else (np.inf, -np.inf)
    value = 30.0 if log else -30.0
    values = [worst, value, best, best]
    figure = jc.plot.pareto([*"abcd"], [4, 8, 16, 32], values, ylabel="x", log=log, higher_is_better=not log)
    axes = figure.axes[0]
    bad, good = axes.get_ylim()[:: -1 if log else 1]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[8, value]]
    circles, _, exact, lost = axes.collections
    assert circles.get_offsets().tolist() == [[8, value]]
    assert exact.get_offsets().tolist() == [[16, good], [32, good]] and lost.get_offsets().tolist() == [[4, bad]]
    assert exact.get_paths() != circles.get_paths()  # type: ignore[attr-defined]
    assert [(text.get_text(), text.xy[1]) for text in axes.texts[:2]] == [("exact", good), ("infinite or NaN", bad)]  # type: ignore[attr-defined]
    assert [text.get_fontweight() for text in axes.texts[2:]] == ["normal", "bold", "bold", "normal"]


def test_pareto_without_a_finite_value_is_drawn() -> None:
    for log in (False, True):
        figure = jc.plot.pareto(["a"], [4], [np.inf], ylabel="error", log=log)
        assert png(figure).startswith(b"\x89PNG") and not len(figure.axes[0].lines[0].get_xydata())
        assert not len(figure.axes[0].get_yticks()) and not len(figure.axes[0].get_yticks(minor=True))
    with pytest.raises(ValueError, match="lengths 1, 2, 1"):
        jc.plot.pareto(["a"], [1, 2], [1], ylabel="error")


def test_tune_has_exact_points_as_crosses_at_the_edge() -> None:
    found = jc.tune(lambda x: x / 3, ["e5m2", "bfloat16", None], [(1.0,)], 0.1)
    axes = found.plot().axes[1]
    assert [point.error > 0 for point in found.front] == [True, True, False]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[point.cost, point.error] for point in found.front[:2]]
    exact = np.asarray(axes.collections[-1].get_offsets()).tolist()
    assert exact == [[32.0, axes.get_ylim()[0]]] and axes.texts[-1].get_text() == "exact"
    tolerance = next(line for line in axes.lines if line.get_label() == "tolerance")
    assert set(np.asarray(tolerance.get_ydata())) == {0.1}


# -- formats side by side ----------------------------------------------------------------------------------------------
def test_value_grid_draw_the_values_of_each_format() -> None:
    formats = ["e2m1fn", "e2m3fn", "integer4", "codebook(-1,0.5,2)"]
    axes = jc.plot.value_grid(formats).axes[0]
    for place, (fmt, lines) in enumerate(zip(formats, axes.collections, strict=True)):
        segments = np.array(lines.get_segments())  # type: ignore[attr-defined]
        values = parse(fmt).format.values()
        np.testing.assert_array_equal(segments[:, 0, 0], values[values > 0])
        assert (segments[:, :, 1].min(), segments[:, :, 1].max()) == (place - 0.38, place + 0.38)
    colours = [tuple(lines.get_colors()[0]) for lines in axes.collections]  # type: ignore[attr-defined]
    assert all(a != b for a, b in itertools.pairwise(colours))
    assert axes.get_yticklabels()[0].get_text() == "float4_e2m1fn\n4 bits"


def test_one_format_is_a_list_of_it() -> None:
    for one in ("e5m2", parse("e5m2").format):
        assert len(jc.plot.value_grid([one]).axes[0].collections) == 1
        assert jc.plot.rounding_error(one, 1.0, 2.0).axes[0].lines[0].get_label() == "float8_e5m2"


def test_rounding_error_is_that_of_the_definition() -> None:
    """Multiples of 1/16 within 8, rounded by Python's round, which takes ties to even."""
    axes = jc.plot.rounding_error(["fixed4.4:saturate"], -10.0, 10.0, relative=False, points=801).axes[0]
    x, error = (np.asarray(data, np.float64) for data in axes.lines[0].get_data())
    low, high = (16 * float(end) for end in (parse("fixed4.4").format.min, parse("fixed4.4").format.max))
    nearest = np.array([min(max(round(16 * value), low), high) / 16 for value in x])
    np.testing.assert_allclose(error, nearest - x, atol=1e-15)
    relative = jc.plot.rounding_error(["e4m3fn", "e5m2:down"], 0.1, 1000.0).axes[0]
    x, error = (np.asarray(data, np.float64) for data in relative.lines[0].get_data())
    assert axes.get_axisbelow() is True  # the grid is behind the curves
    assert np.nanmax(np.abs(error)) <= 2.0**-4 and np.isnan(error[x > 464]).all() and not np.isnan(error[x < 464]).any()
    down = np.asarray(relative.lines[1].get_ydata(), np.float64)
    assert down.max() <= 0 and down.min() > -0.25 and relative.get_xscale() == "log"


def test_code_histogram_counts_each_value() -> None:
    x = np.array([0.0, -0.0, 0.2, 0.25, 0.3, 5.0, 7.0, 100.0, -9.0, -0.5, np.nan, np.inf])
    figure = jc.plot.code_histogram(x, "e2m1fn")
    values = [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    heights = [int(bar.get_height()) for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    counts = {value: count for value, count in zip(values, heights, strict=True) if count}
    # 0.25 is a tie and goes to 0, 5 is one and goes to 4 (even codes); 7, 100 and -9 are beyond the ends.
    assert counts == {-6: 1, -0.5: 1, 0: 4, 0.5: 1, 4: 1, 6: 2}
    labels = jc.plot.code_histogram(x, "integer4").axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == [str(value) for value in range(-8, 8)]
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("draw", "error", "said"),
    [
        (lambda: jc.plot.value_grid([]), ValueError, "at least one format"),
        (lambda: jc.plot.value_grid(["mxfp4"]), TypeError, "pass its element"),
        (lambda: jc.plot.value_grid(["codebook(-1)"]), ValueError, "no positive value"),
        (lambda: jc.plot.rounding_error([], 0, 1), ValueError, "at least one spec"),
        (lambda: jc.plot.rounding_error(["e4m3"], 2, 1), ValueError, "start=2 and stop=1"),
        (lambda: jc.plot.rounding_error(["e4m3:stochastic"], 0, 1), ValueError, "is stochastic"),
        (lambda: jc.plot.rounding_error(["e4m3"], 0, 1, points=1), ValueError, "points=1 must be"),
        (lambda: jc.plot.code_histogram([1.0], "half"), ValueError, "16 bits; formats of at most 8"),
        (lambda: jc.plot.code_histogram([np.nan], "e4m3"), ValueError, "no finite number"),
        (lambda: jc.plot.sensitivity, AttributeError, r"write found.plot\(\)"),
    ],
)
def test_bad_arguments_of_pictures_are_named(draw, error, said) -> None:
    with pytest.raises(error, match=said):
        draw()
