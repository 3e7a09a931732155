"""The examples run, and show what they say; those of one topic have tests beside those of the topic, too."""

import io
import sys

import numpy as np
import pytest
from each_case import each
from example_cases import EXAMPLES, SCRIPTS, load
from further import Further
from jax._src import compiler

further = Further()


class Said(Exception):
    """Ends an example at the first words that it says."""


class Listener(io.StringIO):
    def write(self, text: str) -> int:
        raise Said(text)


#: By default the lightest one alone.
BY_WEIGHT = sorted(SCRIPTS, key=lambda name: (name != "harmonic", name))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", BY_WEIGHT)
def test_it_says_at_once_what_it_does(name, monkeypatch):
    """As "training 40 steps in float32", before it compiles many programs; run no further than that."""
    needs = {"torch_training": ["torch"], "real_weights": ["magika", "onnx"], "real_speech": ["silero_vad"]}
    for package in needs.get(name, []):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(SCRIPTS[name].parent))
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small"])
    monkeypatch.setattr(sys, "stderr", Listener())
    compiled, compile_one = [], compiler.compile_or_get_cached
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *a, **k: compiled.append(1) or compile_one(*a, **k))
    with pytest.raises(Said, match=r"^(adding|integrating|reading|serving|solving|training|LU of) \d+ "):
        example.main()
    assert len(compiled) < 100


@each("name", sorted(SCRIPTS))
def test_its_first_lines_name_the_command_and_small_is_documented(name):
    source, place = SCRIPTS[name].read_text(), SCRIPTS[name].relative_to(EXAMPLES).as_posix()
    assert f"python examples/{place.removesuffix('/__main__.py')} " in source.split('"""')[1].replace("\n", " ")
    assert '"--small"' in source


def printed(name, monkeypatch, capsys, tmp_path):
    """The words of each line of a small run, which also draws."""
    picture = tmp_path / f"{name}.png"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", "--plot", str(picture)])
    load(name).main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_training_and_rollout_have_the_same_logits():
    rollout = load("rollout")
    rows = rollout.train(rollout.low, rollout.pack_masters, 5)
    assert all(equal and divergence == 0 for _, equal, divergence in rows)
    assert all(divergence > 0 for *_, divergence in rollout.train(rollout.logits, rollout.pack_copy, 2))


@pytest.mark.parametrize("weights", ["mxfp4", pytest.param("int4(group=32,scale=bfloat16)", marks=pytest.mark.slow)])
def test_experts_are_exported_as_they_were_trained(weights):
    experts = load("experts")
    experts.EXPERTS, experts.WIDTH, experts.HIDDEN, experts.ROWS = 2, 32, 64, 64
    ((_, exact, rounded, tuned, same),) = experts.run({weights: experts.FAMILIES[weights]}, steps=300, tuning=300)
    assert same and exact < tuned < rounded - 0.5 * (rounded - exact)


