"""Functions of other packages: layers, optimizers, solvers, differential equations, distributions, samplers."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from programs.program import Program, normal, positive, unit

__all__ = ["PACKAGES"]

PACKAGES: list[Program] = []
X, V, W, S = normal(3, 4), normal(5), unit(5, seed=1), positive(5)
KEY = jax.random.key(3)
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def program(name: str, *more: str, **facts: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """A line of the table: a function that makes a program with a package, which its name begins with."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        PACKAGES.append(Program(name, make, (name.split(".")[0], *more), **facts))
        return make

    return add


def several(names: str, make: Callable[[str], Made], **facts: Any) -> None:
    """Lines that differ in the name of a function or class."""
    for name in names.split():
        PACKAGES.append(Program(name, lambda name=name: make(name.split(".")[-1]), (name.split(".")[0],), **facts))


# -- Flax --------------------------------------------------------------------------------------------------------------


def _linen(module: Any, x: Any) -> Made:
    params = module.init(KEY, x)
    return (lambda params, x: module.apply(params, x)), (params, x)


@program("flax.linen.Dense")
def _() -> Made:
    from flax import linen

    return _linen(linen.Sequential([linen.Dense(6), linen.gelu, linen.LayerNorm(), linen.Dense(2)]), X)


@program("flax.linen.Conv")
def _() -> Made:
    from flax import linen

    pool = lambda x: linen.avg_pool(x, (2, 2), (2, 2))  # noqa: E731
    return _linen(linen.Sequential([linen.Conv(3, (3, 3)), linen.relu, pool, linen.GroupNorm(1)]), unit(1, 6, 6, 2))


@program("flax.linen.BatchNorm", forward=True)
def _() -> Made:
    from flax import linen

    module = linen.BatchNorm(use_running_average=False)
    variables = module.init(KEY, X)
    return (lambda x, v: module.apply(v, x, mutable=["batch_stats"])), (X, variables)


@program("flax.linen.MultiHeadDotProductAttention")
def _() -> Made:
    from flax import linen

    return _linen(linen.MultiHeadDotProductAttention(2), unit(1, 3, 4))


@program("flax.linen.RNN")
def _() -> Made:
    from flax import linen

    return _linen(linen.RNN(linen.LSTMCell(3)), unit(1, 4, 2))


@program("flax.linen.Embed", smooth=False)
def _() -> Made:
    from flax import linen

    return _linen(linen.Embed(5, 3), jnp.array([0, 3, 3]))


@program("flax.linen.Dropout", smooth=False)
def _() -> Made:
    from flax import linen

    module = linen.Dropout(0.5, deterministic=False)
    return (lambda x, key: module.apply({}, x, rngs={"dropout": key})), (X, KEY)


@program("flax.nnx.training step", smooth=False)
def _() -> Made:
    from flax import nnx

    graph, params = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))

    def step(params: Any, x: Any) -> Any:
        grad = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)

    return step, (params, X)


@program("haiku.Linear")
def _() -> Made:
    import haiku as hk

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2])(hk.LayerNorm(-1, True, True)(x))))
    return net.apply, (net.init(KEY, X), X)


@program("haiku.GRU")
def _() -> Made:
    import haiku as hk

    def run(x: Any) -> Any:
        core = hk.GRU(3)
        return hk.dynamic_unroll(core, x, core.initial_state(None))[0]

    net = hk.without_apply_rng(hk.transform(run))
    return net.apply, (net.init(KEY, X), X)


# -- Optax -------------------------------------------------------------------------------------------------------------


def _optimizer(name: str) -> Made:
    import optax

    kind = getattr(optax, name)
    tx = kind(weight_decay=0.1, learning_rate=0.1) if name == "adamw" else kind(0.1)

    def run(params: Any) -> Any:
        state = tx.init(params)
        for _ in range(2):
            grads = jax.grad(lambda p: jnp.sum((p["a"] - 0.3) ** 2) + jnp.sum(p["b"] ** 2))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    return run, ({"a": V, "b": X},)


several("""optax.sgd optax.adam optax.adamw optax.lion optax.rmsprop optax.adafactor optax.lamb optax.adabelief
    optax.nadam optax.yogi""", _optimizer, smooth=False)  # fmt: skip


