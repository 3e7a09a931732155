"""Digests of about 2,000 calls of jchop: what two versions of the package, or two versions of JAX, must have in common.

    python tests/digests.py write old.json               all calls, one line of progress for every hundred
    python tests/digests.py write old.json --part 1/4    a quarter of them
    python tests/digests.py compare old.json new.json    the calls whose bits differ; exit status 1 if there are any

A call is named by what it does, never by its number, so the lists of two versions need not be the same. An error is
digested by its type. The inputs are those of the value tests: ties, subnormal numbers, overflow, infinities, NaN.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import cases  # noqa: E402
import cases_scaled  # noqa: E402
import emulate_cases  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import jchop as jc  # noqa: E402

Call = tuple[str, Callable[[], Any]]
KEY = jax.random.key(20240229)
DETERMINISTIC = [mode.value for mode in jc.Rounding if not mode.stochastic]
STOCHASTIC = [mode.value for mode in jc.Rounding if mode.stochastic]
MODES = DETERMINISTIC + STOCHASTIC


def digest(result: Any) -> str:
    """Of the bits, shapes and dtypes of all leaves. Every NaN counts as the same."""
    hasher = hashlib.sha256()
    leaves = jax.tree.leaves(result)
    for leaf in leaves:
        if isinstance(leaf, str | bytes):
            hasher.update(leaf.encode() if isinstance(leaf, str) else leaf)
            continue
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.array(leaf)
        if array.dtype.name in ("float16", "bfloat16", "float32", "float64"):
            with np.errstate(invalid="ignore"):
                array[np.isnan(array)] = np.nan
        hasher.update(f"{array.dtype} {array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    hasher.update(str(len(leaves)).encode())
    return hasher.hexdigest()[:16]


def outcome(call: Callable[[], Any]) -> str:
    try:
        return digest(jax.block_until_ready(call()))
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"error {type(error).__name__}"


def key_for(text: str) -> jax.Array | None:
    return KEY if "stochastic" in text else None


def rng_for(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# -- rounding ----------------------------------------------------------------------------------------------------------


def hard(text: str, carrier: str, count: int = 2048) -> np.ndarray:
    tables = {**cases.NAMED, **cases.CUSTOM, **cases.P3109, **cases.WIDE, **cases.DOUBLE, **cases.FIXED}
    return cases.adversarial(tables.get(text, cases.NAMED["float8_e5m2"]), carrier, count, rng_for(text + carrier))


def rounding_calls() -> Iterator[Call]:
    texts = [*cases.NAMED, *cases.CUSTOM, *cases.P3109, *cases.WIDE, *cases.FIXED, "codebook(-3,-1,0,0.5,8)"]
    carriers = itertools.cycle(["float32", "float32", "float64", "bfloat16", "float32", "float16"])
    overflows = itertools.cycle(["ieee", "saturate", "propagate", "ieee"])
    for text, mode in itertools.product(texts, MODES):
        carrier, spec = next(carriers), f"{text}:{mode}:{next(overflows)}"
        if text in cases.WIDE or (carrier == "float16" and not text.startswith(("float4", "float6", "float8_e4m3"))):
            carrier = "float64"
        yield (
            f"round {spec} {carrier}",
            lambda spec=spec, text=text, carrier=carrier: jc.round_to_format(hard(text, carrier), spec, key_for(spec)),
        )
    for text, mode in itertools.product(texts, ("nearest_even", "odd", "stochastic")):
        spec = f"{text}:{mode}"
        yield (
            f"round {spec} jit",
            lambda spec=spec, text=text: jax.jit(lambda x: jc.round_to_format(x, spec, key_for(spec)))(
                jnp.asarray(hard(text, "float32"))
            ),
        )
    for text, mode in itertools.product(cases.DOUBLE, MODES):
        spec = f"{text}:{mode}"
        yield (
            f"round {spec} float64",
            lambda spec=spec, text=text: jc.round_to_format(hard(text, "float64"), spec, key_for(spec)),
        )
    for text in ("bfloat16:flush", "e5m10:flush:up", "fixed4.4:wrap", "fixed4.4:stochastic:wrap"):
        yield (
            f"round {text}",
            lambda text=text: jc.round_to_format(hard(text.split(":")[0], "float32"), text, key_for(text)),
        )
    for text, bits in itertools.product(("bfloat16", "float8_e4m3fn", "fixed4.4"), (1, 4, 11, 24)):
        for mode in STOCHASTIC[:3]:
            spec = jc.Spec(text, rounding=mode, random_bits=bits)
            yield (
                f"round {spec} jax",
                lambda spec=spec, text=text: jc.round_to_format(jnp.asarray(hard(text, "float32")), spec, KEY),
            )


def gradient_calls() -> Iterator[Call]:
    specs = ("bfloat16", "e4m3fn:saturate", "fixed4.4", "mxfp8_e4m3", "int4(group=32)", "nf4", "nvfp4")
    for text, gradient in itertools.product(specs, ("", ":gradient=clipped", ":gradient=e5m2")):

        def derivatives(text: str = text + gradient) -> Any:
            x = jnp.asarray(rng_for(text).standard_normal((4, 64)) * 30, jnp.float32)
            y, vjp = jax.vjp(lambda x: jc.round_to_format(x, text), x)
            return y, vjp(x * 0.37), jax.jvp(lambda x: jc.round_to_format(x, text), (x,), (x,))

        yield f"gradient {text}{gradient}", derivatives


# -- scaled formats ----------------------------------------------------------------------------------------------------

SCALED_NAMES = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nf4", "dynamic8", "udynamic8",
    "dynamic4", "bfp8(group=16)", "bfp4(group=tensor)", "nf4(scale=int8(group=4))",
    "nf4(scale=uint8(group=4,zero_point=float))",
)  # fmt: skip
ELEMENTS = ("int8", "int4", "int2", "uint8", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "fixed4.4",
            "float6_e2m3fn", "e3m2", "codebook(-1,-0.5,0,0.25,1)")  # fmt: skip
GROUPINGS = ("group=32", "group=7", "group=all", "channel=0", "channel=-1", "group=tensor", "group=16,axis=0",
             "group=(2,16)", "group=(all,8)")  # fmt: skip
SCALES = ("binary32", "bfloat16", "binary16", "float8_e8m0fnu", "float8_e4m3fn", "e5m3")
RULES = ("absmax", "floor", "ceil", "even", "rceil", "half_range", "no_clip", "two_level", "minmax", "mse",
         "percentile(99)")  # fmt: skip


def scaled_texts() -> Iterator[str]:
    yield from SCALED_NAMES
    for i, (element, rule) in enumerate(itertools.product(ELEMENTS, RULES)):
        grouping, scale = GROUPINGS[(3 * i + i // 7) % len(GROUPINGS)], SCALES[(i + i // 11) % len(SCALES)]
        yield f"{element}({grouping},scale={scale},rule={rule})"
    for i, (element, grouping) in enumerate(itertools.product(("int8", "uint4", "int3", "uint8"), GROUPINGS)):
        zero_point = "float" if i % 3 == 0 else "integer"
        yield f"{element}({grouping},scale={SCALES[i % 3]},zero_point={zero_point})"
    for element, grouping in itertools.product(ELEMENTS, GROUPINGS):
        yield f"{element}({grouping})"


def blocks(text: str, carrier: str) -> np.ndarray:
    return cases_scaled.adversarial(jc.float8_e4m3fn, 48, carrier, 16, rng_for(text + carrier))


def scaled_calls() -> Iterator[Call]:
    carriers = itertools.cycle(["float32", "float32", "float64", "bfloat16"])
    modes = itertools.cycle(["", *(f":{mode}" for mode in MODES), "", ":saturate"])
    for text in scaled_texts():
        carrier, mode = next(carriers), next(modes)

        def both(text: str = text, mode: str = mode, carrier: str = carrier) -> Any:
            x = blocks(text, carrier)
            return jc.round_to_format(x, text + mode, key_for(mode))

        def stored(text: str = text, mode: str = mode, carrier: str = carrier) -> Any:
            q = jc.quantize(jnp.asarray(blocks(text, carrier), carrier), text + mode, key_for(mode))
            return q, jc.dequantize(q)

        with_jax = carrier if carrier != "float64" else "float32"
        yield f"scaled {text}{mode} {carrier}", both
        yield f"quantize {text}{mode} {with_jax}", lambda stored=stored, with_jax=with_jax: stored(carrier=with_jax)
    for text in SCALED_NAMES:

        def moderate(text: str = text) -> Any:
            x = jnp.asarray(rng_for(text).standard_normal((32, 512)), jnp.float32)
            return jax.jit(lambda x: jc.dequantize(jc.quantize(x, text)) + x)(x), jc.fit_scale(x, text)

        yield f"fused {text}", moderate


def code_calls() -> Iterator[Call]:
    for text in [*cases.NAMED, *cases.P3109, "fixed4.4", "integer8", "uinteger4"]:

        def codes(text: str = text) -> Any:
            fmt = jc.parse(text).format
            every = np.arange(2 ** min(fmt.bits, 16))
            values = fmt.decode(every)
            return values, fmt.encode(values)

        yield f"codes {text}", codes
    for name, tree in {
        "plain": lambda: {"a": jnp.arange(5.0), "b": [jnp.ones((2, 3), jnp.bfloat16)]},
        "packed": lambda: {"w": jc.quantize(jnp.linspace(-1, 1, 512).reshape(4, 128), "nf4"), "b": jnp.zeros(3)},
    }.items():

        def file(tree: Callable[[], Any] = tree) -> Any:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "x.safetensors"
                jc.save_safetensors(path, tree())
                return [leaf for _, leaf in sorted(jc.load_safetensors(path).items())]

        yield f"file {name}", file


# -- arithmetic --------------------------------------------------------------------------------------------------------


def operands(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return (rng_for(name).standard_normal(shape) * 4).astype(dtype)


def matmul_calls() -> Iterator[Call]:
    orders = ("sequential", "blocked(8)", "pairwise", "matrix_unit(16)")
    arithmetics = (("bfloat16", "e6m9"), ("e5m2", "e5m10:stochastic"), (None, "bfloat16:toward_zero"),
                   ("e4m3:up", "e5m7:odd"), ("fixed4.4", "fixed8.4"), ("binary32", "binary32"),
                   ("e5m10", "binary32:toward_zero"))  # fmt: skip
    for order, (product, accumulate), fused in itertools.product(orders, arithmetics, (False, True)):

        def product_of(order: str = order, pair: Any = (product, accumulate), fused: bool = fused) -> Any:
            spec = jc.MatmulSpec(product=None if fused else pair[0], accumulate=pair[1], order=order, fused=fused)
            a, b = operands("a", (5, 37)), operands("b", (37, 6))
            return jc.math.matmul(a, b, spec, KEY)

        yield f"matmul {order} {product} {accumulate} fused={fused}", product_of
    for name, spec in itertools.product(("sum", "mean", "prod", "var", "std", "cumsum", "cumprod", "norm"),
                                        ("bfloat16", "e5m2:stochastic", "e5m10:up", "tf32:odd")):  # fmt: skip
        yield (
            f"math.{name} {spec}",
            lambda name=name, spec=spec: getattr(jc.math, name)(operands(name, (3, 50)), spec, key=key_for(spec)),
        )


UNARY = ("abs", "arctan", "cbrt", "ceil", "cos", "erf", "exp", "exp2", "expm1", "floor", "log1p", "negative",
         "reciprocal", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "log",
         "log2")  # fmt: skip
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "mod", "hypot", "arctan2", "power")


def elementwise_calls() -> Iterator[Call]:
    specs = itertools.cycle(
        [
            f"{text}:{mode}"
            for text, mode in zip(["bfloat16", "e5m10", "e4m3fn", "tf32", "e8m3"] * 3, MODES, strict=False)
        ]
    )
    exact = ("add", "subtract", "multiply", "divide", "sqrt", "reciprocal", "square")
    for name in (*UNARY, *BINARY):
        for spec in [next(specs) for _ in range(len(MODES) if name in exact else 3)]:

            def elementwise(name: str = name, spec: str = spec) -> Any:
                x, y = hard("bfloat16", "float32"), hard("e5m10", "float32")
                return getattr(jc.math, name)(*((x, y) if name in BINARY else (x,)), spec, key=key_for(spec))

            yield f"math.{name} {spec}", elementwise
    for name, spec in itertools.product(("cholesky", "lu", "qr"), ("bfloat16", "e5m10:up")):

        def factored(name: str = name, spec: str = spec) -> Any:
            a = operands(name, (6, 6))
            return getattr(jc.math.linalg, name)(a @ a.T + 8 * np.eye(6, dtype=np.float32), spec)

        yield f"linalg.{name} {spec}", factored


def softmax(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.softmax(x * y)


def network(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.outer(x, y) @ x + y) / (1 + jnp.exp(-x))


def scanned(x: jax.Array, y: jax.Array) -> Any:
    return lax.scan(lambda c, v: (c * 0.9 + v, jnp.sin(c)), x, jnp.stack([x, y, x - y]))


def emulate_calls() -> Iterator[Call]:
    programs = (emulate_cases.straight, emulate_cases.loops, emulate_cases.sums, softmax, network, scanned)
    for program, spec in itertools.product(programs, ("bfloat16", "e5m10:up", "e4m3fn:saturate", "e5m7:stochastic",
                                                      "tf32:toward_zero", "fixed8.8")):  # fmt: skip
        yield (
            f"emulate {program.__name__} {spec}",
            lambda program=program, spec=spec: (
                jc.emulate(program, spec)(emulate_cases.X, emulate_cases.Y, key=key_for(spec))
                if key_for(spec) is not None
                else jc.emulate(program, spec)(emulate_cases.X, emulate_cases.Y)
            ),
        )
    for order in ("sequential", "pairwise", "matrix_unit(4)"):
        yield (
            f"emulate sums {order}",
            lambda order=order: jc.emulate(
                network, "bfloat16", accumulate=jc.MatmulSpec(accumulate="e6m9", order=order)
            )(emulate_cases.X, emulate_cases.Y),
        )
    for program in (emulate_cases.straight, softmax, network):
        yield (
            f"emulate gradient {program.__name__}",
            lambda program=program: jax.grad(lambda x: jc.emulate(program, "bfloat16")(x, emulate_cases.Y).sum())(
                emulate_cases.X
            ),
        )


# -- optimizers and layers ---------------------------------------------------------------------------------------------


#: The weight decay of the recorded digests.
DECAY = {name: {"weight_decay": 1e-2} for name in ("adamw8bit", "adamw4bit", "adamw_fp8")}


def optimizer_calls() -> Iterator[Call]:
    import optax

    optimizers: dict[str, Callable[[], Any]] = {
        name: (lambda name=name: getattr(jc.optim, name)(1e-2, **DECAY.get(name, {})))
        for name in ("adamw8bit", "adamw4bit", "adamw_fp8", "adam8bit", "lion8bit", "sgd8bit")
    }
    optimizers |= {
        "round_updates": lambda: optax.chain(optax.sgd(0.1), jc.optim.round_updates("bfloat16:stochastic", key=KEY)),
        "round_gradients": lambda: optax.chain(jc.optim.round_gradients("e5m2"), optax.adam(0.1)),
        "error_feedback": lambda: optax.chain(jc.optim.error_feedback("int4(group=32)"), optax.sgd(0.1)),
    }
    for name, make in optimizers.items():

        def steps(make: Callable[[], Any] = make, name: str = name) -> Any:
            params = {"w": jnp.asarray(operands(name, (64, 256))), "b": jnp.zeros(7)}
            tx = make()
            state, updates = tx.init(params), None
            for i in range(3):
                grads = jax.tree.map(lambda p, i=i: jnp.cos(p + i) * 1e-2, params)
                updates, state = jax.jit(tx.update)(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params, jax.tree.leaves(state)

        yield f"optimizer {name}", steps


def layer_calls() -> Iterator[Call]:
    from flax import nnx

    kinds: dict[str, tuple[Callable[[], nnx.Module], tuple[int, ...]]] = {
        "linear": (lambda: nnx.Linear(32, 16, rngs=nnx.Rngs(0)), (8, 32)),
        "general": (lambda: nnx.LinearGeneral((4, 8), (2, 8), axis=(-2, -1), rngs=nnx.Rngs(0)), (6, 4, 8)),
        "einsum": (lambda: nnx.Einsum("abc,cd->abd", (32, 16), (16,), rngs=nnx.Rngs(0)), (2, 3, 32)),
        "conv": (lambda: nnx.Conv(16, 8, (3, 3), rngs=nnx.Rngs(0)), (2, 6, 6, 16)),
        "norm": (lambda: nnx.LayerNorm(32, rngs=nnx.Rngs(0)), (8, 32)),
    }
    rules: dict[str, Callable[[], jc.nn.Rule]] = {
        "w4": lambda: jc.nn.Rule(weight="int4(group=16)"),
        "w8a8": lambda: jc.nn.Rule(weight="int8(group=all)", activation="int8(group=all)"),
        "bf16": lambda: jc.nn.Rule(weight="bfloat16", activation="bfloat16", output="bfloat16", bias="bfloat16"),
        "matmul": lambda: jc.nn.Rule(weight="e5m2", matmul=jc.MatmulSpec(accumulate="e6m9", order="pairwise")),
        **{
            name: (lambda name=name: jc.nn.recipe(name))
            for name in ("float8_tensorwise", "float8_rowwise", "mxfp8", "nvfp4", "int8", "ibm_hybrid_fp8", "wage")
        },
    }
    for (kind, (make, shape)), (name, rule) in itertools.product(kinds.items(), rules.items()):
        for mode in ("qat", "ptq"):

            def run(make: Any = make, shape: Any = shape, rule: Any = rule, mode: str = mode) -> Any:
                model = jc.nn.quantize(make(), rule(), mode=mode)
                x = jnp.asarray(operands("layer", shape))

                def loss(model: Any, x: jax.Array) -> jax.Array:
                    return (model(x) ** 2).sum()

                grads = nnx.grad(loss, argnums=(0, 1))(model, x) if mode == "qat" else ()
                return model(x), jax.tree.leaves(grads)

            yield f"layer {kind} {name} {mode}", run


def stream_calls() -> Iterator[Call]:
    for shape, offset, width in itertools.product(((7,), (3, 5)), (0, 11, 2**33 + 1), (32, 64)):

        def words(shape: Any = shape, offset: int = offset, width: int = width) -> Any:
            with jax.enable_x64(True):
                return jc.random_bits(KEY, shape, width=width, offset=offset)

        yield f"random_bits {shape} {offset} {width}", words
    for text in ("bfloat16", "float8_e4m3fn", "binary32"):
        yield (
            f"flip_bits {text}",
            lambda text=text: jc.flip_bits(jnp.asarray(operands(text, (64,))), text, 0.05, KEY),
        )


def every_call() -> Iterator[Call]:
    for calls in (rounding_calls, gradient_calls, scaled_calls, code_calls, matmul_calls, elementwise_calls,
                  emulate_calls, optimizer_calls, layer_calls, stream_calls):  # fmt: skip
        yield from calls()


# -- the two commands --------------------------------------------------------------------------------------------------


def write(path: Path, part: str) -> None:
    number, parts = map(int, part.split("/"))
    calls = [call for i, call in enumerate(every_call()) if i % parts == number % parts]
    found: dict[str, str] = {}
    start = time.monotonic()
    for done, (name, call) in enumerate(calls, 1):
        assert name not in found, name
        found[name] = outcome(call)
        if done % 100 == 0:
            jax.clear_caches()
            print(f"{done} of {len(calls)} calls, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    print(f"{len(found)} digests, {sum(value.startswith('error') for value in found.values())} of them errors: {path}")


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (old, new))
    both = [name for name in before if name in after]
    differing = [name for name in both if before[name] != after[name]]
    for name in differing:
        print(f"{name}: {before[name]} -> {after[name]}")
    alone = len(before) + len(after) - 2 * len(both)
    print(f"{len(both)} calls in both, {len(differing)} differ, {alone} in one alone")
    return 1 if differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--part", default="1/1", metavar="K/N", help="every N-th call, from the K-th on")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        write(options.file, options.part)
        return 0
    return compare(options.old, options.new)


if __name__ == "__main__":
    sys.exit(main())
