"""The bytes on the wire, counted in compiled programs, and the errors of sums that moved as codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import compiling
from _kernels.test_compile import require_compiler
from distributed.hlo import wire_bytes
from further import Further
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

RANKS, SIZE, GROUP = 8, 1 << 17, 256
INT8, INT4 = (f"int{bits}(group={GROUP},scale=bfloat16)" for bits in (8, 4))
FLOAT32 = 2 * 4 * SIZE * (RANKS - 1) / RANKS  # bytes that a rank sends in an all-reduce
#: The spec and the algorithm: the most bytes of those of float32, the least SQNR in dB.
GATES = {
    (INT8, "two_shot"): (0.26, 39.9),
    (INT4, "two_shot"): (0.135, 14.7),
    (INT8, "ring"): (0.26, 36.3),
    (INT4, "ring"): (0.135, 10.9),
}


@lru_cache
def compiled(spec: str, algorithm: str) -> jax.stages.Compiled:
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: jc.distributed.psum(x[0], "d", spec, algorithm=algorithm)[None],
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    x = jax.ShapeDtypeStruct((RANKS, SIZE), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return jax.jit(mapped).lower(x).compile()


@further.first
def the_counter_counts() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))

    def moved(x: jax.Array) -> jax.Array:
        def turn(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.ppermute(c, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]), None

        c = jax.lax.scan(turn, x.astype(jnp.int8), None, length=5)[0]
        return jax.lax.psum(x, "d") + jax.lax.all_gather(x, "d").sum(0) + c

    x = jax.ShapeDtypeStruct((4 * 1024,), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    text = jax.jit(jax.shard_map(moved, mesh=mesh, in_specs=P("d"), out_specs=P("d"))).lower(x).compile().as_text()
    assert wire_bytes(text or "", 4) == {"f32": 2 * 4096 * 0.75 + 4 * 4096 * 0.75, "s8": 5 * 1024}


@pytest.mark.parametrize(
    ("spec", "algorithm"),
    [pytest.param(*gate, marks=[] if gate == (INT4, "two_shot") else pytest.mark.slow) for gate in GATES],
)
def test_codes_and_scales_alone_are_sent(spec: str, algorithm: str, rng: np.random.Generator) -> None:
    program = compiled(spec, algorithm)
    found = wire_bytes(program.as_text() or "", RANKS)
    assert set(found) <= {"s8", "u8", "u16"}
    most, least = GATES[spec, algorithm]
    assert sum(found.values()) <= most * FLOAT32
    codes = {INT8: "s8", INT4: "u8"}[spec]
    assert found[codes] == FLOAT32 / {INT8: 4, INT4: 8}[spec]
    assert found["u16"] == FLOAT32 / 4 * 2 / GROUP

    x = rng.standard_normal((RANKS, SIZE)).astype(np.float32)
    results = np.asarray(program(x))
    assert (results == results[:1]).all()
    exact = x.astype(np.float64).sum(0)
    error = results[0] - exact
    assert 10 * np.log10((exact**2).mean() / (error**2).mean()) >= least
    if algorithm == "two_shot":
        assert (np.abs(error) <= bound(x, 127 if spec == INT8 else 7) * (1 + 1e-5)).all()


def bound(x: np.ndarray, top: int) -> np.ndarray:
    """Half a step of every rank, and half a step of the sum, whose maximum may have grown by the first."""

    def scales(maxima: np.ndarray) -> np.ndarray:
        return (maxima / top * (1 + 2**-8)).repeat(GROUP, -1)  # a bfloat16 has 8 bits

    clipped = 1 + top * 2**-8  # a scale that is rounded down clips the largest numbers by as much
    steps = scales(np.abs(x.astype(np.float64)).reshape(RANKS, -1, GROUP).max(-1)).sum(0) / 2 * max(1, clipped)
    largest = (np.abs(x.astype(np.float64).sum(0)) + steps).reshape(-1, GROUP).max(-1)
    return steps + scales(largest) / 2 * max(1, clipped)


@further
@pytest.mark.parametrize(
    ("bits", "ranks"), [(8, 2), *(pytest.param(bits, RANKS, marks=pytest.mark.slow) for bits in (8, 4))]
)
def stochastic_sums_are_unbiased(bits: int, ranks: int, rng: np.random.Generator) -> None:
    """The mean of 256 draws has 1/16 of the error of one, and no bias.

    So many draws show a bias of 1e-4 in int8; in int4 it is below the 8e-4 that 2^20 numbers show. The figure
    for 2^28 numbers stands in docs/measurements/distributed.md.
    """
    size, draws = 1 << 12, 256
    x = jnp.asarray(rng.standard_normal((ranks, size)), jnp.float32)
    spec = f"int{bits}(group={GROUP}):stochastic"

    def one(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: jc.distributed.psum(x, "d", spec, key), axis_name="d")(x)[0]

    keys = jax.random.split(jax.random.key(0), draws)
    errors = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys)) - np.asarray(x, np.float64).sum(0)
    sigma = np.sqrt((errors**2).mean())
    assert abs(np.sqrt((errors.mean(0) ** 2).mean()) / (sigma / 16) - 1) < 0.05
    assert abs(errors.mean()) < min(5 * sigma / np.sqrt(errors.size), 1e-4 if bits == 8 else 1)


SCRIPT = Path(__file__).with_name("other_chips.py")


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_other_chips_send_the_same(target: str, pytestconfig: pytest.Config) -> None:
    require_compiler(target, pytestconfig)
    paths = [str(Path(jc.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | compiling.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    size, found = json.loads(done.stdout.splitlines()[-1])
    for spec, share, codes, bits in (("int8", 0.26, "s8", 8), ("int4", 0.135, "u8", 4)):
        assert set(found[spec]) <= {"s8", "u8", "u16", "u32"}, found  # XLA moves a few scales as pairs
        assert found[spec][codes] == 2 * size * 3 / 4 * bits / 8
        assert sum(found[spec].values()) <= share * 2 * 4 * size * 3 / 4


test_further = further.test()
