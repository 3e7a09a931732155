"""The examples run, and show what they say; those of one topic have tests beside those of the topic, too."""

import io
import sys
import time

import numpy as np
import pytest
from example_cases import EXAMPLES, load


class Said(Exception):
    """Ends an example at the first words that it says."""


class Listener(io.StringIO):
    def write(self, text: str) -> int:
        raise Said(text)


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_it_says_at_once_what_it_does(name, monkeypatch):
    """Within ten seconds, as "training 40 steps in float32"; run no further than that."""
    if name == "torch_training":
        pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small"])
    monkeypatch.setattr(sys, "stderr", Listener())
    start = time.process_time()
    with pytest.raises(Said, match=r"^(adding|integrating|serving|solving|training|LU of) \d+ "):
        example.main()
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_its_first_lines_name_the_command_and_small_is_documented(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert f"python examples/{name}.py" in source.split('"""')[1]
    assert '"--small"' in source


def test_harmonic_prints_and_draws(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "harmonic.png"
    monkeypatch.setattr(sys, "argv", ["harmonic.py", "--terms", "300", "--plot", str(picture)])
    load("harmonic").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8 and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_harmonic_stops_where_nearest_must_and_goes_on_stochastically():
    harmonic = load("harmonic")
    sums = {name: np.asarray(values) for name, values in harmonic.table(3000).items()}
    # In e5m2 the sum stays at 2: the next number is 2.5, and every term from 1/4 on is rounded away.
    assert sums["float8_e5m2"][-1] == 2.0 and sums["float8_e4m3fn"][-1] == 3.0
    assert sums["bfloat16"][-1] == 5.0625  # the well-known limit of bfloat16
    exact = np.cumsum(1 / np.arange(1, 3001))
    assert sums["binary16:stochastic"][-1] == pytest.approx(exact[-1], abs=0.3)
    assert sums["bfloat16:stochastic"][-1] == pytest.approx(exact[-1], abs=1.0)


@pytest.mark.slow
def test_posits_keep_as_many_digits_as_their_fraction_has_bits(monkeypatch, capsys, tmp_path):
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
