"""The bits of every public function are the same whatever the settings of JAX that a user may have turned on."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from further import Further

import jchop as jc
from jchop import matlab
from jchop._storage import fit_half_quadratic
from jchop.compat import piquant, pychop
from jchop.compat.qtorch import quant as qtorch

further = Further()

# Each builds its context anew, as a context manager serves once.
CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "disable_jit": lambda: jax.disable_jit(True),
    "strict_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "tracer_leaks": lambda: jax.checking_leaks(),
    "threefry": lambda: jax.threefry_partitionable(False),
}


@contextlib.contextmanager
def together() -> Iterator[None]:
    """All that need no other compiled code, and none for each call as a search for leaks does."""
    with contextlib.ExitStack() as stack:
        for name in ("strict_promotion", "rank_promotion", "threefry"):
            stack.enter_context(CONFIGURATIONS[name]())
        yield


#: For the many cases: fewer configurations, of which each case has one.
FEWER = {"disable_jit": CONFIGURATIONS["disable_jit"], "debug_nans": CONFIGURATIONS["debug_nans"], "together": together}

ROWS = 2 * np.sin(np.arange(96, dtype=np.float32)).reshape(3, 32)
TEXTS = [
    "e5m2",
    "bfloat16:up",
    "fixed3.4:odd",
    "integer8",
    "nf4",
    "e4m3fn:stochastic:saturate",
    "bfloat16:stochastic_equal",
    "int4(group=16)",
    "int4(channel=0)",
    "mxfp4",
    "nvfp4",
    "nf4(group=32)",
    "uint8(group=16,zero_point=float)",
    "int8(group=16):stochastic",
    "nf4(scale=uint8(group=2,zero_point=float),group=8)",
]


def key() -> jax.Array:
    return jax.random.key(7)


def x() -> jax.Array:
    return jnp.asarray(ROWS)


# A name for each case, and what it works out: a pytree of arrays.
CASES: dict[str, Callable[[], Any]] = {}
QUICK: list[str] = []


def case(name: str, quick: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(work: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = work
        if quick:
            QUICK.append(name)
        return work

    return note


for text in TEXTS:
    quick = text in ("e4m3fn:stochastic:saturate", "mxfp4")
    case(f"round {text}", quick)(lambda text=text: jc.round_to_format(x(), text, key()))
for text in ("bfloat16:up", "nf4", "e4m3fn:stochastic:saturate", "nvfp4", "int8(group=16):stochastic"):
    case(f"round numpy {text}")(lambda text=text: jc.round_to_format(ROWS, text, key()))
    case(f"round jit {text}")(lambda text=text: jax.jit(lambda x, key: jc.round_to_format(x, text, key))(x(), key()))
for text in [text for text in TEXTS if "(" in text]:
    case(f"store {text}", text.startswith("int4(group"))(
        lambda text=text: (lambda q: (q.qvalue, q.scale, jc.dequantize(q)))(jc.quantize(x(), text, key()))
    )
for dtype in ("float16", "bfloat16", "float64", "complex64"):
    case(f"round {dtype}")(lambda dtype=dtype: jc.round_to_format(ROWS.astype(dtype), "e4m3:stochastic", key()))


@case("round gradient")
def round_gradient() -> Any:
    def loss(x: jax.Array) -> jax.Array:
        y = jc.round_to_format(x, "e4m3fn:stochastic:saturate:gradient=clipped", key())
        z = jc.round_to_format(y, "bfloat16:gradient=[e5m2:stochastic]", gradient_key=jax.random.key(8))
        return jnp.sum(jnp.sin(z))

    return jax.value_and_grad(loss)(300 * x())


@case("round scaled gradient")
def round_scaled_gradient() -> Any:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jc.round_to_format(x, "int4(group=16):gradient=clipped")))

    return jax.value_and_grad(loss)(x()), jax.jvp(loss, (x(),), (x(),))


@case("round vmap, scan and offsets")
def round_transformed() -> Any:
    keys = jax.random.wrap_key_data(jnp.arange(6, dtype=jnp.uint32).reshape(3, 2))
    rows = jax.vmap(lambda x, key: jc.round_to_format(x, "e5m2:stochastic", key))(x(), keys)
    _, scanned = jax.lax.scan(lambda c, x: (c, jc.round_to_format(x, "mxfp4")), 0, x())
    part = jc.round_to_format(x()[1:], "e5m2:stochastic", key(), offset=((1, 0), (3, 32)))
    return rows, scanned, part, jc.random_bits(key(), (5,), offset=jnp.int32(3)), jc.random_bits(key(), (2,))


@case("infinities and the largest values", quick=True)
def overflows() -> Any:
    values = np.array([1.0, -1e30, 3.4e38, 0.0, 1e-40], np.float32)
    return [jc.round_to_format(values, text) for text in ("e4m3fn:saturate", "e5m2", "e8m0fnu:saturate")]


@case("flips")
def flips() -> Any:
    return jc.flip_bits(x(), "e4m3", 0.3, key()), jc.flip_bits(ROWS, "integer8:stochastic", 0.3, key(), where="code")


@case("fit")
def fit() -> Any:
    q = jc.quantize(x(), "int4(group=16)")
    affine = "uint4(group=16,zero_point=float)"
    return (
        [jc.fit_scale(x(), f"int4(group=16,rule={rule})") for rule in ("absmax", "mse")],
        fit_half_quadratic(x(), affine),
        q[1:],
        q.T,
        q.reshape(3, 2, 16),
    )


REDUCTIONS = {"cumprod", "cumsum", "logsumexp", "max", "mean", "min", "norm", "prod", "std", "sum", "var"}
SEVERAL_OPERANDS = {"axpy", "conv", "cross", "dot", "einsum", "inner", "interp", "linspace", "matmul", "outer"}
SEVERAL_OPERANDS |= {"softmax", "tensordot", "trace", "vdot", "where"}
ELSEWHERE = SEVERAL_OPERANDS | {"linalg", "diff", "frexp", "ldexp", "modf", "matmul_double"}

for name in jc.math.__all__:
    if name in ELSEWHERE:
        continue
    function = getattr(jc.math, name)
    if name in REDUCTIONS:
        spec = ("bfloat16", "e5m2:stochastic")[sorted(REDUCTIONS).index(name) % 2]
        case(f"math.{name} {spec}")(
            lambda function=function, spec=spec, name=name: (
                function(x() / 2, spec, key(), axis=1),
                # The derivative of a running product is a program of JAX, and has other bits op by op.
                () if name == "cumprod" else jax.grad(lambda x: function(x, spec, key(), axis=1).sum())(x() / 2),
            )
        )
        continue
    count = list(inspect.signature(function).parameters).index("spec")

    def elementwise(name: str = name, function: Any = function, count: int = count) -> Any:
        a = jnp.abs(x()) / 2.3 + 0.05
        a = jnp.ceil(a) if name.startswith("bitwise") else a  # NaN for other numbers, which debug_nans refuses
        a = a + 1 if function is jc.math.arccosh else a
        operands = [a, a + a, a * a][:count]
        low = function(*operands, "bfloat16:stochastic", key())
        if function is jc.math.fma or not jnp.issubdtype(low.dtype, jnp.floating):
            return low
        if name in ("gelu", "tanh"):  # whose derivatives are programs of JAX, and have other bits op by op
            return low
        return low, jax.grad(lambda *o: jnp.sum(function(*o, "bfloat16")))(*operands)

    case(f"math.{name}", name == "exp")(elementwise)


@case("math parts")
def math_parts() -> Any:
    return (
        jc.math.diff(x(), "bfloat16"),
        jc.math.frexp(x(), "bfloat16"),
        jc.math.ldexp(x(), jnp.int32(3), "bfloat16"),
        jc.math.modf(x(), "bfloat16"),
        jc.math.matmul_double((x(), x() / 2**30), (x().T, x().T / 2**30)),
        jc.math.add(x(), 0.001, "bfloat16:stochastic", key()),
        jc.math.divide(ROWS, ROWS[0] + 3, "bfloat16"),
        jc.math.mean(ROWS.astype(np.float16), "e5m2"),
    )


@case("math of several operations")
def math_composed() -> Any:
    drawn = ("bfloat16:stochastic", key())
    return (
        jc.math.softmax(ROWS, *drawn),
        jc.math.cross(ROWS[:, :3], ROWS[0, :3], *drawn),
        jc.math.interp(ROWS, ROWS[0, :3] * 0 + np.arange(3), ROWS[1, :3], *drawn),
        jc.math.linspace(ROWS[0], 1, *drawn, num=3),
        jc.math.where(np.arange(2) > 0, 1.5, ROWS[:, :2], *drawn),
        jc.math.einsum("ij,kj,kl->l", ROWS, ROWS, ROWS, spec=drawn[0], key=drawn[1]),
        jc.math.tensordot(ROWS, ROWS.T, *drawn, axes=1),
        jc.math.trace(ROWS, *drawn),
        jc.math.round(ROWS, *drawn, decimals=2),
    )


@case("math products")
def math_products() -> Any:
    spec = jc.MatmulSpec(operands="e4m3", product="e5m10", accumulate="e5m10:stochastic")
    gradient = jax.grad(lambda x: jnp.sum(jc.math.matmul(x, x.T, spec, key())))
    return jc.math.matmul(x(), x().T, "e5m10:stochastic", key()), gradient(x())


@case("math contractions")
def math_contractions() -> Any:
    image = x().reshape(1, 3, 4, 8)
    return (
        jc.math.dot(x(), x()[0], "bfloat16"),
        jc.math.einsum("ij,kj->ik", x(), x(), spec="e5m10:stochastic", key=key()),
        jc.math.axpy(2.0, x(), x(), "bfloat16"),
        jc.math.conv(image, x().reshape(-1)[:54].reshape(2, 3, 3, 3), "bfloat16"),
        jc.math.matmul(ROWS.astype(np.float64), ROWS.astype(np.float64).T, "e8m30"),
        jc.math.matmul(x(), x().T, jc.MatmulSpec(accumulate="e5m2", order="pairwise")),
        jc.math.matmul(x(), x().T, jc.MatmulSpec(accumulate="e5m2", order=jc.Order("blocked", 4))),
    )


A = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, -1.0], [0.5, -1.0, 5.0]], np.float32)
B = np.array([5.0, 4.0, 3.0], np.float32)


@case("linalg")
def linalg() -> Any:
    a, b, spec, low = jnp.asarray(A), jnp.asarray(B), "bfloat16:stochastic", jc.math.linalg
    return (
        low.lu_solve(low.lu(a, spec, key()), b, spec, key()),
        low.cholesky(a, spec, key()),
        low.qr(a, spec, key()),
        low.solve_triangular(jnp.tril(a), b, spec, key(), lower=True),
        low.cg(a, b, spec, key(), maxiter=2),
        low.gmres(a, b, spec, key(), restart=2, maxiter=1),
        low.refine(A, B, factor="float8_e4m3", working="bfloat16", residual="e8m16", steps=2),
    )


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with jax.named_scope("softmax"):
        weights = jax.nn.softmax(q @ k.T)
    return weights @ v


def control(x: jax.Array) -> Any:
    c, ys = jax.lax.scan(lambda c, row: (c * jnp.float32(0.5) + row, jnp.sin(c)), jnp.zeros(32), x)
    w = jax.lax.while_loop(lambda s: jnp.max(s) > 0.1, lambda s: s * jnp.float32(0.5), jnp.abs(c))
    d = jax.lax.cond(jnp.sum(w) > 1.0, jnp.cos, jnp.sin, w)
    f = jax.lax.fori_loop(0, 3, lambda i, s: s + jnp.exp(-s), d)
    return ys, w, d, f, jnp.sort(x, 1), jnp.linalg.solve(jnp.asarray(A), jnp.asarray(B))


@case("emulate attention")
def emulate_attention() -> Any:
    return jc.emulate(attention, "bfloat16:stochastic")(x(), x(), x(), key=key())


for text in ("bfloat16", "e5m10:stochastic"):
    case(f"emulate control {text}")(lambda text=text: jc.emulate(control, text)(x(), key=key()))


def lorenz(s: jax.Array) -> jax.Array:
    x, y, z = s
    return s + jnp.float32(0.01) * jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - jnp.float32(2.5) * z])


@case("emulate", quick=True)
def emulate_lorenz() -> Any:
    return jc.emulate(lorenz, "bfloat16:stochastic")(jnp.ones(3), key=key())


@case("emulate more")
def emulate_more() -> Any:
    rules = {"softmax": None, "dot_general": jc.MatmulSpec(accumulate="e6m9")}
    low = jc.emulate(attention, "bfloat16", rules=rules)
    return (
        low(x(), x(), x()),
        jax.jit(low)(x(), x(), x()),
        jax.grad(lambda x: jnp.sum(low(x, x, x)))(x()),
        jc.emulate(lorenz, "e5m10")(jnp.ones(3)),
        jc.emulate(lorenz, "bfloat16")(jnp.ones(3)),
        jc.emulate(jnp.var, "e5m10", accumulate=jc.MatmulSpec(accumulate="e5m10"))(x()),
        jc.emulate(jnp.cumsum, "bfloat16")(x()),
    )


@case("emulate report")
def emulate_report() -> Any:
    rows = jc.emulate(attention, "bfloat16").report(x(), x(), x(), trace_values=True).rows
    return [np.array([row.results, row.overflows, row.largest, row.error or 0.0], float) for row in rows]


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.up = nnx.Linear(32, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(x.reshape(1, 3, 32, 1)).mean(-1).reshape(3, 32)
        return self.attention(nnx.relu(self.norm(self.up(y)))[None])


@functools.cache
def weights() -> Any:
    """Numbers that no configuration reaches."""
    state = nnx.state(Net(rngs=nnx.Rngs(0)), nnx.Param)
    return jax.tree.map(lambda a: 0.3 * np.cos(np.arange(a.size, dtype=np.float32)).reshape(a.shape), state)


def net() -> Net:
    model = Net(rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(jnp.asarray, weights()))
    return model


def outcome(model: Any) -> Any:
    return model(x()), nnx.to_pure_dict(nnx.grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x()))


@case("nn small", quick=True)
def nn_small() -> Any:
    layer = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
    layer.kernel[...] = 0.3 * jnp.cos(jnp.arange(256.0)).reshape(32, 8)
    return outcome(jc.nn.quantize(layer, jc.Rule(weight="int4(group=all)", activation="int8(group=all)")))


def whole(weight: str, mode: str = "qat", **more: Any) -> Any:
    rules = [
        jc.Rule("norm", weight="bfloat16"),
        jc.Rule("conv", weight=weight),
        jc.Rule("up", weight=weight, **more),
        jc.Rule("attention/query", weight=weight),
    ]
    return outcome(jc.nn.quantize(net(), rules, mode=mode, rngs=nnx.Rngs(rounding=0) if "gradient" in more else None))


case("nn int4 qat")(lambda: whole("int4(group=all)", activation="int8(group=all)"))
case("nn int4 ptq")(lambda: whole("int4(group=all)", "ptq", activation="int8(group=all)"))
case("nn int4 weight_only")(lambda: whole("int4(group=all)", "weight_only"))
case("nn mx")(lambda: whole("mxfp4", activation="mxfp8_e4m3", gradient="mxfp8_e4m3:stochastic"))
case("nn matmul")(lambda: whole("bfloat16", matmul=jc.MatmulSpec(accumulate="e5m10")))


@case("nn stochastic and calibrated")
def nn_stochastic_and_calibrated() -> Any:
    rngs = nnx.Rngs(rounding=jax.random.key(3))
    noisy = jc.nn.quantize(net(), jc.Rule("up", weight="int4(group=all):stochastic"), rngs=rngs)
    rule = jc.Rule("up", weight="int4(group=all)", activation="int8(group=tensor)", scale_from=jc.LSQ())
    learned = jc.nn.calibrate(jc.nn.quantize(net(), rule), [x()], method="mse")
    return outcome(noisy), outcome(learned)


@case("linen")
def linen_tower() -> Any:
    tower = jc.nn.quantize(linen.Dense(8), jc.Rule(weight="nf4(group=all)", activation="e5m2:stochastic"))
    kernel = 0.3 * jnp.cos(jnp.arange(256.0)).reshape(32, 8)
    variables = {"params": {"kernel": kernel, "bias": jnp.zeros(8)}}
    rngs = {"rounding": jax.random.key(1)}
    packed = tower.pack(variables, x(), rngs=rngs)
    gradient = jax.grad(lambda v: jnp.sum(tower.apply(v, x(), rngs=rngs)))
    return tower.apply(variables, x(), rngs=rngs), tower.apply(packed, x(), rngs=rngs), gradient(variables)


def steps(tx: optax.GradientTransformation, dtype: str = "float32") -> Any:
    p = {"w": 0.1 * jnp.cos(jnp.arange(512.0)).reshape(2, 256).astype(dtype), "b": jnp.ones(5, dtype)}
    state = tx.init(p)
    for _ in range(2):
        grads = jax.tree.map(lambda a: (jnp.sin(a.astype(jnp.float32)) + jnp.float32(0.1)).astype(a.dtype), p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return p


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adamw8bit": lambda: jc.optim.adamw8bit(1e-2),
    "adamw4bit": lambda: jc.optim.adamw4bit(1e-2),
    "adamw_fp8": lambda: jc.optim.adamw_fp8(1e-2),
    "lion8bit": lambda: jc.optim.lion8bit(1e-2),
    "sgd8bit": lambda: jc.optim.sgd8bit(1e-2, momentum=0.9),
    "chunks": lambda: jc.optim.adamw8bit(1e-2, chunks=2),
    "round": lambda: optax.chain(
        jc.optim.round_updates("e5m2:stochastic", key()),
        optax.sgd(0.1),
        jc.optim.round_updates("fixed1.7:stochastic", key()),
        jc.optim.round_params("bfloat16:stochastic", key()),
    ),
    "compensate": lambda: optax.chain(optax.sgd(0.1), jc.optim.compensate("bfloat16")),
    "error feedback": lambda: optax.chain(jc.optim.error_feedback("int4(group=16)"), optax.sgd(0.1)),
    "low precision": lambda: jc.optim.low_precision(
        optax.sgd(0.1, momentum=0.9), weight="e5m2", gradient="e5m2", momentum="e6m9:stochastic",
        accumulator="e6m9:stochastic", gradient_scale=1 / 1000, key=key(),
    ),
    "skip": lambda: jc.optim.skip_nonfinite(optax.adam(0.1)),
    "loss scale": lambda: jc.optim.dynamic_loss_scale(optax.sgd(0.1)),
    "state": lambda: jc.optim.quantize_state(optax.adam(0.1), "bfloat16:stochastic", key()),
    "average": lambda: optax.chain(optax.sgd(0.1), jc.optim.average_params(spec="bfloat16:stochastic", key=key())),
}  # fmt: skip
for name, make in TRANSFORMATIONS.items():
    case(f"optim {name}", name == "adamw8bit")(lambda make=make: steps(make()))


@case("optim packed parameters")
def optim_packed() -> Any:
    packed = {"w": jc.quantize(x(), "int8(channel=0):stochastic", key())}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(jc.dequantize(packed))
    return jc.optim.apply_updates(packed, grads, key())


@case("faces")
def faces() -> Any:
    noisy = pychop.Chop(5, 2, rmode=5)
    scale, zero = piquant.compute_quant_params(ROWS, "uint4")
    return (
        pychop.Chop(5, 2)(ROWS),
        noisy(x(), key=key()),
        pychop.Chopf(4, 4)(ROWS),
        qtorch.float_quantize(ROWS, 5, 2, key=key()),
        qtorch.block_quantize(ROWS, wl=4, rounding="nearest"),
        piquant.quantize(ROWS, "uint4", scale=scale, zero_point=zero),
        matlab.chop(ROWS, {"format": "h"}),
    )


@case("torch")
def torch_face() -> Any:
    torch = pytest.importorskip("torch")
    w = torch.tensor(ROWS, requires_grad=True)
    jc.torch.round_to_format(w, "fixed3.4:gradient=clipped").sum().backward()
    low = jc.torch.round_to_format(torch.tensor(ROWS), "e5m2:stochastic", seed=7)
    return low.numpy(), w.grad.numpy()


# -- the comparison ----------------------------------------------------------------------------------------------------


def bits(tree: Any) -> list[np.ndarray]:
    arrays = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return [array.view(f"u{array.dtype.itemsize}") if array.dtype.kind not in "cOb" else array for array in arrays]


@functools.cache
def plain(name: str) -> list[np.ndarray]:
    return bits(CASES[name]())


def bias_correction(moment: Any, decay: float, count: jax.Array) -> Any:
    correction = 1 - jnp.float32(decay) ** count.astype(jnp.float32)
    return jax.tree.map(lambda t: t / correction.astype(t.dtype), moment)


@pytest.fixture(autouse=True)
def uncompiled_bias_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optax compiles the bias correction of Adam by itself, with other bits than op by op: under ``jax_disable_jit``
    plain ``optax.adamw`` gives others, too. And it mixes dtypes there, which strict promotion refuses.
    """
    monkeypatch.setattr(optax.tree, "bias_correction", bias_correction)