@program("optax.lbfgs", smooth=False)
def _() -> Made:
    import optax

    def run(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return jnp.sum((x - 0.5) ** 2 * jnp.arange(1.0, 6.0))

        tx = optax.lbfgs()
        state, both = tx.init(x), optax.value_and_grad_from_state(loss)
        for _ in range(2):
            value, grad = both(x, state=state)
            updates, state = tx.update(grad, state, x, value=value, grad=grad, value_fn=loss)
            x = optax.apply_updates(x, updates)
        return x

    return run, (V,)


def _loss(name: str) -> Made:
    import optax

    fun = getattr(optax.losses, name)
    labels = jnp.array([0, 1, 2]) if "integer" in name else jax.nn.one_hot(jnp.array([0, 1, 2]), 4)
    return (lambda x: fun(x, labels)), (X,)


several("""optax.softmax_cross_entropy optax.softmax_cross_entropy_with_integer_labels
    optax.sigmoid_binary_cross_entropy optax.huber_loss optax.cosine_similarity optax.log_cosh""", _loss)  # fmt: skip


@program("optax.ctc_loss")
def _() -> Made:
    import optax

    none = jnp.zeros((1, 4))
    return (lambda x: optax.ctc_loss(x, none, jnp.array([[1, 2]]), jnp.zeros((1, 2)))), (normal(1, 4, 3),)


# -- Equinox -----------------------------------------------------------------------------------------------------------


def _module(name: str) -> Made:
    import equinox as eqx

    module, x = {
        "MLP": lambda: (eqx.nn.MLP(4, 2, 5, 2, key=KEY), X[0]),
        "GRUCell": lambda: (_cell(eqx), X[0]),
        "Conv2d": lambda: (eqx.nn.Conv2d(2, 3, 3, key=KEY), normal(2, 5, 5)),
        "MaxPool2d": lambda: (eqx.nn.MaxPool2d(2), normal(2, 5, 5)),
        "AdaptiveAvgPool1d": lambda: (eqx.nn.AdaptiveAvgPool1d(3), normal(2, 7)),
        "LayerNorm": lambda: (eqx.nn.LayerNorm(4), X[0]),
        "SpectralNorm": lambda: (_spectral(eqx), X[0]),
    }[name]()
    return (lambda x: module(x)), (x,)


def _cell(eqx: Any) -> Callable[[Any], Any]:
    cell = eqx.nn.GRUCell(4, 3, key=KEY)
    return lambda x: cell(x, jnp.zeros(3))


def _spectral(eqx: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        norm, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(eqx.nn.Linear(4, 3, key=KEY), "weight", key=KEY)
        return norm(x, state)[0]

    return run


several(
    """equinox.nn.MLP equinox.nn.GRUCell equinox.nn.Conv2d equinox.nn.LayerNorm equinox.nn.AdaptiveAvgPool1d""", _module
)
several("equinox.nn.MaxPool2d equinox.nn.SpectralNorm", _module, twice=False)


@program("equinox.filter_grad", smooth=False)
def _() -> Made:
    import equinox as eqx

    grad = eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2))
    return (lambda m, x: jax.tree.leaves(grad(m, x))), (eqx.nn.Linear(4, 2, key=KEY), X)


@program("equinox.error_if")
def _() -> Made:
    import equinox as eqx

    return (lambda x: eqx.error_if(x * 1.1, jnp.any(x > 100), "too large") + 0.1), (V,)


@program("equinox.internal.while_loop", forward=False, twice=False)
def _() -> Made:
    import equinox.internal as eqxi

    def run(x: Any) -> Any:
        test, body = (lambda c: c[1] < 4), (lambda c: (c[0] * 0.9 + 0.1, c[1] + 1))
        return eqxi.while_loop(test, body, (x, 0), max_steps=8, kind="checkpointed")[0]

    return run, (V,)


@program("equinox.internal.scan")
def _() -> Made:
    import equinox.internal as eqxi

    return (lambda x: eqxi.scan(lambda c, v: (c * 0.9 + v, c), jnp.float32(0.3), x, kind="lax")), (V,)


@program("equinox.internal.bounded_while_loop")
def _() -> Made:
    import equinox.internal as eqxi

    def run(x: Any) -> Any:
        test, body = (lambda c: c[1] < 4), (lambda c: (c[0] * 0.9 + 0.1, c[1] + 1))
        return eqxi.while_loop(test, body, (x, 0), max_steps=8, kind="bounded")[0]

    return run, (V,)


@program("equinox.filter_custom_vjp", forward=False, twice=False)
def _() -> Made:
    import equinox as eqx

    @eqx.filter_custom_vjp
    def fun(x: Any) -> Any:
        return x * 1.1

    fun.def_fwd(lambda perturbed, x: (fun(x), None))
    fun.def_bwd(lambda residuals, g, perturbed, x: g * 0.7)
    return fun, (V,)


