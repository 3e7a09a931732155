"""Gradients, `torch.func` and `torch.compile`: what JAX gives for the same numbers and words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch_bridge.tensors import array, same_bits

import jchop as jc

further = Further()

# torch makes an instance of its own class while it compiles, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

rounded = jc.torch.round_to_format
SEED, GRADIENT_SEED = 5, 6

#: The cotangent rounded, clipped and rounded with random bits both ways, and clipped under scales.
SPECS = (
    "e4m3:gradient=[e3m1:up]",
    "fixed2.3:stochastic:gradient=clipped+[e3m1:stochastic]",
    "int4(group=4,rule=half_range):gradient=clipped",
)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return 2 * torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator)


def expected_gradient(x: torch.Tensor, g: torch.Tensor, spec: str) -> jax.Array:
    keys = jax.random.key(SEED), jax.random.key(GRADIENT_SEED)
    rounding = lambda x: jc.round_to_format(x, spec, keys[0], gradient_key=keys[1])  # noqa: E731
    return jax.vjp(rounding, jnp.asarray(array(x)))[1](jnp.asarray(array(g)))[0]


def weighted(x: torch.Tensor, g: torch.Tensor, spec: str) -> torch.Tensor:
    """A number whose gradient by the rounded `x` is `g`."""
    return (rounded(x, spec, seed=SEED, gradient_seed=GRADIENT_SEED) * g).sum()


@further.first
@pytest.mark.parametrize("spec", [*SPECS[:-1], pytest.param(SPECS[-1], marks=pytest.mark.slow)])
def gradients_are_those_of_jax(spec):
    x, g = data()
    expected = expected_gradient(x, g, spec)
    leaf = x.clone().requires_grad_()
    weighted(leaf, g, spec).backward()
    assert leaf.grad is not None and same_bits(leaf.grad, expected)
    assert same_bits(grad(weighted)(x, g, spec), expected)
    compiled = torch.compile(weighted, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    result = compiled(leaf, g, spec)
    result.backward()
    assert torch.equal(result, weighted(x, g, spec)) and leaf.grad is not None and same_bits(leaf.grad, expected)
    rows = torch.stack([grad(weighted)(row.clone(), h, spec) for row, h in zip(x, g, strict=True)])
    for batched in (
        vmap(grad(weighted), (0, 0, None)),
        grad(lambda x, g, s: vmap(weighted, (0, 0, None))(x, g, s).sum()),
    ):
        assert torch.equal(batched(x, g, spec), rows)


def test_gradient_checks():
    """Straight through, the Jacobian is the identity; clipped, it is zero where a value overflows."""
    x = torch.tensor([0.3, 5.0, -7.0, 1.0], dtype=torch.float64)
    through = jacrev(lambda x: rounded(x, "fixed2.3"))(x)
    clipped = jacrev(lambda x: rounded(x, "fixed2.3:gradient=clipped"))(x)
    assert torch.equal(through, torch.eye(4, dtype=torch.float64))
    assert torch.equal(clipped, torch.diag(torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)))


def test_second_derivatives_are_those_of_the_estimator():
    """d²/dx² of round(x)³: the estimator takes round for the identity, at every order."""
    x = torch.tensor([0.3, 1.2, 9.0], requires_grad=True)
    for spec, mask in (("fixed2.3", [1.0, 1, 1]), ("fixed2.3:gradient=clipped", [1.0, 1, 0])):
        y = rounded(x, spec)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(second, 6 * y.detach() * torch.tensor(mask))


@further
def rows_under_vmap_are_rounded_as_if_alone():
    x, _ = data()
    for spec in ("e5m2:stochastic", "int4(group=3)"):
        rows = torch.stack([rounded(row.clone(), spec, seed=1) for row in x])
        assert torch.equal(vmap(lambda row, s=spec: rounded(row, s, seed=1))(x), rows)
    columns = torch.stack([rounded(column.clone(), "e5m2:up") for column in x.T], dim=1)
    assert torch.equal(vmap(lambda column: rounded(column, "e5m2:up"), 1, 1)(x), columns)
    cube = x.reshape(3, 2, 4)
    nested = vmap(vmap(lambda row: rounded(row, "e5m2:stochastic", seed=1)))(cube)
    assert torch.equal(nested[2, 1], rounded(cube[2, 1].clone(), "e5m2:stochastic", seed=1))


@further
def compiled_functions_follow_their_spec():
    """Specs, formats and texts are constants of the trace; another one is compiled anew. Errors come when traced."""
    compiled = torch.compile(lambda x, spec: rounded(x + 0, spec), fullgraph=True, backend="aot_eager")
    x, _ = data()
    for spec in (
        "e5m2",
        jc.Spec("e5m2", rounding="up"),
        jc.Spec("e4m3", rounding="down"),
        jc.formats.float8_e4m3fn,
        jc.formats.mxfp4,
    ):
        assert torch.equal(compiled(x, spec), rounded(x, spec))
    write = lambda x: jc.torch.round_to_format(x * 1, "e5m2", inplace=True)  # noqa: E731
    in_place = torch.compile(write, fullgraph=True, backend="aot_eager")
    assert torch.equal(in_place(x), rounded(x, "e5m2"))
    with pytest.raises(Exception, match="seed=, an integer"):
        compiled(x, "e5m2:stochastic")
    with pytest.raises(Exception, match="float32"):
        compiled(x.half(), "bfloat16")


def test_calls_on_arrays_of_jax_end_a_compiled_graph():
    """Codes and arrays are no values of a graph: such calls run between two graphs, and fullgraph refuses them."""

    def through_codes(x):
        codes, array = jc.torch.quantize(x * 3, "int4(group=all)"), jc.torch.as_jax(x + 1)
        return jc.torch.dequantize(codes) + jc.torch.as_tensor(array) * jc.torch.dequantize(packed.as_qarray())

    x, _ = data()
    packed = jc.torch.PackedTensor(jc.torch.quantize(x, "nf4"))
    assert torch.equal(torch.compile(through_codes, backend="eager")(x), through_codes(x))
    whole = torch.compile(lambda x: jc.torch.quantize(x, "int4(group=all)"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Skip calling"):
        whole(x)


def test_the_operators_pass_torch_s_own_checks():
    x, g = data()
    words = torch.tensor([0, 3], dtype=torch.int32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.jchop.round_to_format.default, (x, words, "e5m2:stochastic", 0, False), {}, test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.jchop.within_range.default, (g, x, words, "e5m2:stochastic", 0), {}, test_utils=checks
    )


def test_autocast_leaves_the_dtype():
    x, _ = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rounded(x, "e5m2").dtype == torch.float32
        assert rounded(x @ x.T, "e5m2").dtype == torch.bfloat16
        assert jc.torch.matmul(x, x.T, "e5m2", copy=True).dtype == torch.float32


def test_a_model_of_rounded_weights_under_vmap_and_grad():
    """Gradients of each sample, as `torch.func` makes them."""
    model = torch.nn.Linear(8, 2)
    x, _ = data()

    def loss(parameters, sample):
        low = {name: rounded(p, "e4m3:gradient=clipped", copy=True) for name, p in parameters.items()}
        return functional_call(model, low, (sample,)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(loss), (None, 0))(parameters, x)
    for i, sample in enumerate(x):
        alone = grad(loss)(parameters, sample)
        for name in alone:
            torch.testing.assert_close(each[name][i], alone[name])


def squares(a: torch.Tensor, b: torch.Tensor, spec: jc.MatmulSpec) -> torch.Tensor:
    return (jc.torch.matmul(a, b, spec, seed=3) ** 2).sum()


def test_matmul_has_the_bits_and_gradients_of_jax():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((2, 3), (3, 4)))
    spec = jc.MatmulSpec("e4m3", accumulate="e5m10:stochastic", order="matrix_unit(3)")
    key = jax.random.key(3)
    out, pull = jax.vjp(lambda x, y: jc.math.matmul(x, y, spec, key), jnp.asarray(array(a)), jnp.asarray(array(b)))
    da, db = pull(2 * out)
    assert same_bits(jc.torch.matmul(a, b, spec, seed=3), out)
    assert same_bits(jc.torch.matmul(a.T.contiguous().T, b.T.contiguous().T, spec, seed=3), out)
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    squares(*leaves, spec).backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert same_bits(leaves[0].grad, da) and same_bits(leaves[1].grad, db)  # type: ignore[arg-type]
    assert all(same_bits(x, y) for x, y in zip(grad(squares, (0, 1))(a, b, spec), (da, db), strict=True))
    first = grad(squares)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad(lambda a: first(a, b, spec).sum())(a)


@further
def matmul_is_compiled_and_mapped():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 5), (5, 4)))
    spec = jc.MatmulSpec("e4m3", accumulate="e5m10:stochastic", order="matrix_unit(3)")
    compiled = torch.compile(squares, fullgraph=True, backend="aot_eager")
    leaf = a.clone().requires_grad_()
    compiled(leaf, b, spec).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, grad(squares)(a, b, spec))
    each = vmap(grad(squares), (0, None, None))(a, b, spec)
    assert torch.equal(each[1], grad(squares)(a[1].clone(), b, spec))
    rows = vmap(lambda a: jc.torch.matmul(a, b, spec, seed=3))(a)
    assert torch.equal(rows[1], jc.torch.matmul(a[1].clone(), b, spec, seed=3))


def test_matmul_knows_the_shape_of_its_result():
    """Without numbers, as `torch.compile` traces it: that of torch's own product."""
    shapes = [((3, 4), (4,)), ((4,), (4,)), ((4,), (4, 2)), ((5, 1, 3, 4), (2, 4, 6))]
    with FakeTensorMode():
        for a, b in ((torch.empty(a), torch.empty(b)) for a, b in shapes):
            assert jc.torch.matmul(a, b, "e5m2").shape == torch.matmul(a, b).shape, (a.shape, b.shape)
        for other in ((3,), ()):
            with pytest.raises(ValueError, match=r"a has shape \(3, 4\) and b has shape"):
                jc.torch.matmul(torch.empty(3, 4), torch.empty(other), "e5m2")


