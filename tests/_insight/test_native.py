"""`low.native`: the bits of the emulation in the dtypes of the device, and a patch that applies and runs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each

import jchop as jc

Array = jax.Array
X = jax.random.normal(jax.random.key(0), (64, 33)) * 2.0 ** jax.random.randint(jax.random.key(1), (64, 33), -6, 3)


def powers(x: Array) -> Array:
    for _ in range(6):
        x = x * x * 0.5 - x * 0.75 + 0.125
    return x


def loops(x: Array) -> Array:
    def turn(c: Array, row: Array) -> tuple[Array, Array]:
        c = (c + row / 3) / jnp.sqrt(1 + c * c)
        return c, jnp.where(c > 0, c, -c)

    last, rows = jax.lax.scan(turn, x[0], x)
    last = jax.lax.while_loop(lambda c: jnp.max(c) > 0.25, lambda c: c / 2, last)
    return jnp.maximum(rows, last) - jax.lax.cond(last[0] > 0, lambda c: c * 3, lambda c: c + 1, last)


def mixed(x: Array) -> Array:
    with jax.named_scope("low"):
        y = x * x + x
    return y / 3 - x


CASES: dict[str, tuple[Any, Any, Any]] = {
    f"{f.__name__} {spec}": (f, spec, None) for f in (powers, loops) for spec in ("bfloat16", "binary16", "e5m7")
} | {
    "two": (mixed, None, {"low": "bfloat16", "!low": "binary16"}),
    "part": (mixed, None, {"low": "bfloat16"}),
    "overflow": (lambda x: (x * 6e4) * (x * 30), "binary16", None),
    "saturation": (lambda x: (x * 6e4) * (x * 30), "binary16:saturate", None),
    "directed": (powers, "bfloat16:up", None),
    "matrix": (lambda x: x.astype(jnp.float32) @ x.T, "float8_e4m3fn:saturate", None),
}


@each("name", CASES)
def test_the_bits_are_those_of_the_emulation(name: str) -> None:
    fun, spec, rules = CASES[name]
    low = jc.emulate(fun, spec, rules=rules)
    got, want = (np.asarray(jax.jit(f)(X)) for f in (low.native(X), low))
    assert np.array_equal(got, want, equal_nan=True) and got.dtype == want.dtype, np.mean(got != want)


def test_native_operations_and_their_rest() -> None:
    low = jc.emulate(powers, "bfloat16")
    text = str(jax.make_jaxpr(low.native(X))(X))
    assert "bf16" in text and "reduce_precision" in text and "jchop" not in text and not low.native(X).notes
    assert jc.emulate(powers, "e5m7").native(X).notes[0] == "emulated in e5m7: add, mul, sub"
    with pytest.raises(ValueError, match="rounds stochastically"):
        jc.emulate(powers, "bfloat16:stochastic", key=jax.random.key(0)).native(X)


CODE = """
import jax.numpy as jnp


def centre(x, scale):
    mean = (x[0] + x[1]) / 2
    return (x - mean) * scale


def block(x, w, tables):
    h = x @ w
    g = centre(
        h * tables["gain"], 0.5
    )
    for _ in range(2):
        g = g * g - h[1] * 0.25
    return jnp.where(g > 0, g, jnp.tanh(g)) + 1
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_patch_applies_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rules of `tune`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "native_block.py").write_text(CODE)
    block = load(tmp_path / "native_block.py").block
    x, w = X[:8, :16], X[:16, :16] / 8
    args = (x, w, {"gain": jnp.float32(0.5)})
    tuned = jc.tune(block, ["bfloat16", None], [args], 1e-2 * 5)
    low = jc.emulate(block, None, rules=tuned.rules)
    found = low.native(*args)
    assert len(found.casts) == 6 and {dtype for _, _, dtype in found.casts} == {"bfloat16"}
    (tmp_path / "casts.patch").write_text(found.patch)
    subprocess.run(["git", "apply", "casts.patch"], check=True, cwd=tmp_path)
    patched = load(tmp_path / "native_block.py").block
    out, want, plain = (np.asarray(f(*args)) for f in (patched, low, block))
    assert out.dtype == np.float32 and not np.array_equal(out, plain)
    assert np.linalg.norm(out - want) <= 2.0**-7 * np.linalg.norm(want)
    assert "bf16" in str(jax.make_jaxpr(patched)(*args))
