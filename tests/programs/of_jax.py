"""Functions of JAX: jax.numpy, jax.lax, jax.nn, jax.scipy, jax.random and jax.experimental."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import jax.scipy.spatial.transform
import numpy as np
from jax import lax

from programs.program import Program, names, normal, positive, unit

__all__ = ["JAX"]


def _function(path: str) -> Callable[..., Any]:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def row(path: str, *args: Any, label: str = "", **facts: Any) -> Program:
    """A public function of JAX of some arguments, of which those that are arrays or floats are its variables."""
    moved = [i for i, x in enumerate(args) if isinstance(x, jax.Array | float)]

    def fun(*values: Any) -> Any:
        every = list(args)
        for i, value in zip(moved, values, strict=True):
            every[i] = value
        return _function(path)(*every)

    return Program(path + label, lambda: (fun, tuple(args[i] for i in moved)), **facts)


def of(name: str, fun: Callable[..., Any], *args: Any, **facts: Any) -> Program:
    """Any function."""
    return Program(name, lambda: (fun, args), **facts)


# -- operands ----------------------------------------------------------------------------------------------------------

X, U, M, V, S = normal(4, 6), unit(4, 6), normal(5, 5, seed=1), normal(7, seed=2), positive(5)
W, P, Z = unit(7, seed=3), unit(7, seed=4), normal(8, seed=5)
IMAGE = unit(1, 8, 8, 3)
KEY = jax.random.key(5)
RAMP = np.linspace(0.0, 1.0, 7, dtype=np.float32)
ONES = np.ones(3, np.float32)

# -- jax.numpy, jax.nn, jax.scipy --------------------------------------------------------------------------------------

NUMPY = [
    *(row(f"jax.numpy.{name}", X) for name in names("""
        mean var std median nanmean nanstd ptp cumsum cumprod diff gradient sort trace tanh sinc
        average nan_to_num unwrap""")),
    row("jax.numpy.argmax", X, smooth=False),
    row("jax.numpy.quantile", X, 0.3),
    row("jax.numpy.percentile", X, 40.0),
    row("jax.numpy.histogram", V, smooth=False),
    row("jax.numpy.interp", W, RAMP, V),
    row("jax.numpy.convolve", V, W),
    row("jax.numpy.correlate", V, W),
    row("jax.numpy.cov", X),
    row("jax.numpy.corrcoef", X),
    row("jax.numpy.kron", M[:2, :2], M[:2, :3]),
    row("jax.numpy.cross", M[:, :3], M[:, 2:]),
    row("jax.numpy.tensordot", normal(2, 3, 4), normal(3, 4, 5)),
    row("jax.numpy.outer", V, W),
    row("jax.numpy.vander", W, 4),
    row("jax.numpy.polyval", V, W),
    row("jax.numpy.polyfit", RAMP, W, 2),
    of("jax.numpy.roots", lambda p: jnp.roots(p, strip_zeros=False), jnp.array([1.0, -3.5, 2.0]), smooth=False),
    row("jax.numpy.trapezoid", V, RAMP),
    row("jax.numpy.logaddexp", V, W),
    row("jax.numpy.hypot", V, W),
    row("jax.numpy.arctan2", V, W),
    row("jax.numpy.float_power", W, V),
    row("jax.numpy.ldexp", V, jnp.array(3)),
    row("jax.numpy.frexp", V, smooth=False),
    row("jax.numpy.modf", V),
    row("jax.numpy.divmod", V, W, smooth=False),
    row("jax.numpy.floor_divide", V, W, smooth=False),
    row("jax.numpy.digitize", W, RAMP, smooth=False),
    row("jax.numpy.searchsorted", RAMP, W, smooth=False),
    row("jax.numpy.apply_along_axis", jnp.sum, 0, X),
    of("jax.numpy.block", lambda x: jnp.block([[x, 2.0 * x], [x, x]]), M),
    of("jax.numpy.einsum of three", partial(jnp.einsum, "ij,jk,kl->il"), M, M, M),
    of("jax.numpy.at add", lambda x: x.at[jnp.array([0, 2, 2])].add(0.3), V),
    of("jax.numpy.at multiply", lambda x: x.at[jnp.array([0, 2, 4])].multiply(1.3), V),
    of("jax.numpy.at divide", lambda x: x.at[jnp.array([0, 2, 4])].divide(1.3), V),
    of("jax.numpy.at power", lambda x: x.at[jnp.array([0, 2])].power(1.5), W),
    of("jax.numpy.at subtract", lambda x: x.at[jnp.array([0, 2, 2])].subtract(0.3), V),
    of("jax.numpy.at min", lambda x: x.at[jnp.array([0, 2, 2])].min(0.1), V),
    of("jax.numpy.at max", lambda x: x.at[jnp.array([0, 2, 2])].max(0.1), V),
    of("jax.numpy.at apply", lambda x: x.at[jnp.array([0, 2])].apply(jnp.sin), V, smooth=False),
    of("jax.numpy.at get", lambda x: x.at[jnp.array([0, 9])].get(mode="fill", fill_value=0.1), V),
    of("jax.numpy.piecewise", lambda x: jnp.piecewise(x, [x < 0, x > 1], [jnp.sin, 0.3, jnp.cos]), V),
    of("jax.numpy.select", lambda x: jnp.select([x < 0, x > 1], [x * 2, x / 3], 0.1), V),
    of("jax.numpy.where", lambda x: jnp.where(x > 0, jnp.log(jnp.abs(x)), 0.1), V),
    of("jax.numpy.linspace", lambda x: jnp.linspace(x[0], x[1], 9), W),
    of("jax.numpy.vectorize", jnp.vectorize(jnp.dot, signature="(n),(n)->()"), M, M),
    of("jax.numpy.unique", partial(jnp.unique, size=7), V, smooth=False),
    of("jax.numpy.complex arithmetic", lambda x, y: jnp.abs((x + 1j * y) * (y - 0.5j * x) / (x + 2j)), V, W),
    of("jax.numpy.complex exp", lambda x, y: jnp.real(jnp.exp(x + 1j * y)), W, P),
    of("jax.numpy.complex power", lambda x, y: jnp.imag((x + 1j * y) ** 1.5), W, P),
    of("jax.numpy.complex product", lambda x, y: jnp.real((x + 1j * y) @ (x - 1j * y)), M, M),
    of("jax.numpy.bfloat16 inside", lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float32) + x, V),
    of("jax.numpy.float8 inside", lambda x: x.astype(jnp.float8_e5m2).astype(jnp.float32) * 1.1, V),
    *(row(f"jax.numpy.fft.{name}", X) for name in names("fft ifft rfft fft2 irfft fftshift")),
    row("jax.numpy.fft.hfft", X, smooth=False),
    *(row(f"jax.numpy.linalg.{name}", S) for name in names("inv det slogdet cholesky pinv norm cond")),
    *(row(f"jax.numpy.linalg.{name}", S, twice=False) for name in ("eigh", "svd", "eigvalsh", "qr")),
    row("jax.numpy.linalg.eig", M, smooth=False),
    row("jax.numpy.linalg.qr", X, label=" wide", smooth=False),
    row("jax.numpy.linalg.qr", X.T, label=" tall", twice=False),
    row("jax.numpy.linalg.solve", S, V[:5]),
    row("jax.numpy.linalg.lstsq", X.T, V[:6], smooth=False),
    row("jax.numpy.linalg.matrix_power", S, 3),
    of("jax.numpy.linalg.multi_dot", lambda *m: jnp.linalg.multi_dot(m), M, M, M),
]  # fmt: skip
NN = [
    *(row(f"jax.nn.{name}", X) for name in names("""
        relu gelu silu softplus softmax log_softmax logsumexp standardize glu selu mish squareplus logmeanexp
        log_sigmoid hard_swish sparse_plus soft_sign celu elu""")),
    row("jax.nn.log1mexp", W),
    row("jax.nn.one_hot", jnp.array([0, 2, 1]), 4, smooth=False),
    row("jax.nn.dot_product_attention", normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=1), normal(1, 5, 2, 4, seed=2)),
    of("jax.nn.dot_product_attention causal", partial(jax.nn.dot_product_attention, is_causal=True),
       normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=1), normal(1, 5, 2, 4, seed=2)),
    of("jax.lax.scaled_dot", lambda a, b, s: lax.scaled_dot(
        a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn), lhs_scale=s.astype(jnp.float8_e8m0fnu),
        rhs_scale=s.reshape(1, 1, 4).astype(jnp.float8_e8m0fnu), preferred_element_type=jnp.float32),
       normal(1, 4, 32), normal(1, 32, 4), 2 * jnp.ones((1, 4, 1)), smooth=False),
    *(of(f"jax.nn.initializers.{name}", lambda key, name=name: getattr(jax.nn.initializers, name)()(key, (4, 6)),
         KEY, smooth=False) for name in names("glorot_normal he_uniform lecun_normal orthogonal")),
]  # fmt: skip
SCIPY = [
    *(row(f"jax.scipy.special.{name}", W) for name in names("""
        digamma entr erf erfc erfinv exp1 expi expit gamma gammaln i0 i0e i1 i1e log_ndtr logit ndtr ndtri dawsn
        erfcx""")),
    *(row(f"jax.scipy.special.{name}", W, smooth=False) for name in ("fresnel", "sici", "spence", "factorial")),
    row("jax.scipy.special.betainc", W, P, W, smooth=False),
    row("jax.scipy.special.gammainc", W, P, smooth=False),
    row("jax.scipy.special.beta", W, P),
    row("jax.scipy.special.betaln", W, P),
    row("jax.scipy.special.hyp1f1", jnp.array([0.5, 1.5]), jnp.array([1.5, 2.5]), jnp.array([0.5, 1.0]), smooth=False),
    row("jax.scipy.special.hyp2f1", jnp.array([0.5]), jnp.array([1.5]), jnp.array([2.5]), W[:1], smooth=False),
    row("jax.scipy.special.xlogy", W, P),
    row("jax.scipy.special.kl_div", W, P),
    row("jax.scipy.special.zeta", W + 1.5, P, smooth=False),
    row("jax.scipy.special.polygamma", 1, W, smooth=False),
    row("jax.scipy.special.expn", 2, W, smooth=False),
    row("jax.scipy.special.owens_t", W, P),
    row("jax.scipy.special.boxcox", W, P),
    row("jax.scipy.special.multigammaln", W + 2, 2),
    of("jax.scipy.special.bessel_jn", lambda z: jax.scipy.special.bessel_jn(z, v=3), W + 2, smooth=False),
    of("jax.scipy.special.wofz", lambda x, y: jnp.real(jax.scipy.special.wofz(x + 1j * y)), W, P, smooth=False),
    of("jax.scipy.special.sph_harm_y", lambda t, p: jnp.real(jax.scipy.special.sph_harm_y(
        jnp.array([1]), jnp.array([2]), t, p, n_max=2)), W[:1], P[:1], smooth=False),
    *(row(f"jax.scipy.stats.{name}", W) for name in names("""
        norm.logpdf norm.cdf norm.ppf cauchy.logpdf expon.logpdf laplace.cdf logistic.logpdf
        gumbel_r.logpdf""")),
    row("jax.scipy.stats.t.logpdf", V, 3.0),
    row("jax.scipy.stats.beta.logpdf", W, 1.5, 2.0),
    row("jax.scipy.stats.gamma.logpdf", W, 1.5),
    row("jax.scipy.stats.chi2.cdf", W, 3.0),
    row("jax.scipy.stats.poisson.logpmf", jnp.array([1, 2, 3]), 1.5, smooth=False),
    row("jax.scipy.stats.nbinom.logpmf", jnp.array([1, 2, 3]), 2, 0.3, smooth=False),
    row("jax.scipy.stats.truncnorm.logpdf", W, -1.0, 2.0),
    row("jax.scipy.stats.vonmises.logpdf", W, 1.5),
    row("jax.scipy.stats.dirichlet.logpdf", jnp.array([0.25, 0.25, 0.5]), jnp.array([1.0, 2.0, 1.5]), smooth=False),
    row("jax.scipy.stats.multivariate_normal.logpdf", V[:5], jnp.zeros(5), S),
    row("jax.scipy.stats.rankdata", V, smooth=False),
    row("jax.scipy.stats.mode", V, smooth=False),
    row("jax.scipy.stats.sem", V),
    of("jax.scipy.stats.gaussian_kde", lambda data, at: jax.scipy.stats.gaussian_kde(data).evaluate(at), V, W),
    *(row(f"jax.scipy.linalg.{name}", S, twice=False) for name in ("expm", "lu", "cho_factor")),
    row("jax.scipy.linalg.polar", S, twice=False, backward=False),
    *(row(f"jax.scipy.linalg.{name}", S, smooth=False) for name in ("schur", "sqrtm", "hessenberg")),
    row("jax.scipy.linalg.solve", S, V[:5]),
    row("jax.scipy.linalg.solve_triangular", S, V[:5]),
    row("jax.scipy.linalg.toeplitz", V),
    row("jax.scipy.linalg.solve_sylvester", S, S, M, smooth=False),
    of("jax.scipy.linalg.eigh_tridiagonal", lambda d, e: jax.scipy.linalg.eigh_tridiagonal(d, e, eigvals_only=True),
       V, V[:6], smooth=False),
    of("jax.lax.linalg.tridiagonal_solve", lax.linalg.tridiagonal_solve,
       jnp.array([0.0, 1, 1, 1]), jnp.full(4, 4.0), jnp.array([1.0, 1, 1, 0]), normal(4, 2), smooth=False),
    row("jax.scipy.signal.convolve2d", M, M[:2, :2]),
    row("jax.scipy.signal.fftconvolve", V, W),
    row("jax.scipy.signal.detrend", V),
    of("jax.scipy.signal.stft", lambda x: jax.scipy.signal.stft(x, nperseg=8)[2], normal(32), smooth=False),
    of("jax.scipy.signal.welch", lambda x: jax.scipy.signal.welch(x, nperseg=8)[1], normal(32)),
    of("jax.scipy.ndimage.map_coordinates", lambda x, a: jax.scipy.ndimage.map_coordinates(x, [a, a], order=1), M, W),
    of("jax.scipy.interpolate.RegularGridInterpolator", lambda v, x: jax.scipy.interpolate.RegularGridInterpolator(
        (jnp.arange(5.0), jnp.arange(5.0)), v)(x), M, 3 * unit(4, 2)),
    of("jax.scipy.spatial.Rotation", lambda v: jax.scipy.spatial.transform.Rotation.from_rotvec(v).as_matrix(), V[:3]),
    row("jax.scipy.integrate.trapezoid", V, RAMP),
    row("jax.scipy.cluster.vq.vq", M, M[:2], smooth=False),
    of("jax.scipy.sparse.linalg.cg", lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=20)[0],
       S, V[:5], twice=False),
    of("jax.scipy.sparse.linalg.gmres", lambda a, b: jax.scipy.sparse.linalg.gmres(lambda x: a @ x, b, maxiter=3)[0],
       S, V[:5], twice=False),
    of("jax.scipy.sparse.linalg.bicgstab", lambda a, b: jax.scipy.sparse.linalg.bicgstab(
        lambda x: a @ x, b, maxiter=20)[0], S, V[:5], twice=False),
    of("jax.scipy.optimize.minimize", lambda x: jax.scipy.optimize.minimize(
        lambda y: jnp.sum((y - 0.5) ** 2 * jnp.arange(1.0, 4.0)), x, method="BFGS", options={"maxiter": 10}).x,
       V[:3], smooth=False),
]  # fmt: skip
IMAGES = [
    of("jax.image.resize linear", lambda x: jax.image.resize(x, (1, 5, 12, 3), "linear"), IMAGE),
    of("jax.image.resize cubic", lambda x: jax.image.resize(x, (1, 12, 12, 3), "cubic"), IMAGE),
    of("jax.image.resize lanczos", lambda x: jax.image.resize(x, (1, 5, 5, 3), "lanczos3"), IMAGE),
    of("jax.image.resize nearest", lambda x: jax.image.resize(x, (1, 5, 5, 3), "nearest"), IMAGE),
    of("jax.image.scale_and_translate", lambda x: jax.image.scale_and_translate(
        x, (1, 6, 6, 3), (1, 2), jnp.array([0.7, 0.7]), jnp.array([0.3, 0.1]), "linear"), IMAGE),
]  # fmt: skip


# -- jax.lax -----------------------------------------------------------------------------------------------------------


def newton(x: Any) -> Any:
    """A root by Newton's method, with the derivative of an implicit function."""
    solve = lambda f, y: lax.fori_loop(0, 5, lambda _, z: z - f(z) / jax.grad(f)(z), y)  # noqa: E731
    return lax.custom_root(lambda y: y * y * y - x, jnp.float32(1.0), solve, lambda g, y: y / g(1.0))


