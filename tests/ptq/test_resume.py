"""Runs that end early: what their folder continues, bit for bit, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc

further = Further()

RULE = jc.Rule(weight="int4(group=8)")


class Killed(Exception):
    """Ends a run."""


def network(p: Any, x: Any) -> Any:
    h = jnp.tanh(x @ p["first"] + p["bias"])
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])[0]


def problem() -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    shapes = {"first": (12, 8), "bias": (8,), "stack": (2, 8, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()}
    return params, [jnp.asarray(rng.normal(size=(40, 12)), jnp.float32) for _ in range(2)]


def killer(after: int) -> Any:
    """A function of progress that ends the run at its n-th batch."""

    def tell(count: int) -> None:
        if count == after:
            raise Killed

    return tell


STEPS = [jc.ptq.correct_error(), jc.ptq.gptq(), jc.ptq.correct_biases()]


@further
@pytest.mark.parametrize("steps", [[], pytest.param(STEPS, marks=pytest.mark.slow)], ids=len)
def a_killed_run_continues_bit_for_bit(steps: Any, tmp_path: Path) -> None:
    """There are three stages of two batches each: the first layer, and the two turns of the loop."""
    params, batches = problem()
    whole, report = jc.quantize_fn(network, RULE).pack(
        params, batches=batches, steps=[jc.ptq.sequential(), *steps], return_report=True
    )
    folder, ran = tmp_path / "run", []
    for after, done in ((4, 1), (3, 2)):
        with pytest.raises(Killed):
            jc.quantize_fn(network, RULE).pack(
                params,
                batches=batches,
                steps=[jc.ptq.sequential(), *steps],
                resume=folder,
                progress=killer(after),
                return_report=True,
            )
        assert len(list(folder.glob("stage-*"))) == done
    again, told = jc.quantize_fn(network, RULE).pack(
        params,
        batches=batches,
        steps=[jc.ptq.sequential(), *steps],
        resume=folder,
        progress=ran.append,
        return_report=True,
    )
    assert ran == [1, 2]  # one layer is lost, no more
    assert jax.tree.structure(again) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    assert str(told) == str(report) and told.passes == 3 and len(told.weights) == 3
    assert bool(told.weights[0].bias) == bool(steps) and bool((again["bias"] != params["bias"]).any()) == bool(steps)


def two_layers(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["first"] + p["bias"]) @ p["second"]


def squares() -> tuple[Any, list[Any]]:
    """Two layers of one shape, which are compiled once."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for name in ("first", "second")}
    return params | {"bias": jnp.ones(8)}, [jnp.asarray(rng.normal(size=(20, 8)), jnp.float32) for _ in range(2)]


def test_one_pass_is_kept_and_other_runs_are_refused(tmp_path: Path) -> None:
    params, batches = squares()
    folder = tmp_path / "run"
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="an input with NaN"):
        jc.quantize_fn(two_layers, RULE).pack(
            params, batches=[batches[0].at[0, 0].set(jnp.nan)], steps=[], resume=folder, return_report=True
        )
    whole, report = jc.quantize_fn(two_layers, RULE).pack(
        params, batches=batches, steps=[], resume=folder, return_report=True
    )  # nothing was done: a new run
    (folder / "stage-00001.safetensors").unlink()
    ran: list[int] = []
    again, told = jc.quantize_fn(two_layers, RULE).pack(
        params, batches=batches, steps=[], resume=folder, progress=ran.append, return_report=True
    )
    assert not ran and str(told) == str(report)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    other = {**params, "bias": params["bias"] + 1}
    for name, call in {
        "batches": lambda: jc.quantize_fn(two_layers, RULE).pack(
            params, batches=batches[::-1], steps=[], resume=folder, return_report=True
        ),
        "params": lambda: jc.quantize_fn(two_layers, RULE).pack(
            other, batches=batches, steps=[], resume=folder, return_report=True
        ),
        "rules": lambda: jc.quantize_fn(two_layers, jc.Rule(weight="int4(group=4)")).pack(
            params, batches=batches, steps=[], resume=folder, return_report=True
        ),
        "steps": lambda: jc.quantize_fn(two_layers, RULE).pack(
            params, batches=batches, resume=folder, return_report=True
        ),
        "steps, in order": lambda: jc.quantize_fn(two_layers, RULE).pack(
            params, batches=batches, steps=[jc.ptq.sequential()], resume=folder, return_report=True
        ),
        "key": lambda: jc.quantize_fn(two_layers, RULE).pack(
            params, batches=batches, steps=[], key=key, resume=folder, return_report=True
        ),
        "function": lambda: jc.quantize_fn(lambda p, x: 2 * two_layers(p, x), RULE).pack(
            params, batches=batches, steps=[], resume=folder, return_report=True
        ),
    }.items():
        with pytest.raises(ValueError, match=f"holds a run with other {name.partition(',')[0]}; it continues"):
            call()


