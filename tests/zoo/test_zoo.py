"""The models of the zoo work without jchop: they trace, numbers are finite, and all parameters are listed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zoo import CASES, MISSING, Case, paths

#: Cases that the default run computes; the others are traced only, and computed by the slow run.
QUICK = ("llama", "shared_block", "linen_cnn", "dict_transformer", "odd_pieces", "equinox_ensemble", "haiku_lstm")

every = pytest.mark.parametrize("name", CASES)


def all_finite(tree: Any) -> bool:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floats
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


def loss_of(case: Case) -> Any:
    def loss(params: Any, *args: Any) -> Any:
        out = case.apply(params, *args)
        return case.loss(out), out

    return jax.value_and_grad(loss, has_aux=True)


@pytest.mark.in_turn(8)
@every
def test_every_parameter_is_listed_once(name: str) -> None:
    case = CASES[name]
    params, _ = case.params()
    listed = case.products + case.others
    assert sorted(listed) == sorted(paths(params))  # so none is listed twice
    assert set(case.derived) <= set(case.products)


@pytest.mark.in_turn(40)
@every
def test_it_traces_with_its_gradient(name: str) -> None:
    """The loss is a number in float32, and each parameter has a gradient of its shape."""
    case = CASES[name]
    params, args = case.params()
    (loss, out), gradient = jax.eval_shape(loss_of(case), params, *args)
    assert loss.shape == () and loss.dtype == jnp.float32 and jax.tree.leaves(out)
    assert {path: leaf.shape for path, leaf in paths(gradient).items()} == {
        path: leaf.shape for path, leaf in paths(params).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_its_numbers_are_finite_and_every_parameter_counts(name: str) -> None:
    case = CASES[name]
    params, args = case.params()
    (loss, out), gradient = jax.jit(loss_of(case))(params, *args)
    assert all_finite(out) and all_finite(gradient) and float(loss) > 0
    assert not [path for path, leaf in paths(gradient).items() if not jnp.any(leaf != 0)]


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in CASES for method in CASES[name].methods])
def test_other_methods_of_nnx(name: str, method: str) -> None:
    model, _ = CASES[name].build()
    out = nnx.eval_shape(lambda model, *args: getattr(model, method)(*args), model, *CASES[name].methods[method]())
    assert jax.tree.leaves(out)


def test_a_model_is_new_in_each_call() -> None:
    one, _ = CASES["llama"].build()
    other, _ = CASES["llama"].build()
    before = other.norm.scale[...]
    one.norm.scale[...] = 2 * one.norm.scale[...]
    assert bool((other.norm.scale[...] == before).all())


@pytest.mark.parametrize("package", ["equinox", "haiku"])
def test_the_libraries_of_other_models(package: str) -> None:
    if package in MISSING:
        pytest.skip(f"{package} is not installed, so its models are not in the zoo")
    assert package in {case.kind for case in CASES.values()}