def collatz(x: Any) -> Any:
    return lax.while_loop(lambda c: c[1] < 3.0, lambda c: (c[0] * 0.5 + 0.1, c[1] * 1.5), (x, jnp.float32(1.0)))


def filtered(x: Any) -> Any:
    return lax.scan(lambda c, v: (0.9 * c + 0.1 * v, c), jnp.float32(0.3), x)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 1.1


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * x,))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return jnp.sin(x) * 2.1


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2.1 * jnp.cos(primals[0]) * tangents[0]))


def solved(a: Any, b: Any) -> Any:
    return lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True)


def by_reference(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 1.3
    ref[0] = 0.3
    ref[1:] += x[1:]
    return ref[...] + 0.1


def in_a_kernel(x: Any) -> Any:
    from jax.experimental import pallas as pl

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 1.3 + 0.1

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def in_python(x: Any) -> Any:
    return jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def printed(x: Any) -> Any:
    y = x * 1.3
    jax.debug.callback(lambda v: None, y)
    return y + 0.1


def on_a_mesh(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(lambda v: v * 1.3 / lax.psum(jnp.sum(v * v), "i"), mesh=mesh, in_specs=spec, out_specs=spec)(x)


LAX = [
    of("jax.lax.while_loop", collatz, W, forward=True, smooth=False),
    of("jax.lax.while_loop batched", jax.vmap(lambda x: lax.while_loop(lambda c: c < 5, lambda c: c * 1.5 + x, x)), W,
       smooth=False),
    of("jax.lax.fori_loop", lambda x: lax.fori_loop(0, 5, lambda i, c: c * 0.9 + i * 0.1, x), W),
    of("jax.lax.scan", filtered, V),
    of("jax.lax.scan reverse", lambda x: lax.scan(lambda c, v: (c * v, c + v), 0.7, x, reverse=True), W),
    of("jax.lax.map", lambda x: lax.map(lambda v: jnp.sin(v) / 3, x), V),
    of("jax.lax.cond", lambda x: lax.cond(x[0] > 0.5, jnp.sin, lambda v: v * 0.3, x), V),
    of("jax.lax.switch", lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x), 1, V, smooth=False),
    of("jax.lax.associative_scan", lambda x: lax.associative_scan(jnp.multiply, x), W),
    of("jax.lax.custom_root", newton, jnp.float32(2.5), twice=False),
    of("jax.lax.custom_linear_solve", solved, S, V[:5]),
    of("jax.custom_vjp", clipped, V, twice=False, forward=False),
    of("jax.custom_jvp", doubled, V),
    of("jax.checkpoint", jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * 1.1)), V),
    of("jax.grad of grad", jax.vmap(jax.grad(jax.grad(lambda x: jnp.sin(x) * x**3))), W),
    of("jax.hessian", jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x[::-1])), V[:4]),
    of("jax.jvp", lambda x: jax.jvp(jnp.tanh, (x,), (x,)), V),
    of("jax.linearize", lambda x: jax.linearize(jnp.tanh, x)[1](x), V),
    of("jax.jacrev", jax.jacrev(lambda x: jnp.cumsum(x * x)), V),
    of("jax.new_ref", by_reference, V, smooth=False),  # JAX has no derivative of it
    of("jax.pure_callback", in_python, V, smooth=False),
    of("jax.debug.callback", printed, V),
    of("jax.shard_map", on_a_mesh, V[:4], alone="a mesh of its own"),
    of("jax.experimental.pallas", in_a_kernel, V, smooth=False),
    of("jax.lax.reduce", lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 1.1, (0,)), X, smooth=False),
    of("jax.lax.reduce of two", lambda x, y: lax.reduce((x, y), (jnp.float32(-9), jnp.float32(0)), lambda a, b: (
        jnp.maximum(a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])), (0,)), X, U, smooth=False),
    of("jax.lax.reduce logsumexp", lambda x: lax.reduce(x, -jnp.float32(9), jnp.logaddexp, (0,)), X, smooth=False),
    of("jax.lax.reduce_window sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"), X),
    of("jax.lax.reduce_window max", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), X,
       twice=False),
    of("jax.lax.reduce_window general", lambda x: lax.reduce_window(
        x, jnp.float32(1), lambda a, b: a * b * 0.9, (2, 2), (1, 1), "VALID"), X, smooth=False),
    of("jax.lax.conv", lambda x, w: lax.conv(x, w, (1, 1), "SAME"), normal(1, 2, 5, 5), normal(3, 2, 3, 3)),
    of("jax.lax.conv_general_dilated grouped", lambda x, w: lax.conv_general_dilated(
        x, w, (2,), "SAME", feature_group_count=2), normal(1, 4, 9), normal(4, 2, 3)),
    of("jax.lax.conv_transpose", lambda x, w: lax.conv_transpose(x, w, (2,), "SAME"), normal(1, 5, 2), normal(3, 2, 3)),
    of("jax.lax.ragged_dot", lambda a, b: lax.ragged_dot(a, b, jnp.array([2, 3])), normal(5, 3), normal(2, 3, 4),
       twice=False, batched=False),
    of("jax.lax.batch_matmul", lax.batch_matmul, normal(2, 3, 4), normal(2, 4, 3)),
    of("jax.lax.top_k", lambda x: lax.top_k(x, 3)[0], V),
    of("jax.lax.approx_max_k", lambda x: lax.approx_max_k(x, 2)[0], V),
    of("jax.lax.sort two", lambda x, y: lax.sort((x, y), num_keys=1), V, W),
    of("jax.lax.cumlogsumexp", lax.cumlogsumexp, V, smooth=False),
    of("jax.lax.cummax", lax.cummax, V),
    of("jax.lax.reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), V),
    of("jax.lax.bitcast_convert_type", lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32) * 1.1, V, smooth=False),
    of("jax.lax.clamp", lambda x: lax.clamp(-0.3, x, 0.7), V),
    of("jax.lax.integer_pow", lambda x: x**5 + x**-3, W),
    of("jax.lax.rng_bit_generator", lambda x: x * lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (7,))[1], V,
       smooth=False),
    of("jax.lax.empty", lambda x: lax.empty((3,), jnp.float32).at[:].set(x[:3]) * 1.1, V, smooth=False),
    of("jax.lax.dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, jnp.full(2, 0.1), (2,)), V),
    of("jax.lax.linalg.lu wide", lambda x: lax.linalg.lu(x)[0], X, smooth=False),
    of("jax.lax.linalg.householder_product", lambda x: lax.linalg.householder_product(x[:, :3], x[0, :3]), X.T,
       smooth=False),
    of("jax.lax.linalg.qr pivoted", lambda x: lax.linalg.qr(x, pivoting=True)[:2], X.T, smooth=False),
    of("jax.lax.linalg.tridiagonal", lax.linalg.tridiagonal, S, smooth=False),
    of("jax.lax.platform_dependent", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos) * 1.1, V),
    of("jax.lax.optimization_barrier", lambda x: lax.optimization_barrier(x * 1.1) + 0.1, V),
    of("jax.lax.mulhi", lambda x: lax.mulhi(x.astype(jnp.int32), jnp.int32(3)) + x, V, smooth=False),
]  # fmt: skip