@program("equinox.nondifferentiable", smooth=False)
def _() -> Made:
    import equinox.internal as eqxi

    return (lambda x: eqxi.nondifferentiable(x * 1.1) + eqxi.nontraceable(jnp.float32(1)) * 0.1), (V,)


# -- lineax ------------------------------------------------------------------------------------------------------------


def _lineax(name: str) -> Made:
    import lineax as lx

    symmetric = name in ("Cholesky", "CG")
    solver: Any = {
        "CG": lambda: lx.CG(1e-1, 1e-1, max_steps=20),
        "NormalCG": lambda: lx.Normal(lx.CG(1e-1, 1e-1, max_steps=20)),
        "BiCGStab": lambda: lx.BiCGStab(1e-1, 1e-1, max_steps=20),
        "GMRES": lambda: lx.GMRES(1e-1, 1e-1, max_steps=20),
        "LSMR": lambda: lx.LSMR(1e-1, 1e-1, max_steps=20),
        "Normal": lambda: lx.Normal(lx.Cholesky()),
    }.get(name, lambda: getattr(lx, name)())()
    a, b = S, V
    tags: Any = lx.positive_semidefinite_tag if symmetric else ()
    if name == "Triangular":
        tags = lx.lower_triangular_tag
    elif name == "Diagonal":
        tags = lx.diagonal_tag
    elif name == "Tridiagonal":
        tags = lx.tridiagonal_tag

    def run(a: Any, b: Any) -> Any:
        out = lx.linear_solve(lx.MatrixLinearOperator(a, tags), b, solver, throw=name not in ITERATIVE)
        return out.value

    return run, (a, b)


ITERATIVE = ("CG", "NormalCG", "BiCGStab", "GMRES", "LSMR")
several("""lineax.LU lineax.QR lineax.SVD lineax.Cholesky lineax.CG lineax.BiCGStab lineax.GMRES lineax.Normal
    lineax.Triangular lineax.Diagonal lineax.Tridiagonal lineax.LSMR lineax.NormalCG lineax.AutoLinearSolver""",
    lambda name: _lineax(name) if name != "AutoLinearSolver" else _auto(), twice=False)  # fmt: skip


def _auto() -> Made:
    import lineax as lx

    def run(a: Any, b: Any) -> Any:
        return lx.linear_solve(lx.MatrixLinearOperator(a), b, lx.AutoLinearSolver(well_posed=None)).value

    return run, (normal(4, 3), normal(4))


@program("lineax.JacobianLinearOperator", twice=False)
def _() -> Made:
    import lineax as lx

    def run(x: Any) -> Any:
        operator = lx.JacobianLinearOperator(lambda y, _: y + 0.1 * jnp.sin(y), x)
        return lx.linear_solve(operator, x, lx.LU()).value

    return run, (V,)


# -- optimistix --------------------------------------------------------------------------------------------------------


def _root(name: str) -> Made:
    import optimistix as optx

    solver = getattr(optx, name)(rtol=3e-2, atol=3e-2)

    def run(y: Any, a: Any) -> Any:
        fun = (lambda y, a: 0.5 * jnp.cos(y) * a) if name == "FixedPointIteration" else (lambda y, a: y**3 + y - a)
        solve = optx.fixed_point if name == "FixedPointIteration" else optx.root_find
        return solve(fun, solver, y, a, max_steps=32, throw=False).value

    return run, (W, V)


several("optimistix.Newton optimistix.Chord optimistix.FixedPointIteration", _root, twice=False)


@program("optimistix.Bisection", twice=False)
def _() -> Made:
    import optimistix as optx

    def run(a: Any) -> Any:
        solver, options = optx.Bisection(rtol=3e-2, atol=3e-2), {"lower": 0.0, "upper": 2.0}
        return optx.root_find(
            lambda y, a: y**3 - a, solver, jnp.float32(1), a, options, max_steps=32, throw=False
        ).value

    return run, (jnp.float32(1.5),)


def _least(name: str) -> Made:
    import optimistix as optx

    solver = getattr(optx, name)(rtol=3e-2, atol=3e-2)
    t = jnp.linspace(0.0, 1.0, 8)
    data = jnp.exp(-1.5 * t) * 0.8

    def residual(y: Any, data: Any) -> Any:
        return y[0] * jnp.exp(-y[1] * t) - data

    def run(y: Any, data: Any) -> Any:
        return optx.least_squares(residual, solver, y, data, max_steps=32, throw=False).value

    return run, (jnp.array([0.5, 1.0]), data)


