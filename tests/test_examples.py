"""The examples run, and show what they say; those of one topic have tests beside those of the topic, too."""

import io
import sys
import time

import numpy as np
import pytest
from example_cases import EXAMPLES, SCRIPTS, load


class Said(Exception):
    """Ends an example at the first words that it says."""


class Listener(io.StringIO):
    def write(self, text: str) -> int:
        raise Said(text)


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_it_says_at_once_what_it_does(name, monkeypatch):
    """Within ten seconds, as "training 40 steps in float32"; run no further than that."""
    if name == "torch_training":
        pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SCRIPTS[name].parent))
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small"])
    monkeypatch.setattr(sys, "stderr", Listener())
    start = time.process_time()
    with pytest.raises(Said, match=r"^(adding|integrating|serving|solving|training|LU of) \d+ "):
        example.main()
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_its_first_lines_name_the_command_and_small_is_documented(name):
    source, place = SCRIPTS[name].read_text(), SCRIPTS[name].relative_to(EXAMPLES).as_posix()
    assert f"python examples/{place.removesuffix('/__main__.py')} " in source.split('"""')[1].replace("\n", " ")
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