# -- jax.random --------------------------------------------------------------------------------------------------------


def draw(name: str, *args: Any, shape: tuple[int, ...] = (6,)) -> Program:
    def fun(key: Any, *args: Any) -> Any:
        return getattr(jax.random, name)(key, *args, shape=shape)

    return Program(f"jax.random.{name}", lambda: (fun, (KEY, *args)), smooth=False)


RANDOM = [
    *map(draw, names("normal uniform exponential gumbel laplace logistic cauchy maxwell")),
    draw("gamma", 1.5), draw("beta", 1.5, 2.5), draw("poisson", 3.0), draw("bernoulli", 0.3),
    draw("truncated_normal", -1.0, 1.0), draw("t", 3.0), draw("weibull_min", 1.5, 2.0), draw("binomial", 9.0, 0.3),
    draw("categorical", V), draw("dirichlet", W, shape=(2,)), draw("multivariate_normal", V[:5], S, shape=(2,)),
    of("jax.random.permutation", lambda key, x: jax.random.permutation(key, x) * 1.1, KEY, V, smooth=False),
    of("jax.random.choice", lambda key, x: jax.random.choice(key, x, (3,), p=W / W.sum()), KEY, V, smooth=False),
    of("jax.random.ball", lambda key: jax.random.ball(key, 3), KEY, smooth=False),
    of("jax.random.split and fold_in", lambda key, x: sum(
        x * jax.random.normal(jax.random.fold_in(k, 3), x.shape) for k in jax.random.split(key)), KEY, V, smooth=False),
    of("jax.random reparametrized", lambda x: x + 0.3 * jax.random.normal(KEY, x.shape), V),
]  # fmt: skip

