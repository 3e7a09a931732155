"""Numbers that Optax injects as hyperparameters, and arguments that mean no training."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import assert_refused

import jchop as jc
from jchop import optim

KEY = jax.random.key(3)
NUMBERS = {"w": np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256), "b": np.ones(4, np.float32)}
PARAMS = jax.device_put(NUMBERS)
GRADS = jax.device_put({name: x / 8 for name, x in NUMBERS.items()})
NAMED = ["adam8bit", "adamw8bit", "adamw4bit", "adamw_fp8", "lion8bit", "sgd8bit", "muon8bit", "adamw_split"]
NAN, INF = math.nan, math.inf


# -- the arguments of Optax ------------------------------------------------------------------------------------------


def test_a_named_optimizer_takes_the_arguments_of_optax() -> None:
    """By name, order, kind and default, with arguments of its own behind them."""
    for name in NAMED:
        theirs = re.split("8bit|4bit|_fp8|_split", name)[0]
        theirs = optax.contrib.muon if theirs == "muon" else getattr(optax, theirs)
        expected, found = (inspect.signature(f).parameters for f in (theirs, getattr(optim, name)))
        own = ["min_size", "nonfinite", *(["chunks"] if name != "muon8bit" else [])]
        assert (name, list(found)) == (name, [*expected, *own])
        assert all(found[argument].kind is inspect.Parameter.KEYWORD_ONLY for argument in own), name
        for argument, parameter in expected.items():
            assert found[argument].kind == parameter.kind, (name, argument)
            # Without momentum there is no state to pack.
            wanted = 0.9 if (name, argument) == ("sgd8bit", "momentum") else parameter.default
            assert found[argument].default == wanted, (name, argument)


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=re.escape("adamw8bit() got an unexpected keyword argument 'spec'")):
        optim.adamw8bit(1e-3, spec="int8")


@pytest.mark.parametrize("wrap", [*(getattr(optim, name) for name in NAMED),
                                  lambda rate: optim.low_precision(optax.adam(rate), weight="bfloat16"),
                                  lambda rate: optim.skip_nonfinite(optax.adam(rate))])  # fmt: skip
def test_a_tree_without_arrays_is_updated(wrap: Any) -> None:
    tx = wrap(1e-3)
    updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}


@pytest.mark.parametrize("tx", [
    optim.error_feedback("e5m2"), optim.compensate("bfloat16"), optim.adamw_split(1e-3),
    optim.dynamic_loss_scale(optax.sgd(0.1)),
    optim.low_precision(optax.sgd(0.1), weight="e5m2", accumulator="e6m9")])  # fmt: skip
def test_python_floats_are_parameters_as_in_optax(tx: Any) -> None:
    leaves = [jax.tree.leaves(tx.update({"w": x / 8}, tx.init({"w": x}), {"w": x})) for x in (1.5, jnp.float32(1.5))]
    assert leaves[0] == leaves[1]


def test_a_wrapper_takes_its_transformation_as_those_of_optax_do() -> None:
    theirs = next(iter(inspect.signature(optax.masked).parameters))
    for name in ("quantize_state", "skip_nonfinite", "dynamic_loss_scale", "low_precision", "offload_state"):
        own = next(iter(inspect.signature(getattr(optim, name)).parameters))
        assert (name, own) == (name, theirs)


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def run(tx: Any, count: int = 4, state: Any = None) -> tuple[Any, Any]:
    """The updates of so many steps in one scan, and the last state."""

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        updates, state = tx.update(GRADS, state, PARAMS)
        return state, updates

    state = tx.init(PARAMS) if state is None else state
    return jax.jit(lambda state: jax.lax.scan(step, state, None, length=count)[::-1])(state)


# -- optax.inject_hyperparams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_every_named_optimizer_is_injected_as_optax_users_write_it(name: str) -> None:
    """With a number or a schedule, half of them each."""
    learning_rate = (lambda count: 1e-3 / (count + 1)) if NAMED.index(name) % 2 else 1e-3
    tx = optax.inject_hyperparams(getattr(optim, name))(learning_rate=learning_rate)
    state = jax.eval_shape(tx.init, PARAMS)
    updates, after = jax.eval_shape(tx.update, GRADS, state, PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
    assert {"learning_rate"} < set(state.hyperparams) and "chunks" not in state.hyperparams


@pytest.mark.smoke
def test_injected_adamw8bit_gives_the_bits_of_the_plain_one() -> None:
    numbers = ("b1", "b2", "eps", "eps_root", "weight_decay")
    tx = optax.inject_hyperparams(optim.adamw8bit, static_args=numbers)(learning_rate=1e-2, min_size=None)
    updates, state = run(tx, 2)
    state.hyperparams["learning_rate"] = 0.25  # as a user changes it between steps
    changed, state = run(tx, 2, state)

    @jax.jit
    def plain(rates: jax.Array) -> Any:
        def step(state: Any, rate: Any) -> Any:
            updates, state = optim.adamw8bit(rate).update(GRADS, state, PARAMS)
            return state, updates

        return jax.lax.scan(step, optim.adamw8bit(1e-2).init(PARAMS), rates)

    kept, each = plain(jnp.asarray([1e-2, 1e-2, 0.25, 0.25], jnp.float32))
    same(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), updates, changed), each)
    same(state.inner_state, kept)


#: Transformations that take numbers: a function of them, and the numbers; powers of two, of which no bit is lost.
TAKES_NUMBERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "round_updates": (optim.round_updates, {"spec": "e5m2", "scale": 0.25}),
    "average_params": (optim.average_params, {"start": 1, "every": 2}),
    "dynamic_loss_scale": (
        optim.dynamic_loss_scale,
        {"inner": optax.sgd(0.5), "initial": 8.0, "growth_interval": 2, "largest": 16.0},
    ),
    "low_precision": (optim.low_precision, {"inner": optax.sgd(0.5), "weight": "e5m2", "gradient_scale": 0.25}),
    "quantize_state": (optim.quantize_state, {"inner": optax.sgd(0.5, 0.5), "spec": "e5m2"}),
    "offload_state": (optim.offload_state, {"inner": optax.sgd(0.5, 0.5), "memory_kind": "device"}),
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", TAKES_NUMBERS)
def test_injected_numbers_give_the_bits_of_plain_ones(name: str) -> None:
    make, arguments = TAKES_NUMBERS[name]
    updates, state = run(optax.inject_hyperparams(make)(**arguments))
    expected, inner = run(make(**arguments))
    same(updates, expected)
    same(state.inner_state, inner)


def test_an_injected_schedule_of_scales() -> None:
    def scale(count: Any) -> Any:
        return 0.5 ** (count + 1)

    updates, _ = run(optax.inject_hyperparams(optim.round_updates)("e5m2", scale=scale), 3)
    for i in range(3):
        wanted = jc.round_to_format(GRADS["w"] * 0.5 ** (i + 1), "e5m2")
        np.testing.assert_array_equal(updates["w"][i], wanted)


def test_a_size_that_is_traced_is_refused_with_the_way_out() -> None:
    tx = optax.inject_hyperparams(optim.sgd8bit)(1e-3, chunks=2)
    with pytest.raises(TypeError, match=r"chunks=.* is traced.*static_args='chunks'"):
        jax.eval_shape(tx.update, GRADS, tx.init(PARAMS), PARAMS)
    tx = optax.inject_hyperparams(optim.sgd8bit, static_args="chunks")(1e-3, chunks=2)
    jax.eval_shape(tx.update, GRADS, jax.eval_shape(tx.init, PARAMS), PARAMS)
    tx = optax.inject_hyperparams(optim.round_updates, static_args="key")("e5m2:stochastic", KEY, scale=0.5)
    jax.eval_shape(tx.update, GRADS, jax.eval_shape(tx.init, PARAMS), PARAMS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit", "adamw_fp8", "adam8bit", "lion8bit", "sgd8bit"])
def test_a_decay_of_16_bits_is_refused_with_the_way_out(name: str, dtype: str) -> None:
    """Traced, too: in bfloat16 0.999 is 1, with which each step would be NaN, and so be skipped."""
    half = jnp.ones((4, 8), dtype)
    wrong = optax.inject_hyperparams(getattr(optim, name))(1e-3)
    for init in (wrong.init, lambda p: jax.eval_shape(wrong.init, p)):
        with pytest.raises(ValueError, match=rf"^(b1|momentum) has the dtype {dtype}.*hyperparam_dtype=jnp.float32"):
            init(half)
    tx = optax.inject_hyperparams(getattr(optim, name), hyperparam_dtype=jnp.float32)(learning_rate=1e-3)
    updates, _ = tx.update(half, tx.init(half), half)
    assert bool(jnp.isfinite(updates).all() & (updates != 0).all())


def test_a_hyperparameter_set_to_a_python_number_is_reported() -> None:
    tx = optax.inject_hyperparams(optim.sgd8bit)(1e-3)
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = 0.5
    assert "hyperparams.learning_rate" in str(optim.state_report(state))


# -- what means no training --------------------------------------------------------------------------------------------

SGD = optax.sgd(0.1)
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    *((f"learning_rate={x!r}", lambda x=x: optim.adamw8bit(x)) for x in (NAN, INF, -0.1, True, None, "0.1", 1j)),
    *((f"b1={x!r}", lambda x=x: optim.adamw8bit(1e-3, x)) for x in (NAN, 1.0, -0.5, True)),
    *((f"b2={x!r}", lambda x=x: optim.lion8bit(1e-3, b2=x)) for x in (NAN, 1.5)),
    *((f"eps={x!r}", lambda x=x: optim.adam8bit(1e-3, eps=x)) for x in (NAN, -1.0)),
    ("eps_root=-1.0", lambda: optim.adamw_fp8(1e-3, eps_root=-1.0)),
    *((f"weight_decay={x!r}", lambda x=x: optim.adamw4bit(1e-3, weight_decay=x)) for x in (NAN, INF, -1e-2)),
    *((f"momentum={x!r}", lambda x=x: optim.sgd8bit(1e-3, x)) for x in (NAN, 1.0, None)),
    ("b1=", lambda: optim.adamw8bit(1e-3, jnp.ones(2) / 2)),
    *((f"scale={x!r}", lambda x=x: optim.round_updates("e5m2", scale=x)) for x in (0, -1, NAN, INF, True, None, "2")),
    *((f"gradient_scale={x!r}", lambda x=x: optim.low_precision(SGD, gradient_scale=x)) for x in (0.0, -1.0, NAN, INF)),
    *(
        (f"initial={x!r}", lambda x=x: optim.dynamic_loss_scale(SGD, x, largest=2.0**127))
        for x in (NAN, INF, -1.0, 1e39)
    ),
    *((f"largest={x!r}", lambda x=x: optim.dynamic_loss_scale(SGD, largest=x)) for x in (INF, NAN, 2.0**128, 2.0)),
    *(
        (f"smallest={x!r}", lambda x=x: optim.dynamic_loss_scale(SGD, smallest=x))
        for x in (-1.0, NAN, 2.0**-127, 1e-50)
    ),
    *((f"factor={x!r}", lambda x=x: optim.dynamic_loss_scale(SGD, factor=x)) for x in (1 + 1e-9, INF, NAN, 0.5, -2.0)),
    *((f"growth_interval={x!r}", lambda x=x: optim.dynamic_loss_scale(SGD, growth_interval=x)) for x in (2.5, True)),
    *((f"dtype={x!r}", lambda x=x: optim.round_params("e5m2", dtype=x)) for x in ("int32", "complex64", 3)),
    *(
        ("inner=", lambda f=f: f(optax.sgd))
        for f in (optim.skip_nonfinite, optim.dynamic_loss_scale, optim.offload_state)
    ),
    ("inner=5", lambda: optim.quantize_state(5, "bfloat16")),
    ("inner=None", lambda: optim.low_precision(None)),
    ("min_size=True", lambda: optim.adamw8bit(1e-3, min_size=True)),
    ("chunks=2.0", lambda: optim.adamw8bit(1e-3, chunks=2.0)),
    ("every=0", lambda: optim.average_params(every=0)),
    ("key=42", lambda: optim.round_updates("bfloat16", 42)),
    ("shape (2, 3), and params (3,)", lambda: optim.apply_updates(jnp.ones(3), jnp.ones((2, 3)))),
    ("shape (), and the average (3,)", lambda: optim.averaged_params(AVERAGES, jnp.ones(()))),
    ("cannot hold", lambda: passed(optim.error_feedback("binary16"))),
    ("bits=4", lambda: optim.compensate("bfloat16", bits=4)),
    ("bits=8", lambda: optim.compensate("e5m2", bits=8)),
    ("compensation='binary32'", lambda: passed(optim.compensate("e5m2", compensation="binary32"))),
]
AVERAGES = optim.average_params().init(jnp.ones(3))


def passed(tx: Any) -> Any:
    """A step on parameters of 16 bits."""
    half = jax.ShapeDtypeStruct((3,), "bfloat16")
    return jax.eval_shape(lambda half: tx.update(half, tx.init(half), half), half)


def test_what_is_refused() -> None:
    short = {i: rf"(?s)^(?=.{{,399}}\Z).*{re.escape(message)}" for i, (message, _) in enumerate(REFUSED)}
    assert_refused(
        {f"{i}, {text}": (call, (TypeError, ValueError), short[i]) for i, (text, call) in enumerate(REFUSED)}
    )


def test_a_loss_scale_that_is_none_leaves_the_step_out_and_starts_again() -> None:
    tx = optim.dynamic_loss_scale(optax.sgd(1.0), 64.0)
    step = jax.jit(tx.update)
    for scale in (INF, -INF, NAN, 0.0, -8.0):
        state = tx.init(jnp.ones(2))._replace(scale=jnp.asarray(scale, jnp.float32))
        updates, state = step(jnp.ones(2), state, jnp.ones(2))
        found = updates.tolist(), float(state.scale), int(state.skipped)
        assert (scale, *found) == (scale, [0, 0], 64, 1)
        updates, state = step(jnp.full(2, 64.0), state, jnp.ones(2))
        assert (scale, updates.tolist(), int(state.skipped)) == (scale, [-1, -1], 1)


def test_the_largest_limits_keep_a_loss_scale_finite() -> None:
    tx = optim.dynamic_loss_scale(
        optax.sgd(1.0), 2.0**120, growth_interval=1, factor=2.0**127, smallest=2.0**-126, largest=2.0**127
    )
    state, scales = tx.init(jnp.ones(1)), []
    for g in (1.0, 1.0, NAN, NAN):
        _, state = tx.update(jnp.array([g]), state, jnp.ones(1))
        scales.append(float(state.scale))
    assert scales == [2.0**127, 2.0**127, 1.0, 2.0**-126]


#: Transformations of a spec, and the path that their error names.
OF_SPECS: list[tuple[Callable[[Any], Any], str]] = [
    (optim.error_feedback, "layer.scale"),
    (optim.round_updates, "layer.scale"),
    (optim.round_params, "layer.scale"),
    (optim.compensate, "layer.scale"),
    (lambda spec: optim.average_params(spec=spec), "layer.scale"),
    (lambda spec: optim.low_precision(optax.sgd(0.1), weight=spec), "layer.scale"),
    (lambda spec: optim.low_precision(optax.sgd(0.1, 0.9), momentum=spec), "0.trace.layer.scale"),
    (lambda spec: optim.quantize_state(optax.sgd(0.1, 0.9), spec, min_size=1), "0.trace.layer.scale"),
]


def test_a_leaf_of_integers_is_named_with_the_way_out() -> None:
    params = {"layer": {"w": jnp.ones(3), "step": jnp.int32(0)}}
    rounding = optim.round_params, optim.round_updates, optim.error_feedback, optim.compensate
    low = [partial(optim.low_precision, optax.sgd(0.1)), partial(optim.low_precision, optax.adam(0.1))]
    made = [make("bfloat16") for make in rounding] + [f(weight="e5m2") for f in low] + [f(gradient="e5m2") for f in low]
    for tx in made:
        with pytest.raises(TypeError, match=r"^layer\.step: .*dtype int32.*optax\.masked"):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)
        masked = optax.masked(tx, {"layer": {"w": True, "step": False}})
        jax.eval_shape(lambda p, tx=masked: tx.update(p, tx.init(p), p), params)


def test_a_leaf_without_the_axes_of_a_format_is_named_with_the_way_out() -> None:
    params = {"layer": {"kernel": jnp.ones((4, 8)), "scale": jnp.ones(())}}

    def stepped(tx: Any) -> Any:
        return jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)

    for make, path in OF_SPECS:
        tx = make(jc.formats.int8(group=(2, 2)))
        with pytest.raises(ValueError, match=rf"^{re.escape(path)}: .*\baxis\b.*optax.masked.*a rule of None(\n|$)"):
            stepped(tx)
        stepped(optax.masked(tx, {"layer": {"kernel": True, "scale": False}}))
