"""Kernels that are changed before their product: by a mask, by a wrapper that normalizes them, or shared by layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.traverse_util import flatten_dict
from further import Further
from layer_references import checked

import jchop as jc

further = Further()

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 6, 8)), "float32")
#: The masked numbers are the largest, so that they would decide the scale of each output.
MASK = np.ones((3, 8, 4), "float32")
MASK[2] = 0
KERNEL = np.where(MASK == 0, 5, 1) * RNG.normal(size=MASK.shape).astype("float32")
Rule = jc.Rule


def masked(kind: Any = nnx.Conv, mask: Any = MASK, **more: Any) -> Any:
    layer = kind(8, 4, (3,), mask=jnp.asarray(mask), rngs=nnx.Rngs(0), **more)
    layer.kernel[...] = jnp.asarray(KERNEL)
    return layer


# -- masks -------------------------------------------------------------------------------------------------------------


@further
@pytest.mark.in_turn(9)
@pytest.mark.parametrize(
    ("kind", "spec"), [(nnx.Conv, "int4(group=all)"), (nnx.ConvTranspose, "int8(group=8)"), (nnx.Conv, "nf4")]
)
def a_masked_convolution_is_packed_as_it_is_trained(kind: Any, spec: str) -> None:
    layer, rule = masked(kind), Rule(weight=spec)
    trained, packed = jc.nn.quantize(layer, rule), jc.nn.quantize(layer, rule, mode="ptq")
    assert packed.mask is None and layer.mask is not None
    np.testing.assert_array_equal(packed(X), trained(X))
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(packed, X), nnx.jit(lambda m, x: m(x))(trained, X))
    layer.kernel[...] = jnp.asarray(KERNEL * MASK)
    layer.mask = None
    np.testing.assert_array_equal(packed(X), jc.nn.quantize(layer, rule)(X))


def a_mask_is_kept_if_no_kernel_is_packed_and_multiplied_once() -> None:
    biased = jc.nn.quantize(masked(), Rule(bias="e4m3"), mode="ptq")
    assert biased.mask is not None
    np.testing.assert_array_equal(biased(X), jc.nn.quantize(masked(), Rule(bias="e4m3"))(X))
    for dtype in (None, jnp.bfloat16):
        half, rule = masked(mask=0.3 * MASK, dtype=dtype), Rule(weight="int4(group=all)")
        packed = jc.nn.quantize(half, rule, mode="weight_only")
        np.testing.assert_array_equal(packed(X), jc.nn.quantize(half, rule)(X))


@pytest.mark.in_turn(9)
@pytest.mark.parametrize(
    ("kind", "half", "spec"),
    [
        (linen.Conv, 0.3, "int4(group=all)"),
        (linen.ConvTranspose, 1.0, "int8(group=8)"),
        (linen.ConvTranspose, 0.3, "int4(group=all)"),
        (linen.Conv, 1.0, "nf4"),
    ],
)
def test_a_masked_convolution_of_linen_is_packed_as_it_is_trained(kind: Any, half: float, spec: str) -> None:
    module = jc.nn.quantize(kind(4, (3,), mask=jnp.asarray(half * MASK)), Rule(weight=spec))
    variables = {"params": {"kernel": jnp.asarray(KERNEL), "bias": jnp.zeros(4)}}
    y, packed = module.apply(variables, X), module.pack(variables, X)
    np.testing.assert_array_equal(module.apply(packed, X), y)
    if kind is linen.Conv:  # a program rounds the parameter, and then masks it
        rounded = jc.dequantize(packed["params"]["kernel"]) * jnp.asarray(half * MASK)
        np.testing.assert_array_equal(
            y, linen.Conv(4, (3,)).apply({"params": {**variables["params"], "kernel": rounded}}, X)
        )


class Masked(linen.Module):
    """A convolution whose mask is made in the call."""

    numpy: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        mask = (np if self.numpy else jnp).tril((np if self.numpy else jnp).ones((3, 8, 4)))
        return linen.Conv(4, (3,), mask=mask)(x)


@further.first
def a_mask_may_be_made_in_the_call() -> None:
    for numpy in (False, True):
        module = jc.nn.quantize(Masked(numpy=numpy), Rule(weight="int4(group=all)"))
        variables = module.init(jax.random.key(0), X)
        np.testing.assert_array_equal(module.apply(module.pack(variables, X), X), module.apply(variables, X))


# -- wrappers of NNX ---------------------------------------------------------------------------------------------------

X2 = X.reshape(-1, 8)
INT4 = Rule(weight="int4(group=all)")


class Net(nnx.Module):
    def __init__(self, kind: Any) -> None:
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(2))
        self.normed = kind(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        more = {"update_stats": False} if isinstance(self.normed, nnx.SpectralNorm) else {}
        return self.normed(self.first(x), **more)


RULES = [Rule("normed/"), INT4]  # in newer versions of Flax WeightNorm has parameters of its own


@further
@pytest.mark.parametrize("kind", [nnx.SpectralNorm, nnx.WeightNorm])
def a_kernel_that_a_wrapper_normalizes_is_not_packed(kind: Any) -> None:
    model = Net(kind)
    rules = RULES if nnx.state(model.normed, lambda path, v: isinstance(v, nnx.Param) and "scales" in path) else [INT4]
    words = rf"{kind.__name__} at 'normed' normalizes kernel of its layer_instance.*mode='qat'.*layer_instance"
    for mode in ("ptq", "weight_only"):
        with pytest.raises(NotImplementedError, match=words):
            jc.nn.quantize(model, rules, mode=mode)  # type: ignore[arg-type]
    packed = jc.nn.quantize(model, [Rule("normed"), INT4], mode="ptq")
    np.testing.assert_array_equal(packed(X2), jc.nn.quantize(model, [Rule("normed"), INT4])(X2))


@pytest.mark.parametrize("kind", [nnx.SpectralNorm, pytest.param(nnx.WeightNorm, marks=pytest.mark.slow)])
def test_the_layer_of_a_wrapper_holds_the_normalized_kernel_after_a_call(kind: Any) -> None:
    model = Net(kind)
    y = model(X2)
    model.normed = model.normed.layer_instance
    np.testing.assert_array_equal(model(X2), y)
    packed = jc.nn.quantize(model, INT4, mode="ptq")
    np.testing.assert_array_equal(packed(X2), jc.nn.quantize(model, INT4)(X2))


def test_a_packed_program_normalizes_the_numbers_of_a_kernel() -> None:
    model = Net(nnx.SpectralNorm)
    trained, packed = (jc.nn.quantize(model, INT4, mode, inputs=(X2,)) for mode in ("qat", "ptq"))  # type: ignore[arg-type]
    np.testing.assert_array_equal(packed(X2), trained(X2))
    assert (packed(X2) != model(X2)).any()
    assert isinstance(packed.normed.layer_instance.kernel.get_value(), jc.QArray)


def what_the_wrapper_does_not_change_is_packed() -> None:
    model = Net(nnx.SpectralNorm)
    rule = Rule(bias="e4m3")
    packed = jc.nn.quantize(model, rule, mode="ptq")
    np.testing.assert_array_equal(packed(X2), jc.nn.quantize(model, rule)(X2))
    rows = jc.nn.quantize(model, INT4, "ptq", batches=[X2], return_report=True)[1].weights
    assert rows[0].path == "first/kernel" and rows[0].method == "clip, gptq" and rows[0].after > rows[0].before
    assert all(row.method == "nearest" for row in rows[1:]) and "no step by the inputs of one use" in rows[1].note


# -- wrappers of Linen -------------------------------------------------------------------------------------------------


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.b.kernel = self.a.kernel

    def __call__(self, x: Any) -> Any:
        return self.b(self.a(x))


def a_kernel_of_two_layers_is_packed_once() -> None:
    model = Tied()
    packed = jc.nn.quantize(model, INT4, mode="ptq")
    assert packed.a.kernel is packed.b.kernel
    np.testing.assert_array_equal(packed(X2), jc.nn.quantize(model, INT4)(X2))
    rules = [Rule("a", weight="e4m3"), INT4]
    apart = jc.nn.quantize(model, rules, mode="ptq")
    assert apart.a.kernel is not apart.b.kernel
    np.testing.assert_array_equal(apart(X2), jc.nn.quantize(model, rules)(X2))


@pytest.mark.parametrize(
    "check",
    [
        a_kernel_of_two_layers_is_packed_once,
        pytest.param(what_the_wrapper_does_not_change_is_packed, marks=pytest.mark.slow),
        pytest.param(a_mask_is_kept_if_no_kernel_is_packed_and_multiplied_once, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_what_is_packed_beside_what_is_not(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


class Wrapped(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(8)(x)
        if self.kind == "SpectralNorm":
            return linen.SpectralNorm(linen.Dense(4))(x, update_stats=False)
        if self.kind == "WeightNorm":
            return linen.WeightNorm(linen.Dense(4))(x)
        if self.kind == "remat":
            return linen.remat(Wrapped)("WeightNorm")(x)
        double = linen.map_variables(
            linen.Dense, "params", lambda v: jax.tree.map(lambda a: a - a.mean(), v), init=True, mutable=True
        )
        return double(4)(x)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("SpectralNorm", "Dense_1"),
        ("WeightNorm", "Dense_1"),
        ("map_variables", "Map_variablesDense_0"),
        pytest.param("remat", "CheckpointWrapped_0/Dense_1", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_of_linen_that_is_changed_is_packed_before(kind: str, path: str) -> None:
    module = Wrapped(kind)
    variables = module.init(jax.random.key(0), X2)
    low = jc.nn.quantize(module, INT4)
    packed = low.pack(variables, X2)
    assert isinstance(flatten_dict(packed["params"], sep="/")[f"{path}/kernel"], jc.QArray)
    np.testing.assert_array_equal(low.apply(packed, X2), low.apply(variables, X2))
    rules = [Rule(path + "/"), INT4]
    others = jc.nn.quantize(module, rules)
    np.testing.assert_array_equal(others.apply(others.pack(variables, X2), X2), others.apply(variables, X2))


@pytest.mark.in_turn(9)
@pytest.mark.parametrize("lift", ["remat", "jit", "scan"])
def test_a_kernel_in_a_transformation_is_packed(lift: str) -> None:
    class Step(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: None = None) -> Any:
            return linen.Dense(8)(x), None

    class Lifted(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            if lift == "scan":
                made = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            else:
                made = getattr(linen, lift)(Step)
            return made()(x, None)[0]

    module = jc.nn.quantize(Lifted(), INT4)
    variables = module.init(jax.random.key(0), X2)
    np.testing.assert_array_equal(module.apply(module.pack(variables, X2), X2), module.apply(variables, X2))


test_further = further.test()