# -- jax.experimental --------------------------------------------------------------------------------------------------


def odeint(y: Any) -> Any:
    from jax.experimental.ode import odeint

    return odeint(lambda y, t: jnp.array([y[1], -y[0]]), y, jnp.linspace(0.0, 1.0, 3), rtol=0.05, atol=0.05, mxstep=200)


def jet(x: Any) -> Any:
    from jax.experimental.jet import jet

    return jet(jnp.sin, (x,), ([x, x * 0.3],))


def checked(x: Any) -> Any:
    from jax.experimental import checkify

    def fun(x: Any) -> Any:
        checkify.check(jnp.all(x < 9), "too large")
        return jnp.log(x * 1.3)

    return checkify.checkify(fun)(x)[1]


def sparse(name: str, action: Callable[..., Any], *args: Any, kind: str = "BCOO", **facts: Any) -> Program:
    """A function of a sparse matrix, which is made outside of it: JAX counts entries only there."""

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from jax.experimental import sparse

        dense = jnp.where(jnp.abs(M) > 0.5, M, 0)
        return partial(action, getattr(sparse, kind).fromdense(dense)), args

    return Program(f"jax.experimental.sparse.{name}", make, **facts)


def with_data(matrix: Any, x: Any, y: Any) -> Any:
    """The matrix with other entries."""
    from jax.experimental.sparse import BCOO

    other = BCOO((matrix.data * x[0], matrix.indices), shape=matrix.shape)
    return (other @ y).sum() + other.sum() + (other * 1.1).todense()


