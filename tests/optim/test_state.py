"""Packed state: its codes, its size, and that it goes wherever a pytree of plain arrays would."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop import optim
from jchop.optim._pack import PackedRows

further = Further()

KEY = jax.random.key(11)
#: Cheap to compile; the maps of the 8-bit optimizers have tests of their own.
GROUPS = "mxfp8_e4m3"


def params_of(rng: np.random.Generator, rows: int = 16, columns: int = 64) -> dict[str, jax.Array]:
    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {"w": some(rows, columns), "b": some(columns)}


def steps(tx: Any, params: Any, grads: Any, count: int, state: Any = None) -> tuple[Any, Any]:
    """`count` steps with the same gradients, each a jitted one."""
    step = jax.jit(lambda p, s: (lambda made: (optax.apply_updates(p, made[0]), made[1]))(tx.update(grads, s, p)))
    state = jax.jit(tx.init)(params) if state is None else state
    for _ in range(count):
        params, state = step(params, state)
    return params, state


# -- the numbers -------------------------------------------------------------------------------------------------------


def published_map(signed: bool) -> np.ndarray:
    """bitsandbytes' dynamic map of 8 bits, from its published description: decades of means of equal steps.

    In place of its zero, the unsigned map has the mean of 0.1 and 1 in the decade below.
    """
    levels = [0.0 if signed else 0.55e-7, 1.0]
    for i in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        means = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)
        levels += [*means, *(-means if signed else [])]
    return np.sort(levels)


def brute_force(x: np.ndarray, levels: np.ndarray, group: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """(codes, numbers) by trying every level for every element, in groups along the last axis."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    scale = np.abs(blocks).max(-1, keepdims=True)
    scale[scale == 0] = 1
    codes = np.abs((blocks / scale)[..., None] - levels).argmin(-1)
    return codes.reshape(x.shape), (levels[codes] * scale).reshape(x.shape)