def test_a_run_with_other_names_of_parameters_is_refused(tmp_path: Path) -> None:
    def dense(p: Any, x: Any) -> Any:
        (w,) = p.values()
        return x @ w

    w, x = np.eye(8, dtype=np.float32), np.ones((2, 8), np.float32)
    jc.quantize_fn(dense, RULE).pack({"w": w}, batches=[x], steps=[], resume=tmp_path / "run", return_report=True)
    with pytest.raises(ValueError, match="holds a run with other params; it continues"):
        jc.quantize_fn(dense, RULE).pack({"v": w}, batches=[x], steps=[], resume=tmp_path / "run", return_report=True)


def flipped(path: Path, place: float) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Any] = {
    "last byte": lambda folder: flipped(folder / "stage-00000.safetensors", 1),
    "header": lambda folder: flipped(folder / "stage-00001.safetensors", 0.3),
    "length": lambda folder: flipped(folder / "stage-00001.safetensors", 0),
    "short": lambda folder: (folder / "stage-00000.safetensors").write_bytes(b"12345"),
    "empty": lambda folder: (folder / "stage-00001.safetensors").write_bytes(b""),
    "gone": lambda folder: (folder / "stage-00000.safetensors").unlink(),
    "swapped": lambda folder: (folder / "stage-00000.safetensors").replace(folder / "stage-00001.safetensors"),
    "sums": lambda folder: flipped(folder / "sums.safetensors", 0.9),
    "no sums": lambda folder: (folder / "sums.safetensors").write_text("{}"),
    "foreign": lambda folder: (folder / "sums.safetensors").replace(folder / "stage-00001.safetensors"),
}
NOTHING = [b"", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff", b'{"files": []}', None]


@pytest.mark.parametrize("damage", ["last byte", *(pytest.param(n, marks=pytest.mark.slow) for n in list(DAMAGES)[1:])])
def test_damaged_stages_are_done_again(damage: str, tmp_path: Path) -> None:
    params, batches = squares()
    folder = tmp_path / "run"
    whole, report = jc.quantize_fn(two_layers, RULE).pack(
        params, batches=batches, steps=[], resume=folder, return_report=True
    )
    DAMAGES[damage](folder)
    again, told = jc.quantize_fn(two_layers, RULE).pack(
        params, batches=batches, steps=[], resume=folder, return_report=True
    )
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    assert str(told) == str(report)
    DAMAGES["gone"](folder)  # what was done again is kept, too
    once_more = jc.quantize_fn(two_layers, RULE).pack(params, batches=batches, steps=[], resume=folder)
    jax.tree.map(np.testing.assert_array_equal, once_more, whole)


@further
@pytest.mark.parametrize("text", NOTHING)
def a_damaged_list_of_what_a_run_depends_on_is_an_error(text: bytes | None, tmp_path: Path) -> None:
    params, batches = squares()
    folder = tmp_path / "run"
    jc.quantize_fn(two_layers, RULE).pack(params, batches=batches, steps=[], resume=folder, return_report=True)
    (folder / "run.json").unlink()
    if text is not None:
        (folder / "run.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged \([^)].*; delete the folder to begin anew"):
        jc.quantize_fn(two_layers, RULE).pack(params, batches=batches, steps=[], resume=folder, return_report=True)


@further.first
def bad_folders(tmp_path: Path) -> None:
    params, batches = problem()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has files of something else, such as 'notes\.txt'"):
        jc.quantize_fn(network, RULE).pack(params, batches=batches, resume=tmp_path, return_report=True)
    with pytest.raises(TypeError, match="resume=3 must be the path"):
        jc.quantize_fn(network, RULE).pack(params, batches=batches, resume=3, return_report=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resume: for each start"):
        jc.quantize_fn(network, RULE).pack(params, batches=iter(batches), resume=tmp_path / "run", return_report=True)
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    (folder / "stage-00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged .*; delete the folder"):
        jc.quantize_fn(network, RULE).pack(params, batches=batches, resume=folder, return_report=True)


def test_reports_are_dicts_and_pictures() -> None:
    params, batches = squares()
    _, report = jc.quantize_fn(two_layers, [jc.Rule("second"), RULE]).pack(
        params, batches=batches, steps=[], return_report=True
    )
    told = json.loads(report.to_json())
    assert told == report.as_dict() and told["passes"] == 1
    rows = {row["path"]: row for row in told["weights"]}
    assert rows["first"]["before"] == report.weights[0].before and rows["second"]["before"] is None
    pytest.importorskip("matplotlib")
    (axes,) = report.plot(title="Errors").axes
    assert [label.get_text().split("\n")[0] for label in axes.get_yticklabels()] == ["first"]
    assert {f"{bar.get_width():.3f}" for bar in axes.patches} == {f"{report.weights[0].before:.3f}"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no weight whose product was looked at"):
        jc.ptq.PtqReport(()).plot()


test_further = further.test()
