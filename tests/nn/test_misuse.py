"""What a rule cannot do, and state of another model: errors that say where; and numbers that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from layer_references import checked, each

import jchop as jc

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), "float32")
Rule = jc.Rule


def linear(seed: int = 0, out: int = 4) -> nnx.Linear:
    return nnx.Linear(8, out, rngs=nnx.Rngs(seed))


def packed(text: str, seed: int = 0) -> Any:
    return jc.nn.quantize(linear(seed), Rule(weight=text), mode="ptq")


# -- axes --------------------------------------------------------------------------------------------------------------


@each("text", ["int8(channel=5)", "int4(group=2,axis=7)", "int4(group=(2,2,2))", "int8(channel=(0,-2))"])
def test_axes_of_parameters_are_checked_at_once(text: str) -> None:
    model = nnx.Sequential(linear())
    words = r"weight='.*' of the Linear at 'layers/0' by Rule\('layers', .*axis.*axes from -2 to 1"
    for mode in ("qat", "ptq"):
        with pytest.raises(ValueError, match=words.replace("axis", "")):
            jc.nn.quantize(model, Rule("layers", weight=text), mode=mode)
    with pytest.raises(ValueError, match="layers/0"):
        jc.nn.report(model, Rule("layers", weight=text))
    with pytest.raises(ValueError, match=r"bias='int8\(channel=1\)'.*from -1 to 0"):
        jc.nn.quantize(model, Rule(bias="int8(channel=1)"))
    dense = jc.nn.quantize(linen.Dense(4), Rule(weight=text.replace("(0,-2)", "(0,2)")))
    with pytest.raises(ValueError, match=r"weight='.*' of the parameter 'kernel'.* axis .*array of 2 axes"):
        dense.apply(dense.init(jax.random.key(0), X), X)


@each("field", ["activation", "gradient", "weight_gradient", "output"])
def test_axes_of_other_operands_are_checked_in_the_first_call(field: str) -> None:
    rule = Rule("layers", **{field: "int8(channel=5)"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{field}='int8\(channel=5\)' of the Linear at 'layers/0' by .*from -2 to 1"):
        jc.nn.quantize(nnx.Sequential(linear()), rule)(X)
    dense = jc.nn.quantize(linen.Dense(4), Rule(**{field: "int8(channel=5)"}))  # type: ignore[arg-type]
    place = "Dense at ''" if field == "output" else "dot_general at 'Dense'"
    with pytest.raises(ValueError, match=rf"{field}='int8\(channel=5\)' of the {place} by .*from -2 to 1"):
        variables = dense.init(jax.random.key(0), X)
        jax.grad(lambda v: dense.apply(v, X).sum())(variables)


def nan_stays_nan_under_kept_scales() -> None:
    x = X.at[0, 3].set(jnp.nan)
    for source in (jc.MovingAverage(), jc.DelayedScaling(2), jc.LSQ()):
        model = jc.nn.quantize(linear(), Rule(activation="int8(group=tensor)", scale_from=source))
        model = jc.nn.calibrate(model, [X]) if isinstance(source, jc.LSQ) else model
        assert np.isnan(model(x)[0]).all() and np.isfinite(model(X)).all()


def the_derivative_of_what_is_rounded_stays() -> None:
    model = jc.nn.quantize(linear(), Rule(activation="int8(group=all):gradient=clipped"))
    plain = linear()
    np.testing.assert_array_equal(jax.grad(lambda x: model(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X))
    np.testing.assert_array_equal(jax.jvp(model, (X,), (X,))[1], X @ plain.kernel[...])


def an_axis_that_is_there_is_taken() -> None:
    rounded = jc.nn.quantize(linear(), Rule(weight="int8(channel=0)", activation="int8(channel=-2)"))
    same = jc.nn.quantize(linear(), Rule(weight="int8(group=all)", activation="int8(group=all)"))
    np.testing.assert_array_equal(rounded(X), same(X))


# -- NaN and infinities ------------------------------------------------------------------------------------------------


def packed_weights_of_another_shape_and_plain_ones_are_refused() -> None:
    def made(size: tuple[int, int]) -> Any:
        layer = nnx.Linear(*size, use_bias=False, rngs=nnx.Rngs(0))
        return jc.nn.quantize(layer, Rule(weight="int4(group=4)"), mode="ptq")

    model = made((8, 16))
    nnx.update(model, nnx.state(made((16, 8))))
    with pytest.raises(ValueError, match=r"of \(16, 8\), and this model holds it packed as .* of \(8, 16\)"):
        model(X)
    model = packed("int4(group=4)")
    nnx.update(model, nnx.state(linear()))
    with pytest.raises(ValueError, match=r"is an array of \(8, 4\), and this model holds it packed"):
        model(X)


@each("text", ["int8(group=all)", "nvfp4", "nf4"])
def nan_stays_nan_in_training(text: str) -> None:
    layer = linear()
    layer.kernel[...] = layer.kernel[...].at[2, 1].set(jnp.nan)
    x = X.at[0, 3].set(jnp.nan)
    of_weight = jc.nn.quantize(layer, Rule(weight=text))(X)
    np.testing.assert_array_equal(np.isnan(of_weight), np.arange(4) == np.full((2, 1), 1))
    of_input = jc.nn.quantize(linear(), Rule(activation=text))(x)
    np.testing.assert_array_equal(np.isnan(of_input), [[True] * 4, [False] * 4])
    model = jc.nn.quantize(linear(), Rule(weight=text, gradient=text))
    _, pull = jax.vjp(model, X)
    np.testing.assert_array_equal(np.isnan(pull(x[:, :4])[0]), [[True] * 8, [False] * 8])


@pytest.mark.parametrize(
    "check",
    [
        an_axis_that_is_there_is_taken,
        pytest.param(nan_stays_nan_in_training, marks=pytest.mark.slow),
        pytest.param(packed_weights_of_another_shape_and_plain_ones_are_refused, marks=pytest.mark.slow),
        pytest.param(the_derivative_of_what_is_rounded_stays, marks=pytest.mark.slow),
        pytest.param(nan_stays_nan_under_kept_scales, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_derivatives_and_nan(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_packed(value: float) -> None:
    layer = linear()
    layer.kernel[...] = layer.kernel[...].at[2, 1].set(value)
    words = (
        f"kernel of the Linear at '' .* {int(np.isnan(value))} NaN and {int(np.isinf(value))} infinities among its 32"
    )
    for mode in ("ptq", "weight_only"):
        with pytest.raises(ValueError, match=words):
            jc.nn.quantize(layer, Rule(weight="int8"), mode=mode)
    dense = jc.nn.quantize(linen.Dense(4), Rule(weight="int8"))
    variables = {"params": {"kernel": layer.kernel[...], "bias": jnp.zeros(4)}}
    with pytest.raises(ValueError, match=r"params: 'kernel' holds .* among its 32"):
        dense.pack(variables, X)


# -- arguments ---------------------------------------------------------------------------------------------------------


def ranged() -> Any:
    return jc.nn.quantize(linear(), Rule(activation="int8(group=tensor)"))


MISUSES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rngs": (lambda: jc.nn.quantize(linear(), Rule(weight="e4m3"), rngs=0), TypeError, "rngs=0 must be flax.nnx.Rngs"),
    "stream": (
        lambda: jc.nn.quantize(linear(), Rule(weight="e4m3:stochastic"), rngs=nnx.Rngs(params=0)),
        ValueError,
        "rngs has no stream 'rounding'.*it has 'params'",
    ),
    "model": (lambda: jc.nn.calibrate(3, [X]), TypeError, "model=3"),  # type: ignore[type-var]
    "batches": (lambda: jc.nn.calibrate(ranged(), None), TypeError, "batches=None"),  # type: ignore[arg-type]
    "call": (lambda: jc.nn.calibrate(ranged(), [X], call=3), TypeError, "call=3"),  # type: ignore[arg-type]
    "no number": (lambda: jc.nn.calibrate(ranged(), [X, X * jnp.nan]), ValueError, r"shape \(2, 8\) without a finite"),
    "nothing": (lambda: jc.nn.calibrate(ranged(), [X[:0]], method="entropy"), ValueError, r"shape \(0, 8\) without"),
    "folded model": (lambda: jc.nn.fold_batch_norms(3, {}), TypeError, "model=3"),  # type: ignore[type-var]
    "reported model": (lambda: jc.nn.report(linen.Dense(4)), TypeError, "one of Linen has"),  # type: ignore[arg-type]
    "key": (lambda: jc.quantize({"a": X}, Rule(weight="e4m3"), 0), TypeError, "key=0"),  # type: ignore[arg-type]
    "leaf": (
        lambda: jc.quantize({"a": X * jnp.nan}, Rule(weight="int8(channel=0)")),
        ValueError,
        "leaf at 'a' .* 16 NaN",
    ),
}


@each("name", MISUSES)
def test_arguments_are_checked(name: str) -> None:
    call, error, words = MISUSES[name]
    with pytest.raises(error, match=words):
        call()


# -- state of another model --------------------------------------------------------------------------------------------


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("text", ["int8(group=4)", "int4(group=8)", "int4(group=4,rule=half_range)"])
def test_packed_weights_of_another_rule_are_refused(text: str) -> None:
    words = r"kernel of the Linear at '' by .* is .*, and this model holds it packed as int4\(group=4,axis=-2\)"
    model = packed("int4(group=4)")
    nnx.update(model, nnx.state(packed(text, 1)))
    with pytest.raises(ValueError, match=words):
        model(X)
    with pytest.raises(ValueError, match=words):
        nnx.merge(nnx.graphdef(packed("int4(group=4)")), nnx.state(packed(text)))(X)
    nnx.update(model, nnx.state(packed("int4(group=4)", 1)))
    np.testing.assert_array_equal(model(X), packed("int4(group=4)", 1)(X))


def test_packed_variables_of_linen_keep_their_format_under_other_rules() -> None:
    def dense(**fields: Any) -> Any:
        return jc.nn.quantize(linen.Dense(4), Rule(**fields))

    int4 = dense(weight="int4(group=4)")
    variables = int4.pack(int4.init(jax.random.key(0), X), X)
    y = dense(weight="int8(group=4)").apply(variables, X)
    np.testing.assert_array_equal(y, int4.apply(variables, X))
    with pytest.raises(ValueError, match="'kernel' is packed already"):
        dense(weight="int8(group=4)").pack(variables, X)


def kept(source: Any) -> Rule:
    return Rule(weight="int8(group=tensor)", activation="int8(group=tensor)", scale_from=source)


@each(
    ("source", "name", "shape"),
    [(jc.DelayedScaling(4), "history", (3,)), (jc.MovingAverage(), "range", (3,)), (jc.LSQ(), "scale", (1,))],
)
def test_kept_scales_of_another_shape_are_refused(source: Any, name: str, shape: tuple[int, ...]) -> None:
    model = jc.nn.quantize(linear(), kept(source))
    model = jc.nn.calibrate(model, [X]) if isinstance(source, jc.LSQ) else model
    getattr(model.dot_general.left, name).set_value(jnp.ones(shape))
    with pytest.raises(ValueError, match=rf"of the Linear at '' by .* has shape \({shape[0]},\), and that rule needs"):
        model(X)
    dense = jc.nn.quantize(linen.Dense(4), kept(source))
    variables = dense.init(jax.random.key(0), X)
    changed = jax.tree_util.tree_map_with_path(
        lambda path, value: jnp.ones(shape) if "activation" in jax.tree_util.keystr(path) else value, variables
    )
    with pytest.raises(
        ValueError, match=rf"'kernel_activation_{name}' .* has shape \({shape[0]},\).*, and its rule needs"
    ):
        dense.apply(changed, X)


def test_a_cache_of_another_rule_is_refused() -> None:
    def attention(text: str) -> Any:
        layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
        made = jc.nn.quantize(layer, Rule(cache=text))
        made.init_cache((1, 5, 8))
        return made

    one, other = attention("e4m3(group=all)"), attention("e5m2(group=all)")
    one.cached_key.set_value(other.cached_key.get_value())
    with pytest.raises(ValueError, match=r"cache is packed as float8_e5m2.*cache=float8_e4m3"):
        one(jnp.ones((1, 1, 8)))