@further
def matmul_of_other_shapes_and_dtypes():
    ones = torch.ones(100)
    assert jc.torch.matmul(ones, ones, jc.MatmulSpec(accumulate="e5m2")).item() == 8
    wide = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    assert same_bits(
        jc.torch.matmul(wide, wide[0].clone(), "tf32"), jc.math.matmul(array(wide), array(wide)[0], "tf32")
    )
    with pytest.raises(TypeError, match=r"float32.*float64"):
        jc.torch.matmul(wide.float(), wide, "e5m2")
    with pytest.raises(ValueError, match="copy=True"):
        jc.torch.matmul(wide[:, ::2], wide.T[::2], "e5m2")
    with pytest.raises(ValueError, match="seed="):
        jc.torch.matmul(ones, ones, "e5m2:stochastic")
    with pytest.raises(ValueError, match="of one length"):
        jc.torch.matmul(wide, wide, "e5m2")


@further
def quantize_and_dequantize():
    x, _ = data()
    for spec in ("e5m2:stochastic", "binary32"):
        q = jc.torch.quantize(x, spec, seed=2)
        theirs = jc.quantize(jnp.asarray(array(x)), spec, jax.random.key(2))
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(theirs), strict=True))
        numbers = jc.torch.dequantize(q)
        assert torch.equal(numbers, rounded(x, spec, seed=2))
        numbers.zero_()  # has memory of its own
        assert torch.equal(jc.torch.dequantize(q), rounded(x, spec, seed=2))
    low = jc.torch.dequantize(jc.quantize(array(x), "e5m2"), torch.float16)  # leaves of NumPy
    assert low.dtype == torch.float16
    with pytest.raises(TypeError, match="dtype"):
        jc.torch.dequantize(q, torch.int8)
    with pytest.raises(ValueError, match="copy=True"):
        jc.torch.quantize(x.T, "e5m2")


test_further = further.test()