def check(name: str, configuration: str) -> None:
    try:
        expected = plain(name)
        with (CONFIGURATIONS | FEWER)[configuration]():
            found = bits(CASES[name]())
        assert expected and len(expected) == len(found)
        for number, (want, got) in enumerate(zip(expected, found, strict=True)):
            np.testing.assert_array_equal(want, got, err_msg=f"result {number}")
    except Exception as error:
        error.add_note(f"the case {name!r} under {configuration!r}")
        raise


@further.first
@pytest.mark.in_turn(100)
@pytest.mark.parametrize("name", QUICK)
def bits_are_the_same(name: str) -> None:
    for configuration in CONFIGURATIONS:
        check(name, configuration)


def group_of(name: str) -> str:
    """Of a case that is not quick: the first word, and of functions of `jchop.math` also a part of the alphabet."""
    word, _, rest = name.replace(".", " ").partition(" ")
    if word != "math":
        return word
    return "math a-e" if rest < "f" else "math f-m" if rest < "n" else "math n-z"


GROUPS: dict[str, list[str]] = {}
for name in CASES:
    if name not in QUICK:
        GROUPS.setdefault(group_of(name), []).append(name)


@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    "work",
    [
        lambda: jc.round_to_format(jnp.float32(1e9), "e4m3fn"),
        lambda: jc.round_to_format(np.float32(1e9), "e4m3fn"),
        lambda: jc.math.sqrt(np.float32(-1.0), "bfloat16"),
        lambda: jc.emulate(jnp.log, "bfloat16")(jnp.float32(-1.0)),
    ],
)
def test_a_result_that_is_nan_is_an_error_of_jax(work: Callable[[], Any]) -> None:
    assert np.isnan(np.asarray(work())).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        work()


@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    "fun", [jax.nn.softmax, lambda x: jnp.max(x, initial=-jnp.inf), lambda x: jnp.max(x, where=x > 1, initial=-jnp.inf)]
)
def test_an_infinity_of_the_program_itself_is_no_error(fun: Callable[..., Any]) -> None:
    """As in JAX: a maximum begins with -inf. A result that is infinite is an error."""
    low, x = jc.emulate(fun, "bfloat16"), jnp.arange(4.0)
    with jax.debug_infs(True):
        np.testing.assert_array_equal(low(x), jax.jit(low)(x))
        with pytest.raises(FloatingPointError, match="inf"):
            jc.emulate(jnp.exp, "bfloat16")(x * 1e3)


@pytest.mark.in_turn(40)
@pytest.mark.parametrize("group", sorted(GROUPS, key=lambda group: group != "flips"))
def test_bits_are_the_same_for_the_rest(group: str) -> None:
    """Each case under one of the configurations."""
    for i, name in enumerate(GROUPS[group]):
        check(name, [*FEWER][(i + i // 3) % 3])  # they come in threes, so the next three begin with the next


test_further = further.test()