@further
def adamw8bit_follows_the_published_formula(rng: np.random.Generator) -> None:
    """Codes are those of a search over all levels, and two steps those of the formula in binary64."""
    lr, b1, b2, eps, decay = 1e-3, 0.9, 0.999, 1e-8, 1e-2
    tx = optim.adamw8bit(lr, b1, b2, eps, weight_decay=decay, min_size=1)
    params = jnp.asarray(rng.standard_normal((4, 512)), jnp.float32)
    p, m, v = np.float64(params), np.zeros((4, 512)), np.zeros((4, 512))
    update = jax.jit(tx.update)
    state = jax.jit(tx.init)(params)
    for t in (1, 2):
        g = np.float32(rng.standard_normal((4, 512)) * np.exp(rng.standard_normal((4, 512))))
        updates, state = update(jnp.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
        m, v = b1 * m + (1 - b1) * np.float64(g), b2 * v + (1 - b2) * np.float64(g) ** 2
        step = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
        p = p * (1 - lr * decay) - step * m / (np.sqrt(v) + eps * np.sqrt(1 - b2**t))
        np.testing.assert_allclose(params, p, rtol=0, atol=1e-5 * np.abs(p).max())
        for moment, signed in (("mu", True), ("nu", False)):
            exact = m if signed else v
            codes, numbers = brute_force(exact, published_map(signed))
            kept = getattr(state.inner_state[0], moment)
            # A moment in binary32 may lie on the other side of a midpoint than its value in binary64: seldom.
            assert (np.asarray(kept.qvalue) != codes).sum() <= 4, moment
            same = np.asarray(kept.qvalue) == codes
            np.testing.assert_allclose(np.asarray(jc.dequantize(kept))[same], numbers[same], rtol=1e-5)
            np.testing.assert_array_equal(np.asarray(kept.spec.element.levels, np.float32), np.float32(
                [kept.spec.element.value_of(i) for i in range(256)]))  # fmt: skip
            np.testing.assert_allclose(kept.spec.element.levels, published_map(signed), rtol=1e-6)
        m, v = (np.float64(jc.dequantize(getattr(state.inner_state[0], name))) for name in ("mu", "nu"))


@further
def a_step_is_that_of_the_wrapped_optimizer_on_the_unpacked_state(rng: np.random.Generator) -> None:
    plain, params = optax.adam(1e-2), params_of(rng)
    grads = jax.tree.map(lambda p: 0.1 * p, params)
    tx = optim.quantize_state(plain, {"0.mu.*": GROUPS, "0.nu.*": "bfloat16"}, min_size=100)
    state = tx.init(params)
    for _ in range(3):
        unpacked = jax.tree.map(
            lambda x: jc.dequantize(x) if isinstance(x, jc.QArray) else x,
            state.inner_state,
            is_leaf=lambda x: isinstance(x, jc.QArray),
        )
        wanted, inner = plain.update(grads, unpacked, params)
        updates, state = tx.update(grads, state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
        wanted_mu = jc.round_to_format(inner[0].mu["w"], GROUPS)
        np.testing.assert_array_equal(jc.dequantize(state.inner_state[0].mu["w"]), wanted_mu)
        np.testing.assert_array_equal(state.inner_state[0].nu["w"].qvalue, inner[0].nu["w"].astype("bfloat16"))
        np.testing.assert_array_equal(state.inner_state[0].mu["b"], inner[0].mu["b"])


@further.first
def stochastic_state_draws_anew_each_step_and_for_each_array(rng: np.random.Generator) -> None:
    params = {"a": jnp.zeros((8, 64)), "b": jnp.zeros((8, 64))}
    grads = jax.tree.map(lambda p: p + 1.001, params)
    tx = optim.quantize_state(optax.sgd(0.1, 0.5), "bfloat16:stochastic", KEY, min_size=1)
    _, one = tx.update(grads, tx.init(params), params)
    _, two = tx.update(grads, tx.init(params)._replace(key=one.key), params)
    drawn = [np.asarray(s.inner_state[0].trace[k].qvalue, np.float32) for s in (one, two) for k in ("a", "b")]
    assert all((x != y).any() for i, x in enumerate(drawn) for y in drawn[:i])
    assert all(set(np.unique(x)) == {1.0, 1.0078125} for x in drawn)


@further
@pytest.mark.parametrize("make", [optim.adam8bit, optim.adamw8bit, optim.adamw_fp8, optim.adamw4bit])
def small_second_moments_make_no_large_updates(make: Any) -> None:
    """Curvatures of 10^-8 to 10 in one group: a second moment that became zero would divide by eps alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    target, start = (jax.random.normal(key, (64, 256)) for key in keys[:2])
    curvature = jax.random.normal(keys[2], (64, 256)) ** 2
    tx = make(1e-2)

    def step(carry: Any, _: None) -> Any:
        p, state = carry
        updates, state = tx.update(2 * (p - target) * curvature, state, p)
        return (optax.apply_updates(p, updates), state), jnp.abs(updates).max()

    largest = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=60)[1])(start).max()
    assert 0.5e-2 < largest < 4e-2


@further
def a_map_without_zero_keeps_a_moment_of_zero_next_to_zero() -> None:
    tx = optim.adamw4bit(1e-3, min_size=1)
    params = jnp.zeros((2, 256))
    state = jax.jit(tx.init)(params)
    nu = jc.dequantize(state.inner_state[0].nu)
    assert 0 < float(nu.max()) <= 2.0**-100
    updates, state = jax.jit(tx.update)(jnp.zeros((2, 256)).at[0, 0].set(1.0), state, params)
    assert np.count_nonzero(updates) == 1 and float(updates[0, 0]) == pytest.approx(-1e-3, rel=1e-4)
    assert 0 < float(jc.dequantize(state.inner_state[0].nu)[1].max()) <= 2.0**-100


# -- what is packed ----------------------------------------------------------------------------------------------------


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("make", "most"),
    [pytest.param("adamw8bit", 2.06, marks=pytest.mark.slow), ("adamw_fp8", 2.06), ("adamw4bit", 1.09)],
)
def bytes_of_state(make: str, most: float) -> None:
    """Bytes for each parameter of the 256-1024-256 network, counted on arrays."""
    sizes = {"l1": {"w": (1024, 256), "b": (1024,)}, "l2": {"w": (256, 1024), "b": (256,)}}
    params = jax.tree.map(jnp.zeros, sizes, is_leaf=lambda x: isinstance(x, tuple))
    state = jax.jit(getattr(optim, make)(1e-3).init)(params)
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == 525_568
    assert live / count <= most
    report = optim.state_report(state)
    assert report.nbytes == live
    assert [row.path for row in report.packed] == [
        f"inner_state.0.{m}.{x}.w" for m in ("mu", "nu") for x in ("l1", "l2")
    ]
    assert {row.path for row in report.rows if row.spec is None} >= {
        f"inner_state.0.{m}.{x}.b" for m in ("mu", "nu") for x in ("l1", "l2")
    }
    assert "as it is" in str(report) and f"{live:,} bytes" in str(report)


@further
def odd_shapes_are_packed_too(rng: np.random.Generator) -> None:
    """Short and odd last axes are joined with those before them; a scalar is a row of one; nothing is left out."""
    shapes = {"kernel": (3, 3, 8, 12), "thin": (500, 1), "odd": (7, 257), "row": (101,), "none": ()}
    params = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    tx = optim.quantize_state(optax.sgd(1.0, 0.5), GROUPS, min_size=1)
    state, after = jax.jit(lambda p: (lambda s: (s, tx.update(p, s, p)[1]))(tx.init(p)))(params)
    report = optim.state_report(state)
    assert {row.path: row.shape for row in report.packed} == {f"inner_state.0.trace.{k}": s for k, s in shapes.items()}
    assert state.inner_state[0].trace["kernel"].rows.shape == (3, 3, 96) and state.inner_state[0].trace[
        "thin"
    ].rows.shape == (500,)
    for row in report.packed:
        count = int(np.prod(row.shape))
        assert row.nbytes <= count + 4 * -(-count // 32) + 4 * 8, row
    for name, p in params.items():
        kept = after.inner_state[0].trace[name]
        kept = jc.dequantize(kept.rows).reshape(kept.shape) if isinstance(kept, PackedRows) else jc.dequantize(kept)
        np.testing.assert_allclose(kept, p, atol=float(jnp.abs(p).max()) / 8)


def test_rules() -> None:
    params = {"a": {"w": jnp.zeros((4, 8))}, "b": {"w": jnp.zeros((4, 8)), "x": jnp.zeros(4)}}
    rules = {"0/mu/a": None, "0.{mu,nu}.**.w": "bfloat16", "*": "binary16"}
    state = optim.quantize_state(optax.adam(1e-3), rules, min_size=8).init(params)
    kept = {row.path.removeprefix("inner_state.0."): row.spec for row in optim.state_report(state).rows}
    assert kept["mu.a.w"] is None and kept["mu.b.w"] == kept["nu.a.w"] == "bfloat16" and kept["mu.b.x"] is None
    for rules, message in (
        (
            {"0.mu.*": "bfloat16", "0.no.*": "e5m2"},
            "spec: '0.no.*' matches no array, or only such as an earlier pattern matches; the nearest paths are '0.nu.",
        ),
        ({r"0\.mu": "bfloat16"}, "is a regular expression"),
        ({"*": "bfloat16", "0.mu": None}, "spec: '0.mu' matches no array, or only such as an earlier"),
        ({}, "spec={} must map patterns of paths to values, as {'0.mu': 'dynamic8'}"),
        ({"0.mu": 3}, "must be a Spec"),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            optim.quantize_state(optax.adam(1e-3), rules).init(params)
    with pytest.raises(ValueError, match="key=None"):
        optim.quantize_state(optax.adam(1e-3), "bfloat16:stochastic")
    with pytest.raises(ValueError, match="nonfinite='stop'"):
        optim.quantize_state(optax.adam(1e-3), "bfloat16", nonfinite="stop")
    with pytest.raises(ValueError, match="min_size=0"):
        optim.quantize_state(optax.adam(1e-3), "bfloat16", min_size=0)


# -- where it goes -----------------------------------------------------------------------------------------------------


@further
def a_donated_state_neither_grows_nor_compiles_again(rng: np.random.Generator) -> None:
    params = params_of(rng)
    rule = {"*mu*": GROUPS + ":stochastic", "*nu*": "bfloat16"}
    tx = optax.inject_hyperparams(
        lambda learning_rate: optim.quantize_state(optax.adam(learning_rate), rule, KEY, min_size=1)
    )(1e-2)
    step = jax.jit(lambda p, s: tx.update(p, s, p)[1], donate_argnums=1)
    state = step(params, jax.jit(tx.init)(params))
    size = optim.state_report(state).nbytes
    for i in range(3):
        state.hyperparams["learning_rate"] = jnp.asarray(0.1 * i, jnp.float32)
        state = state._replace(inner_state=state.inner_state._replace(key=jax.random.key(i)))
        before = state.inner_state.inner_state[0].mu["w"].qvalue
        state = step(params, state)
        assert before.is_deleted()
    assert step._cache_size() == 1 and optim.state_report(state).nbytes == size


@further
def seeds_under_vmap_are_those_alone(rng: np.random.Generator) -> None:
    params = {"w": params_of(rng)["w"]}

    def run(key: jax.Array) -> tuple[Any, Any]:
        tx = optim.quantize_state(optax.sgd(0.1, 0.9), GROUPS + ":stochastic", key, min_size=1)
        updates, state = tx.update(params, tx.init(params), params)
        return updates, state.inner_state

    keys = jax.random.split(KEY, 3)
    together, alone = jax.jit(lambda keys: (jax.vmap(run)(keys), run(keys[1])))(keys)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b), together, alone)
    assert bool((together[1][0].trace["w"].qvalue[0] != together[1][0].trace["w"].qvalue[1]).any())


def test_shardings_need_parameters_that_have_one() -> None:
    with pytest.raises(ValueError, match="NamedSharding"):
        optim.state_shardings(optax.adam(1e-3), {"w": jnp.zeros(4)})


# -- restored elsewhere ------------------------------------------------------------------------------------------------

#: The spec of the states that are restored.
OWN = "int8(group=32)"


def packed_sgd(spec: Any, **options: Any) -> Any:
    return optim.quantize_state(optax.sgd(0.5, 0.5), spec, min_size=8, **options)


def written_by_flax(state: Any, other: Any, folder: Path) -> Any:
    serialization = pytest.importorskip("flax.serialization")
    return serialization.from_bytes(other, serialization.to_bytes(state))


def written_by_safetensors(state: Any, other: Any, folder: Path) -> Any:
    jc.save(folder / "state.safetensors", state)
    return jc.load(folder / "state.safetensors", like=other)


def written_by_orbax(state: Any, other: Any, folder: Path) -> Any:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state, force=True)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: other))


WRITERS = [written_by_flax, written_by_safetensors, written_by_orbax]


@further
@pytest.mark.parametrize("write", WRITERS[1:])
def a_state_with_keys_goes_on_where_it_stopped(write: Any, tmp_path: Path) -> None:
    params = {"w": jnp.linspace(-1, 1, 128).reshape(4, 32)}
    tx = optim.quantize_state(optax.sgd(0.5, 0.5), "int8(group=32):stochastic", KEY, min_size=8)
    step = jax.jit(tx.update)
    _, state = step(params, tx.init(params), params)
    found = write(state, tx.init(params), tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    same_with_keys(found, state)
    same_with_keys(step(params, found, params), step(params, state, params))


def same_with_keys(got: Any, wanted: Any) -> None:
    data = [jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == KEY.dtype else x, s) for s in (got, wanted)]
    jax.tree.map(np.testing.assert_array_equal, *data)


@further
@pytest.mark.parametrize("write", WRITERS)
def a_checkpoint_fits_its_own_specs_and_shapes_alone(write: Any, tmp_path: Path) -> None:
    params = {"w": jnp.linspace(-1, 1, 128).reshape(4, 32)}
    tx = packed_sgd(OWN)
    _, state = tx.update(params, tx.init(params), params)
    found = write(state, tx.init(params), tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    _, going_on = tx.update(params, found, params)
    jax.tree.map(np.testing.assert_array_equal, going_on, tx.update(params, state, params)[1])

    other = packed_sgd("fixed4.4(group=32)").init(params)
    assert list(map(jnp.shape, jax.tree.leaves(other))) == list(map(jnp.shape, jax.tree.leaves(state)))
    joined = tx.init({"w": jnp.zeros((2, 2, 32))})  # the same codes, where it is packed as rows
    for wrong in (other, joined, packed_sgd("int8(group=16)").init(params), packed_sgd("bfloat16").init(params)):
        with pytest.raises(ValueError, match=r"skips|mismatch|do not match"):
            write(state, wrong, tmp_path)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("spec", ["fixed4.4(group=32)", "int8(group=16)", "bfloat16", {"*": None}, {"0.trace.b": OWN}])
def test_a_state_of_other_rules_is_refused(spec: Any) -> None:
    params = {"w": jnp.ones((4, 32)), "b": jnp.ones(32)}
    state = packed_sgd(OWN).init(params)
    with pytest.raises(
        ValueError, match=r"state keeps 0\.trace\.(w|b) as int8\(group=32\), and this transformation keeps"
    ):
        jax.eval_shape(packed_sgd(spec).update, params, state, params)
    with pytest.raises(ValueError, match=r"state keeps 0\.trace\.. as"):
        jax.eval_shape(packed_sgd(OWN).update, params, packed_sgd(spec).init(params), params)
    with pytest.raises(ValueError, match="structure"):
        jax.tree.map(lambda a, b: a, state, packed_sgd(spec).init(params))


@pytest.mark.smoke
def test_axes_and_gradients_of_a_spec_are_no_other_rules() -> None:
    params = {"w": jnp.ones((2, 2, 32)), "b": jnp.ones(32)}
    for spec in ("int8(channel=0)", jc.Spec("int8(group=16)", gradient="clipped"), jc.formats.mxfp4):
        tx = packed_sgd(spec)
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


@further
def an_nnx_optimizer_refuses_the_state_of_another() -> None:
    nnx = pytest.importorskip("flax.nnx")
    made = [nnx.Linear(8, 32, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2)]
    specs = (OWN, "fixed4.4(group=32)")
    one, other = (nnx.Optimizer(m, packed_sgd(s), wrt=nnx.Param) for m, s in zip(made, specs, strict=True))
    grads = nnx.grad(lambda m: (m(jnp.ones((1, 8))) ** 2).sum())(made[0])
    one.update(made[0], grads)
    nnx.update(other, nnx.state(one))
    with pytest.raises(ValueError, match="several specs"):
        other.update(made[1], grads)


@further
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
def a_part_of_a_packed_array_may_be_small() -> None:
    tx = optim.quantize_state(optax.sgd(0.5, 0.5), "int8(group=32)", min_size=256)
    mesh = jax.make_mesh((8,), ("a",))
    params = jax.device_put(jnp.ones((8, 64)), NamedSharding(mesh, P("a")))
    state = jax.jit(tx.init, out_shardings=optim.state_shardings(tx, params))(params)
    where = jax.tree.map(lambda x: P("a") if x.shape else P(), state)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P("a"), where, P("a")), out_specs=(P("a"), where), check_vma=False
    )
    updates, after = jax.eval_shape(step, params, state, params)
    assert updates.shape == params.shape and jax.tree.structure(after) == jax.tree.structure(state)


@further
def offloaded_state_stays_on_the_host(rng: np.random.Generator) -> None:
    params = params_of(rng)
    inner = optim.quantize_state(optax.sgd(1e-2, 0.5), "int8(group=32)", min_size=512)
    tx = optim.offload_state(inner, min_size=512)
    state = jax.jit(tx.init)(params)
    got, state = steps(tx, params, params, 2, state)
    wanted, plain = steps(inner, params, params, 2)
    assert state.inner_state[0].trace["w"].qvalue.sharding.memory_kind == "pinned_host"
    assert state.inner_state[0].trace["b"].sharding.memory_kind != "pinned_host"
    jax.tree.map(np.testing.assert_array_equal, (got, state.inner_state), (wanted, plain.inner_state))
    with pytest.raises(ValueError, match="memory_kind='disk'"):
        optim.offload_state(inner, "disk")


@further
def flax_takes_it(rng: np.random.Generator) -> None:
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    from flax.training.train_state import TrainState

    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    tx = optax.chain(
        optim.quantize_state(optax.adam(1e-2), GROUPS, min_size=64), optim.round_params("bfloat16:stochastic", KEY)
    )

    model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    kernel = model.kernel[...]
    np.testing.assert_array_equal(kernel, jc.round_to_format(kernel, "bfloat16"))

    dense = linen.Dense(32)
    state = TrainState.create(apply_fn=dense.apply, params=dense.init(KEY, x)["params"], tx=tx)
    grad = jax.jit(jax.value_and_grad(lambda p: (dense.apply({"params": p}, x) ** 2).mean()))
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    losses = []
    for _ in range(5):
        loss, grads = grad(state.params)
        state = apply(state, grads)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert len(optim.state_report(state.opt_state).packed) == 2


def test_a_state_does_not_begin_from_packed_parameters() -> None:
    """Moments of the codes themselves would be of no use; `optax.adam` makes them."""
    params = {"w": jc.quantize(jnp.ones((4, 64)), "int8(group=32)"), "b": jnp.ones(4)}
    for tx in (
        jc.optim.adamw8bit(1e-3),
        jc.optim.round_params("bfloat16"),
        jc.optim.low_precision(optax.sgd(1), weight="bfloat16"),
    ):
        with pytest.raises(TypeError, match=r"params\['w'\] is packed.*dequantize\(params\)"):
            tx.init(params)
        tx.init(jc.dequantize(params))


@further
@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optim.adamw8bit(1e-3, min_size=8), id="packed state", marks=pytest.mark.slow),
        pytest.param(optim.adamw8bit(1e-3, min_size=8, chunks=2), id="in chunks", marks=pytest.mark.slow),
        pytest.param(optim.round_params("bfloat16"), id="rounded"),
        pytest.param(optim.low_precision(optax.adam(1e-3), weight="bfloat16", momentum="bfloat16"), id="low precision"),
    ],
)
def adapters_train_beside_placeholders_of_packed_weights(tx: Any, rng: np.random.Generator) -> None:
    """A mask of `lora_mask` leaves QArrays without arrays: the step is that of a tree of the adapters alone."""
    conv = jc.quantize_fn(lambda w, x: jax.lax.conv(x, w, (4, 4), "VALID"), jc.Rule(weight="int4(group=32)"))
    own, kernel = params_of(rng), conv.pack(jnp.ones((8, 3, 4, 4)), jnp.ones((1, 3, 8, 8)))
    whole = {"base": jc.quantize(own["w"], "nf4(group=32)"), "conv": kernel, **own}
    mask = {**jax.tree.map(lambda _: False, whole), "w": True, "b": True}
    lora = jax.tree.map(lambda taken, leaf: leaf if taken else None, mask, whole)
    expected, _ = steps(tx, own, jax.tree.map(jnp.sin, own), 2)
    got, state = steps(tx, lora, jax.tree.map(jnp.sin, lora), 2)
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x)
    assert len(optim.state_report(state).rows) == len(optim.state_report(tx.init(own)).rows)
    assert jax.tree.structure(optim.apply_updates(lora, lora)) == jax.tree.structure(lora)

    masked = optax.masked(tx, mask)
    gradients = jax.tree.map(lambda taken, leaf: jnp.sin(leaf) if taken else jnp.zeros_like(leaf), mask, whole)
    updates, _ = masked.update(gradients, masked.init(whole), whole)
    np.testing.assert_array_equal(updates["w"], tx.update(jax.tree.map(jnp.sin, own), tx.init(own), own)[0]["w"])


test_further = further.test()