def lstm(x: Any, w: Any) -> Any:
    from jax.experimental.rnn import lstm_ref

    zero = jnp.zeros((1, 1, 3))
    return lstm_ref(x, zero, zero, w, jnp.array([4]), 2, 3, 1, 0.0, False)


EXPERIMENTAL = [
    of("jax.experimental.ode.odeint", odeint, jnp.array([1.0, 0.5]), twice=False, forward=False),
    of("jax.experimental.jet.jet", jet, V),
    of("jax.experimental.checkify", checked, W, smooth=False),
    sparse("BCOO matvec", lambda a, x: a @ x, V[:5]),
    sparse("BCOO matmul", lambda a, x: a @ x, M),
    sparse("BCOO arithmetic", with_data, V, V[:5]),
    sparse("BCOO transpose", lambda a, x, y: (a.T @ x) * y, V[:5], W[:5]),
    sparse("BCOO dot sparse", lambda a, x: (a @ a.T).todense() * x, V[:5]),
    sparse("BCSR matvec", lambda a, x: a @ x, V[:5], kind="BCSR"),
    sparse("CSR matvec", lambda a, x: a @ x, V[:5], kind="CSR", smooth=False, batched=False),
    sparse("COO matvec", lambda a, x: a @ x, V[:5], kind="COO", smooth=False, batched=False),
    sparse("sparsify", lambda a, x: _function("jax.experimental.sparse.sparsify")(
        lambda a, x: jnp.sum(a @ x * 1.1))(a, x), V[:5]),
]  # fmt: skip

JAX = [*NUMPY, *NN, *SCIPY, *IMAGES, *LAX, *RANDOM, *EXPERIMENTAL]
