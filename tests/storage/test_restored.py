"""Checkpoints of other libraries that were restored without a target, so that classes became dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from each_case import each
from flax import linen

import jchop as jc


def leaves_by_name(q: jc.QArray) -> dict[str, Any]:
    """What orbax restores of a QArray without a target."""
    return {"places": None, "qvalue": q.qvalue, "scale": q.scale, "zero_point": q.zero_point}


W = jc.Spec("int4(group=4)")
LOST = {
    "layer": [leaves_by_name(jc.QArray(np.ones((4, 4), np.uint8), np.ones((4, 2), "f4"), None, W, 8, np.dtype("f4")))]
}
ONE: Any = LOST["layer"][0]
ROW = np.ones((1, 8), np.float32)
LOW = jc.quantize_fn(lambda p, x: x @ p["layer"][0].T, jc.Rule(weight="int8"))
NET = linen.Dense(4)


@each(
    "path, call",
    [
        ("q", lambda: jc.dequantize(ONE)),
        ("w", lambda: jc.dot(ROW, ONE)),
        ("x", lambda: jc.einsum("ab,bc->ac", ONE, ROW)),
        ("w", lambda: jc.ragged_dot(ROW, ONE, [1])),
        ("params['layer'][0]", lambda: jc.storage.dequantize_params(LOST)),
        ("tree['layer'][0]", lambda: jc.save_safetensors("never", LOST)),
        ("tree['layer'][0]", lambda: jc.storage.save_checkpoint(LOST, "never", "plain")),
        ("params['layer'][0]", lambda: LOW(LOST, ROW)),
        ("params['layer'][0]", lambda: jax.jit(LOW)(LOST, ROW)),
        ("params['layer'][0]", lambda: LOW.pack(LOST, ROW)),
        (
            "variables['params']['kernel']",
            lambda: jc.nn.quantize(NET, jc.Rule(weight="int8")).apply({"params": {"kernel": ONE}}, ROW),
        ),
    ],
)
def test_leaves_of_a_qarray_in_a_dict_are_refused(path: str, call: Callable[[], Any]) -> None:
    """They have no spec, so what they stand for is not known; the message has the call that restores it."""
    with pytest.raises(TypeError) as error:
        call()
    said = str(error.value)
    assert (
        said.startswith(f"{path} is a dict of the leaves of a QArray") and "restore(path, jax.eval_shape(make))" in said
    )


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_states_of_optimizers_in_a_dict_are_refused(real: bool, tmp_path: Path) -> None:
    """Also those of a checkpoint that orbax wrote; under a target, the call of the message, they are whole."""
    params = {"w": jnp.ones((8, 256))}
    for tx in (jc.optim.adamw8bit(1e-3), jc.optim.dynamic_loss_scale(optax.sgd(1.0)), jc.optim.average_params()):
        if not real:
            with pytest.raises(
                TypeError, match=r"^state is a dict of steps, as of .* jax\.eval_shape\(tx\.init, params\)"
            ):
                tx.update(params, {"steps": 0}, params)
            continue
        orbax, state = pytest.importorskip("orbax.checkpoint"), tx.init(params)
        path = tmp_path / type(state).__name__
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()
            with pytest.raises(TypeError, match=r"^state is a dict of"):
                tx.update(params, checkpointer.restore(path), params)
            whole = checkpointer.restore(path, jax.eval_shape(tx.init, params))
        jax.tree.map(np.testing.assert_array_equal, whole, state)
        tx.update(params, whole, params)