several("optimistix.LevenbergMarquardt optimistix.GaussNewton optimistix.Dogleg optimistix.IndirectLevenbergMarquardt",
        _least, twice=False)  # fmt: skip


def _minimum(name: str) -> Made:
    import optimistix as optx

    extra = {"learning_rate": 0.1} if name == "GradientDescent" else {}
    solver = getattr(optx, name)(rtol=3e-2, atol=3e-2, **extra)

    def run(y: Any, a: Any) -> Any:
        fun = lambda y, a: jnp.sum((y - a) ** 2 * jnp.arange(1.0, 6.0)) / 4  # noqa: E731
        return optx.minimise(fun, solver, y, a, max_steps=32, throw=False).value

    return run, (V, W)


several("optimistix.BFGS optimistix.NonlinearCG optimistix.NelderMead optimistix.GradientDescent optimistix.LBFGS",
        _minimum, twice=False)  # fmt: skip

# -- diffrax -----------------------------------------------------------------------------------------------------------


def _diffrax(name: str) -> Made:
    import diffrax as dfx

    implicit = "Kvaerno" in name or "Implicit" in name
    controller = dfx.PIDController(rtol=3e-2, atol=3e-2, dtmin=2.0**-6)
    adaptive = name in ("Tsit5", "Dopri5", "Dopri8", "Heun", "Kvaerno3", "Kvaerno5", "Bosh3")

    def run(y: Any, rate: Any) -> Any:
        import optimistix as optx

        given: dict[str, Any] = {}
        if implicit:
            given["root_finder"] = dfx.VeryChord(rtol=3e-2, atol=3e-2) if adaptive else optx.Newton(3e-2, 3e-2)
        solver = getattr(dfx, name)(**given)
        term = dfx.ODETerm(lambda t, y, rate: jnp.stack([y[1], -rate * y[0] - 0.1 * y[1]]))
        return dfx.diffeqsolve(
            term, solver, 0.0, 1.0, 0.125, y, rate, max_steps=128, throw=False,
            stepsize_controller=controller if adaptive else dfx.ConstantStepSize(),
            saveat=dfx.SaveAt(ts=jnp.array([0.5, 1.0])),
        ).ys  # fmt: skip

    return run, (jnp.array([1.0, 0.5]), jnp.float32(1.5))


several("""diffrax.Euler diffrax.Heun diffrax.Tsit5 diffrax.Dopri5 diffrax.Dopri8 diffrax.Bosh3 diffrax.Kvaerno3
    diffrax.Kvaerno5 diffrax.ImplicitEuler diffrax.Ralston""", _diffrax, twice=False, forward=False)  # fmt: skip


@program("diffrax.sde", twice=False, forward=False)
def _() -> Made:
    import diffrax as dfx

    def run(y: Any) -> Any:
        path = dfx.VirtualBrownianTree(0.0, 1.0, tol=0.05, shape=(), key=KEY)
        drift, noise = dfx.ODETerm(lambda t, y, _: -y), dfx.ControlTerm(lambda t, y, _: 0.1 * y, path)
        return dfx.diffeqsolve(
            dfx.MultiTerm(drift, noise), dfx.Euler(), 0.0, 1.0, 0.125, y, max_steps=64, throw=False
        ).ys

    return run, (jnp.float32(0.7),)


@program("diffrax.BacksolveAdjoint", twice=False, forward=False)
def _() -> Made:
    import diffrax as dfx

    def run(y: Any) -> Any:
        term = dfx.ODETerm(lambda t, y, _: -y)
        adjoint = dfx.BacksolveAdjoint()
        return dfx.diffeqsolve(term, dfx.Heun(), 0.0, 1.0, 0.125, y, max_steps=64, throw=False, adjoint=adjoint).ys

    return run, (jnp.float32(0.7),)


@program("diffrax.event", smooth=False)
def _() -> Made:
    import diffrax as dfx
    import optimistix as optx

    def run(y: Any) -> Any:
        term = dfx.ODETerm(lambda t, y, _: jnp.array([y[1], -1.0]))
        event = dfx.Event(lambda t, y, args, **_: y[0], optx.Newton(3e-2, 3e-2))
        return dfx.diffeqsolve(term, dfx.Heun(), 0.0, 4.0, 0.125, y, max_steps=64, throw=False, event=event).ys

    return run, (jnp.array([0.5, 0.25]),)


