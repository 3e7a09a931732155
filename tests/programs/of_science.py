"""Programs of the sciences: orbits, attitudes, rigid motions, a Riemann solver, options, filters, attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from programs.of_jax import of
from programs.program import Program, normal, positive, unit

Array = jax.Array

# -- mechanics and motions ---------------------------------------------------------------------------------------------


def kepler(state: Array) -> Array:
    """Two bodies: leapfrog steps of half an orbit."""

    def pull(q: Array) -> Array:
        return -q / jnp.sum(q * q) ** 1.5

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        q, v = state
        v = v + 0.05 * pull(q)
        q = q + 0.1 * v
        v = v + 0.05 * pull(q)
        return (q, v), jnp.sum(v * v) / 2 - 1 / jnp.sqrt(jnp.sum(q * q))

    (q, v), energies = lax.scan(step, (state[:2], state[2:]), length=20)
    return jnp.concatenate([q, v, energies[-1:]])


def hamilton(p: Array, q: Array) -> Array:
    """The product of two quaternions."""
    w, x, y, z = p
    a, b, c, d = q
    return jnp.stack([
        w * a - x * b - y * c - z * d,
        w * b + x * a + y * d - z * c,
        w * c - x * d + y * a + z * b,
        w * d + x * c - y * b + z * a,
    ])  # fmt: skip


def attitude(rates: Array, gravity: Array) -> Array:
    """A complementary filter: integrated rates, pulled towards the measured direction of gravity."""

    def step(q: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        rate, seen = now
        w, x, y, z = q
        down = jnp.stack([2 * (x * z - w * y), 2 * (w * x + y * z), w * w - x * x - y * y + z * z])
        seen = seen / jnp.linalg.norm(seen)
        rate = rate + 0.4 * jnp.cross(seen, down)
        q = q + 0.05 * hamilton(q, jnp.concatenate([jnp.zeros(1), rate]))
        q = q / jnp.linalg.norm(q)
        return q, q

    return lax.scan(step, jnp.array([1.0, 0.0, 0.0, 0.0]), (rates, gravity))[1]


def se3(xi: Array) -> Array:
    """The logarithm of a product of two exponentials of rigid motions, as a rotation vector and a translation."""

    def hat(w: Array) -> Array:
        return jnp.array([[0, -w[2], w[1]], [w[2], 0, -w[0]], [-w[1], w[0], 0]])

    def parts(w: Array) -> tuple[Array, Array]:
        angle = jnp.sqrt(w @ w)
        k = hat(w)
        a, b = jnp.sin(angle) / angle, (1 - jnp.cos(angle)) / angle**2
        c = (1 - a) / angle**2
        return jnp.eye(3) + a * k + b * (k @ k), jnp.eye(3) + b * k + c * (k @ k)

    (r1, v1), (r2, v2) = parts(xi[:3]), parts(xi[3:6])
    rotation, shift = r1 @ r2, r1 @ (v2 @ xi[6:9]) + v1 @ xi[9:]
    cosine = (jnp.trace(rotation) - 1) / 2
    angle = jnp.arccos(jnp.clip(cosine, -1, 1))
    axis = jnp.stack([
        rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]
    ])  # fmt: skip
    return jnp.concatenate([axis * (angle / (2 * jnp.sin(angle))), shift])


def van_der_pol(y: Array) -> Array:
    """An ordinary differential equation by the classical method of Runge and Kutta."""

    def rate(y: Array) -> Array:
        return jnp.stack([y[1], 1.5 * (1 - y[0] ** 2) * y[1] - y[0]])

    def step(y: Array, _: None) -> tuple[Array, None]:
        k1 = rate(y)
        k2 = rate(y + 0.05 * k1)
        k3 = rate(y + 0.05 * k2)
        k4 = rate(y + 0.1 * k3)
        return y + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return lax.scan(step, y, length=12)[0]


def hllc(left: Array, right: Array) -> Array:
    """The flux of Harten, Lax and van Leer with a contact wave, for states of density, velocity and pressure."""
    heat = 1.4

    def conserved(state: Array) -> tuple[Array, Array, Array]:
        density, speed, pressure = state
        energy = pressure / (heat - 1) + 0.5 * density * speed * speed
        flux = jnp.stack([density * speed, density * speed * speed + pressure, speed * (energy + pressure)])
        return jnp.stack([density, density * speed, energy]), flux, jnp.sqrt(heat * pressure / density)

    (u_left, f_left, c_left), (u_right, f_right, c_right) = conserved(left), conserved(right)
    s_left = jnp.minimum(left[1] - c_left, right[1] - c_right)
    s_right = jnp.maximum(left[1] + c_left, right[1] + c_right)
    m_left, m_right = left[0] * (s_left - left[1]), right[0] * (s_right - right[1])
    contact = (right[2] - left[2] + left[1] * m_left - right[1] * m_right) / (m_left - m_right)

    def star(state: Array, u: Array, flux: Array, s: Array, mass: Array) -> Array:
        factor = mass / (s - contact)
        energy = u[2] / state[0] + (contact - state[1]) * (contact + state[2] / mass)
        return flux + s * (factor * jnp.stack([jnp.ones_like(s), contact, energy]) - u)

    inside = jnp.where(
        contact >= 0, star(left, u_left, f_left, s_left, m_left), star(right, u_right, f_right, s_right, m_right)
    )
    return jnp.where(s_left >= 0, f_left, jnp.where(s_right <= 0, f_right, inside))


# -- statistics, finance, learning -------------------------------------------------------------------------------------


def black_scholes(spot: Array, strike: Array, volatility: Array) -> Array:
    """The prices of calls, with their derivatives by the price and the volatility of the stock."""

    def price(spot: Array, strike: Array, volatility: Array) -> Array:
        spread = volatility * jnp.sqrt(0.75)
        d1 = (jnp.log(spot / strike) + (0.02 + volatility**2 / 2) * 0.75) / spread
        d2 = d1 - spread

        def below(d: Array) -> Array:
            return 0.5 * (1 + lax.erf(d / 1.4142135))

        return spot * below(d1) - strike * jnp.exp(-0.02 * 0.75) * below(d2)

    value_and_greeks = jax.value_and_grad(price, argnums=(0, 2))
    value, (delta, vega) = jax.vmap(value_and_greeks)(spot, strike, volatility)
    return jnp.stack([value, delta, vega])


def kalman(seen: Array) -> Array:
    """A Kalman filter of position and speed, seen with noise."""
    move, noise = jnp.array([[1.0, 0.1], [0.0, 1.0]]), 0.02 * jnp.eye(2)

    def step(state: tuple[Array, Array], y: Array) -> tuple[tuple[Array, Array], Array]:
        mean, cov = state
        mean, cov = move @ mean, move @ cov @ move.T + noise
        gain = cov[:, 0] / (cov[0, 0] + 0.3)
        mean = mean + gain * (y - mean[0])
        cov = cov - jnp.outer(gain, cov[0])
        return (mean, cov), mean

    return lax.scan(step, (jnp.zeros(2), jnp.eye(2)), seen)[1]


def flash_attention(query: Array, key: Array, value: Array) -> Array:
    """Attention in blocks of keys, with the running maximum and sum of the softmax."""

    def step(state: tuple[Array, Array, Array], block: tuple[Array, Array]) -> Any:
        most, total, out = state
        scores = query @ block[0].T * 0.5
        new = jnp.maximum(most, scores.max(1))
        weights, factor = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
        total = total * factor + weights.sum(1)
        return (new, total, out * factor[:, None] + weights @ block[1]), None

    count = query.shape[0]
    start = jnp.full(count, -30.0), jnp.zeros(count), jnp.zeros_like(query)
    (_, total, out), _ = lax.scan(step, start, (key.reshape(4, -1, key.shape[1]), value.reshape(4, -1, key.shape[1])))
    return out / total[:, None]


def conjugate_gradients(matrix: Array, b: Array) -> Array:
    """Steps of the method of conjugate gradients."""

    def step(state: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], Array]:
        x, r, p, old = state
        q = matrix @ p
        alpha = old / jnp.dot(p, q)
        x, r = x + alpha * p, r - alpha * q
        new = jnp.dot(r, r)
        return (x, r, r + new / old * p, new), new

    return lax.scan(step, (jnp.zeros_like(b), b, b, jnp.dot(b, b)), length=3)[0][0]


def cross_entropy(weights: Array, x: Array, labels: Array) -> Array:
    """The gradient of the cross entropy of a softmax by the weights of a linear layer."""

    def loss(weights: Array) -> Array:
        logits = x @ weights
        logits = logits - lax.stop_gradient(logits.max(1, keepdims=True))
        return jnp.mean(jnp.log(jnp.exp(logits).sum(1)) - jnp.sum(jax.nn.one_hot(labels, 5) * logits, 1))

    return jax.grad(loss)(weights)


SCIENCE: list[Program] = [
    of("science.kepler", kepler, jnp.array([0.9, 0.1, -0.2, 1.1])),
    of("science.attitude", attitude, 0.6 * normal(12, 3), normal(12, 3, seed=1) * 0.1 + jnp.array([0.1, 0.2, 1.0])),
    of("science.se3", se3, 0.5 * normal(12, seed=2)),
    of("science.van_der_pol", van_der_pol, jnp.array([0.7, -0.4])),
    of("science.hllc", jax.vmap(hllc), unit(16, 3) + 0.1, unit(16, 3, seed=1) + 0.1),
    of("science.black_scholes", black_scholes, 80 + 40 * unit(16), 80 + 40 * unit(16, seed=1), unit(16, seed=2) / 2),
    of("science.kalman", kalman, normal(12)),
    of("science.flash_attention", flash_attention, normal(6, 4), normal(16, 4, seed=1), normal(16, 4, seed=2)),
    of("science.conjugate_gradients", conjugate_gradients, positive(8), normal(8, seed=1)),
    of("science.cross_entropy", partial(cross_entropy, labels=jnp.asarray(np.arange(12) % 5)), normal(8, 5),
       normal(12, 8, seed=1)),
]  # fmt: skip