def harmonic_prints_and_draws(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "harmonic.png"
    monkeypatch.setattr(sys, "argv", ["harmonic.py", "--terms", "300", "--plot", str(picture)])
    load("harmonic").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8 and picture.read_bytes().startswith(b"\x89PNG")


def harmonic_stops_where_nearest_must_and_goes_on_stochastically(monkeypatch, capsys, tmp_path):
    harmonic = load("harmonic")
    sums = {name: np.asarray(values) for name, values in harmonic.table(3000).items()}
    # In e5m2 the sum stays at 2: the next number is 2.5, and every term from 1/4 on is rounded away.
    assert sums["float8_e5m2"][-1] == 2.0 and sums["float8_e4m3fn"][-1] == 3.0
    assert sums["bfloat16"][-1] == 5.0625  # the well-known limit of bfloat16
    exact = np.cumsum(1 / np.arange(1, 3001))
    assert sums["binary16:stochastic"][-1] == pytest.approx(exact[-1], abs=0.3)
    assert sums["bfloat16:stochastic"][-1] == pytest.approx(exact[-1], abs=1.0)


def the_tuned_solver_has_cheap_factors_and_dear_residuals(monkeypatch, capsys, tmp_path):
    rows = printed("tuned_solver", monkeypatch, capsys, tmp_path)
    shares = {row[0]: float(row[2][:-1]) for row in rows if len(row) == 3 and row[2].endswith("%")}
    assert shares["residual"] + shares["arguments"] > 90 and abs(shares["factor"]) < 5
    formats = {row[0]: row[1] for row in rows if len(row) == 6}
    assert formats["residual"] == formats["update"] == "carrier" and formats["factor"] == "bfloat16"
    last = {row[0]: float(row[-1]) for row in rows if len(row) == 8}
    assert last["tuned"] <= 1e-6 < 1e-4 < last["binary16"]


def each_bit_moves_the_horizon_of_lorenz(monkeypatch, capsys, tmp_path):
    rows = printed("lorenz_horizon", monkeypatch, capsys, tmp_path)
    horizons = {int(row[0]): float(row[1]) for row in rows if len(row) == 2 and row[0].isdigit()}
    assert (horizons[24] - horizons[8]) / 16 == pytest.approx(np.log(2) / 0.906, rel=0.15)
    bits = {row[0]: int(row[2]) for row in rows if len(row) == 6 and row[1].startswith("e8m")}
    assert bits["slopes"] < bits["state"]


def a_mix_of_layers_beats_eight_bits_at_both_ends(monkeypatch, capsys, tmp_path):
    for package in ("optax", "sklearn"):
        pytest.importorskip(package)
    rows = printed("tuned_classifier", monkeypatch, capsys, tmp_path)
    mixes = {float(row[1]): float(row[2]) for row in rows if row[:1] == ["jc.nn.allocate_bits"]}
    ends = next(row for row in rows if row[:1] == ["int8,"])
    single = next(float(row[3]) for row in rows if row[:3] == ["one", "format", "4.00"])
    assert mixes[min(mixes)] < min(single, float(ends[-1])) and min(mixes) <= 4.5 < float(ends[-2])


def three_results_of_the_first_minute(monkeypatch, capsys, tmp_path):
    for package in ("optax", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    rows = printed("first_minute", monkeypatch, capsys, tmp_path)
    assert rows[0][:5] == ["variance", "0.0789,", "in", "bfloat16", "0.5000;"]
    states = {row[0]: (int(row[1]), float(row[-1])) for row in rows if row[0].startswith("adamw")}
    (wide, loss), (packed, same) = states["adamw"], states["adamw8bit"]
    assert packed < 0.4 * wide and same == pytest.approx(loss, rel=0.1)
    scores = {row[0]: (float(row[2]), int(row[3])) for row in rows if row[1] == "accuracy"}
    (best, size), (score, small) = scores["float32"], scores["int4(group=32)"]
    assert score > best - 0.02 and small < 0.25 * size


def posits_keep_as_many_digits_as_their_fraction_has_bits(monkeypatch, capsys, tmp_path):
    posits = load("posits")
    # The error of a fraction of f bits is uniform: from 2^e to 2^(e+1) another bit is another log10(2) digits.
    bits = {"binary16": [10, 10], "bfloat16": [7, 7], "posit16": [11, 8], "takum_linear16": [11, 8]}
    kept = {spec: posits.digits(spec, np.array([0, 12]), 4001) for spec in bits}
    for spec, (near, far) in bits.items():
        more = (kept[spec] - kept["bfloat16"]) / np.log10(2)
        np.testing.assert_allclose(more, [near - 7, far - 7], atol=0.01)
    picture = tmp_path / "posits.png"
    monkeypatch.setattr(sys, "argv", ["posits.py", "--small", "--plot", str(picture)])
    posits.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 * 10 + 1 and picture.read_bytes().startswith(b"\x89PNG")


SHOWN = (
    harmonic_prints_and_draws,
    harmonic_stops_where_nearest_must_and_goes_on_stochastically,
    the_tuned_solver_has_cheap_factors_and_dear_residuals,
    each_bit_moves_the_horizon_of_lorenz,
    a_mix_of_layers_beats_eight_bits_at_both_ends,
    posits_keep_as_many_digits_as_their_fraction_has_bits,
    three_results_of_the_first_minute,
)


@further.first
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("check", SHOWN, ids=lambda check: check.__name__)
def an_example_shows_what_its_topic_says(check, monkeypatch, capsys, tmp_path):
    check(monkeypatch, capsys, tmp_path)


test_further = further.test()