@program("diffrax.CubicInterpolation", twice=False)
def _() -> Made:
    import diffrax as dfx

    def run(y: Any) -> Any:
        t = jnp.linspace(0.0, 1.0, 5)
        return dfx.CubicInterpolation(t, dfx.backward_hermite_coefficients(t, y)).evaluate(0.3)

    return run, (V,)


# -- jaxopt ------------------------------------------------------------------------------------------------------------


def _jaxopt(name: str) -> Made:
    import jaxopt

    def loss(x: Any, a: Any) -> Any:
        return jnp.sum((x - a) ** 2 * jnp.arange(1.0, 6.0)) / 4

    given: dict[str, Any] = {"maxiter": 5, "tol": 3e-2, "implicit_diff": False, "unroll": True}
    if name in ("LevenbergMarquardt", "GaussNewton"):
        given.pop("unroll")
        given.pop("implicit_diff")
        solver = getattr(jaxopt, name)(lambda x, a: (x - a) * jnp.arange(1.0, 6.0) / 4, maxiter=5)
    elif name == "ProjectedGradient":
        solver = jaxopt.ProjectedGradient(loss, jaxopt.projection.projection_non_negative, **given)
        return (lambda x, a: solver.run(x, None, a).params), (V, W)
    elif name == "ProximalGradient":
        solver = jaxopt.ProximalGradient(loss, jaxopt.prox.prox_lasso, **given)
        return (lambda x, a: solver.run(x, 0.1, a).params), (V, W)
    elif name == "AndersonAcceleration":
        solver = jaxopt.AndersonAcceleration(lambda x, a: 0.5 * jnp.cos(x) * a, **given)
    else:
        solver = getattr(jaxopt, name)(loss, **given)
    return (lambda x, a: solver.run(x, a).params), (V, W)


several("""jaxopt.GradientDescent jaxopt.LBFGS jaxopt.BFGS jaxopt.NonlinearCG jaxopt.ProjectedGradient
    jaxopt.ProximalGradient jaxopt.AndersonAcceleration jaxopt.LevenbergMarquardt jaxopt.GaussNewton""",
    _jaxopt, smooth=False)  # fmt: skip


@program("jaxopt.projection_simplex")
def _() -> Made:
    import jaxopt

    return jaxopt.projection.projection_simplex, (V,)


@program("jaxopt.implicit differentiation", smooth=False)
def _() -> Made:
    import jaxopt

    def run(a: Any) -> Any:
        solver = jaxopt.GradientDescent(lambda x, a: jnp.sum((x - a) ** 2 + 0.1 * x**2), maxiter=5, tol=3e-2)
        return jax.grad(lambda a: solver.run(V, a).params.sum())(a)

    return run, (W,)


# -- probability -------------------------------------------------------------------------------------------------------


@program("tinygp.GaussianProcess")
def _() -> Made:
    import tinygp

    def run(scale: Any, x: Any, y: Any) -> Any:
        gp = tinygp.GaussianProcess(tinygp.kernels.ExpSquared(scale), x, diag=0.1)
        return gp.log_probability(y)

    return run, (jnp.float32(0.7), jnp.linspace(0.0, 2.0, 5), V)


@program("tinygp.condition")
def _() -> Made:
    import tinygp

    def run(scale: Any, x: Any, y: Any) -> Any:
        gp = tinygp.GaussianProcess(tinygp.kernels.Matern32(scale), x, diag=0.1)
        return gp.condition(y, x[:2] + 0.1).gp.loc

    return run, (jnp.float32(0.7), jnp.linspace(0.0, 2.0, 5), V)


@program("tinygp.kernels.quasisep", twice=False)
def _() -> Made:
    import tinygp

    def run(scale: Any, x: Any, y: Any) -> Any:
        return tinygp.GaussianProcess(tinygp.kernels.quasisep.Matern32(scale), x, diag=0.1).log_probability(y)

    return run, (jnp.float32(0.7), jnp.linspace(0.0, 2.0, 5), V)


