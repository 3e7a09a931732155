"""Flags of XLA under which numbers would be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.backend import get_compile_options

import jchop as jc
from jchop._common import settings

_FLAG = "--xla_cpu_enable_fast_math=true"
_CASES: dict[str, Callable[[jax.Array], Any]] = {
    "round": lambda x: jc.round_to_format(x, "nvfp4"),
    "quantize": lambda x: jc.quantize(x, "int8(group=16)"),
    "arithmetic": lambda x: jc.math.divide(x, x, "bfloat16"),
    "product": lambda x: jc.math.matmul(x, x.T, "e5m2"),
    "emulate": lambda x: jc.emulate(lambda x: jnp.tanh(x) @ x.T, "float8_e4m3fn")(x),
    "program": lambda x: jc.quantize_fn(lambda p, x: x @ p.T, jc.Rule(weight="int4(group=16)"))(x, x),
}


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in _CASES if name != "round"]


@pytest.mark.parametrize("name", ["round", *_SLOW])
def test_fast_math_of_xla_is_refused_where_a_function_is_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**sizes: Any) -> Any:
        found = get_compile_options(**sizes)
        found.executable_build_options.debug_options.xla_cpu_enable_fast_math = True
        return found

    monkeypatch.setattr(settings, "get_compile_options", options)
    settings.has_fast_math.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"XLA_FLAGS: {_FLAG} .*; leave the flag out"):
            jax.eval_shape(_CASES[name], jnp.ones((3, 16 * (5 + len(name)))))  # a shape that was not traced before
    finally:
        settings.has_fast_math.cache_clear()


@pytest.mark.parametrize(
    "flag", [pytest.param(f"{_FLAG} --xla_cpu_fast_math_honor_nans=true", marks=pytest.mark.slow), ""]
)
def test_the_flag_itself_is_seen(flag: str) -> None:
    if not flag:
        assert not settings.has_fast_math()
        return
    code = "import jax, jchop as jc; jax.jit(lambda x: jc.round_to_format(x, 'int8(group=2)'))(jax.numpy.ones(4))"
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and f"RuntimeError: XLA_FLAGS: {_FLAG}" in run.stderr
