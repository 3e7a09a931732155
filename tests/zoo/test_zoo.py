"""The models of the zoo work without jchop: they trace, numbers are finite, and all parameters are listed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zoo import CASES, MISSING, Case, paths

#: Cases that the default run computes; the slow run computes all.
QUICK = ("dict_mlp",)


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
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_listed_once(name: str) -> None:
    """And other methods of NNX trace."""
    case = CASES[name]
    params, _ = case.params()
    listed = case.products + case.others
    assert sorted(listed) == sorted(paths(params))  # so none is listed twice
    assert set(case.derived) <= set(case.products)
    for method, args in case.methods.items():
        model, _ = case.build()
        out = nnx.eval_shape(lambda model, *args, method=method: getattr(model, method)(*args), model, *args())
        assert jax.tree.leaves(out), method


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_its_numbers_are_finite_and_every_parameter_counts(name: str) -> None:
    """The loss is a number in float32, and each parameter has a gradient of its shape."""
    case = CASES[name]
    params, args = case.params()
    (loss, out), gradient = jax.jit(loss_of(case))(params, *args)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert {path: leaf.shape for path, leaf in paths(gradient).items()} == {
        path: leaf.shape for path, leaf in paths(params).items()
    }
    assert all_finite(out) and all_finite(gradient) and float(loss) > 0
    assert not [path for path, leaf in paths(gradient).items() if not jnp.any(leaf != 0)]


def test_a_model_is_new_in_each_call() -> None:
    one, _ = CASES["llama"].build()
    other, _ = CASES["llama"].build()
    before = other.norm.scale[...]
    one.norm.scale[...] = 2 * one.norm.scale[...]
    assert bool((other.norm.scale[...] == before).all())


def test_the_libraries_of_other_models() -> None:
    assert {"equinox", "haiku"} - {case.kind for case in CASES.values()} == set(MISSING)
