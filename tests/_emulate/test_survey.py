"""Which functions of JAX `jc.emulate` takes: the table of what a user meets, by module."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
import pytest

import jchop as jc

NUMBERS = np.linspace(0.1, 0.9, 12).reshape(3, 4), np.linspace(0.1, 0.9, 6), np.eye(3) * 4 + 0.5
X, V, S = (jax.device_put(numbers.astype(np.float32)) for numbers in NUMBERS)

#: Of one array, of two, and of a square matrix: a module and the functions that pass.
PASS: list[tuple[tuple[Any, ...], str, str]] = [
    ((X,), "jax.numpy", """
        abs argmax argsort average cbrt ceil cos cosh cumprod cumsum diff exp exp2 expm1 flip floor frexp gradient
        histogram i0 log log10 log1p log2 max mean median modf nan_to_num nanmean nanstd prod ptp ravel reciprocal rint
        round sign sin sinc sinh sort sqrt square std sum tan tanh trapezoid trunc unstack unwrap var"""),
    ((X,), "jax.numpy.linalg", "matrix_norm norm vector_norm"),
    ((X,), "jax.nn", """
        celu elu gelu glu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax logsumexp mish relu relu6 selu sigmoid
        silu soft_sign softmax softplus sparse_plus squareplus standardize"""),
    ((X,), "jax.scipy.special", """
        digamma entr erf erfc erfinv exp1 expi gamma gammaln i0e i1 log_ndtr logit ndtr ndtri spence"""),
    ((X,), "jax.scipy.stats.norm", "cdf logcdf logpdf pdf sf"),
    ((V, V), "jax.numpy", """
        add arctan2 convolve copysign correlate cov dot float_power floor_divide fmod heaviside hypot inner kron
        logaddexp maximum minimum mod multiply nextafter outer polymul polyval power remainder select subtract vdot"""),
    ((V, V), "jax.scipy.special", "beta betaln gammainc kl_div rel_entr xlog1py xlogy zeta"),
    ((S,), "jax.numpy.linalg", "cholesky det eigh eigvalsh inv pinv qr slogdet svd"),
    ((S,), "jax.scipy.linalg", "block_diag cho_factor expm lu lu_factor polar toeplitz"),
    ((X,), "jax.numpy.fft", "fft fft2 ifft irfft rfft"),
    ((S,), "jax.numpy.linalg", "eig"),
    ((S,), "jax.scipy.linalg", "hessenberg schur"),
    ((V, V), "jax.scipy.signal", "fftconvolve"),
]  # fmt: skip


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("args", "module", "names"), PASS, ids=[f"{len(a)}-{m}" for a, m, _ in PASS])
def test_functions_that_pass(args: tuple[Any, ...], module: str, names: str) -> None:
    """Traced and planned, not run: that finds every primitive without a rule."""
    for name in names.split():
        fun = getattr(importlib.import_module(module), name)
        seen = jc.emulate(fun, "bfloat16").report(*args)
        assert all(row.spec == "bfloat16" for row in seen.rows), (name, str(seen))