def _distribution(name: str) -> Made:
    import distrax

    made: dict[str, Callable[[Any], Any]] = {
        "Normal": lambda a: distrax.Normal(a, 0.5),
        "Gamma": lambda a: distrax.Gamma(a, 1.5),
        "Categorical": lambda a: distrax.Categorical(logits=a),
        "MultivariateNormalDiag": lambda a: distrax.MultivariateNormalDiag(a, a + 1),
        "Transformed": lambda a: distrax.Transformed(distrax.Normal(a, 0.5), distrax.Tanh()),
    }

    def run(a: Any, key: Any) -> Any:
        distribution = made[name](a)
        sample, log = distribution.sample_and_log_prob(seed=key, sample_shape=(3,))
        return sample, log, distribution.log_prob(sample)

    return run, (W, KEY)


several("distrax.Normal distrax.Gamma distrax.Categorical distrax.MultivariateNormalDiag distrax.Transformed",
        _distribution, smooth=False)  # fmt: skip


@program("distrax.RationalQuadraticSpline")
def _() -> Made:
    import distrax

    return (lambda p, x: distrax.RationalQuadraticSpline(p, 0.0, 1.0).forward_and_log_det(x)), (normal(13), W)


def _numpyro(name: str) -> Made:
    import numpyro.distributions as dist

    made: dict[str, Callable[[Any], Any]] = {
        "Normal": lambda a: dist.Normal(a, 0.5),
        "Beta": lambda a: dist.Beta(a + 1, 1.5),
        "StudentT": lambda a: dist.StudentT(3.0, a),
        "LKJ": lambda a: dist.LKJCholesky(3, 1.0 + a[0]),
        "Dirichlet": lambda a: dist.Dirichlet(a + 1),
        "MixtureSameFamily": lambda a: dist.MixtureSameFamily(dist.Categorical(logits=a), dist.Normal(a, 0.5)),
    }

    def run(a: Any, key: Any) -> Any:
        distribution = made[name](a)
        sample = distribution.sample(key)
        return sample, distribution.log_prob(sample)

    return run, (W, KEY)


several("""numpyro.Normal numpyro.Beta numpyro.StudentT numpyro.LKJ numpyro.Dirichlet numpyro.MixtureSameFamily""",
        _numpyro, smooth=False)  # fmt: skip


@program("numpyro.log_density", smooth=False)
def _() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def model(x: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(mean, 0.5), obs=x)

    return (lambda x, mean: log_density(model, (x,), {}, {"mean": mean})[0]), (V, jnp.float32(0.3))


@program("blackjax.hmc", smooth=False)
def _() -> Made:
    import blackjax

    def run(x: Any, key: Any) -> Any:
        kernel = blackjax.hmc(lambda x: -0.5 * jnp.sum(x**2), 0.1, jnp.ones(5), 3)
        return kernel.step(key, kernel.init(x))[0].position

    return run, (V, KEY)


@program("blackjax.nuts", smooth=False)
def _() -> Made:
    import blackjax

    def run(x: Any, key: Any) -> Any:
        kernel = blackjax.nuts(lambda x: -0.5 * jnp.sum(x**2), 0.25, jnp.ones(5), max_num_doublings=3)
        return kernel.step(key, kernel.init(x))[0].position

    return run, (V, KEY)


@program("blackjax.mala", smooth=False)
def _() -> Made:
    import blackjax

    def run(x: Any, key: Any) -> Any:
        kernel = blackjax.mala(lambda x: -0.5 * jnp.sum(x**2), 0.1)
        return kernel.step(key, kernel.init(x))[0].position

    return run, (V, KEY)


# -- others ------------------------------------------------------------------------------------------------------------


@program("chex.scalar_jax2dict", smooth=False)
def _() -> Made:
    import chex

    @chex.dataclass
    class State:
        a: Any
        b: Any

    return (lambda x: State(a=x * 1.1, b=jnp.sin(x))), (V,)


@program("mctx.muzero_policy", smooth=False)
def _() -> Made:
    import mctx

    def run(key: Any, logits: Any, value: Any) -> Any:
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=value)

        def step(params: Any, key: Any, action: Any, embedding: Any) -> Any:
            out = mctx.RecurrentFnOutput(
                reward=embedding * 0.1, discount=jnp.full(1, 0.9), prior_logits=logits, value=embedding * 0.7
            )
            return out, embedding * 0.9

        return mctx.muzero_policy((), key, root, step, num_simulations=3).action_weights

    return run, (KEY, normal(1, 3), jnp.ones(1))


@program("dm_pix.adjust_contrast")
def _() -> Made:
    import dm_pix as pix

    return (lambda x: pix.gaussian_blur(pix.adjust_hue(pix.adjust_contrast(x, 1.3), 0.1), 1.0, 3)), (unit(6, 6, 3),)
