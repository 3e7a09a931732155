"""Keras 3 on JAX: train with int4 kernels by the paths of its variables, pack, and write the numbers back.

    pip install keras==3.15.1
    python examples/hosts/keras_train.py

The model stays a function of its variables (`stateless_call`). A loop with the roundings written out trains beside it.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

import jchop as jc

SPEC = "int4(group=32)"


def losses(call, params, x, y):
    """The losses of 20 steps, and the parameters after them."""

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((call(p, x) - y) ** 2))(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    found = []
    for _ in range(20):
        value, params = step(params)
        found.append(float(value))
    return found, params


def main():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((32,)), dense(64, activation="relu"), dense(4)])
    variables = {v.path: v for v in model.trainable_variables}
    params = {path: v.value for path, v in variables.items()}

    def call(params, x):
        return model.stateless_call([params[path] for path in variables], model.non_trainable_variables, x)[0]

    def by_hand(params, x):
        w, b, v, c = (params[path] for path in variables)  # kernel and bias of both layers
        w, v = (jc.round_to_format(each.T, SPEC).T for each in (w, v))
        return jax.nn.relu(x @ w + b) @ v + c

    x = jax.random.normal(jax.random.key(0), (8, 32))
    low = jc.quantize_fn(call, {"*/kernel": SPEC})
    ours, params_after = losses(low, params, x, jnp.sin(x[:, :4]))
    hand, _ = losses(by_hand, params, x, jnp.sin(x[:, :4]))
    packed = low.pack(params_after, x)
    for path, value in jc.dequantize(packed).items():
        variables[path].assign(value)
    error = float(jnp.abs(model(x) - low(packed, x)).max())
    print(f"losses of 20 steps: {ours[0]:.4f} to {ours[-1]:.4f}")
    print("largest difference from the losses by hand:", max(abs(a - b) for a, b in zip(ours, hand, strict=True)))
    print(f"largest difference of the Keras model from the packed one: {error}")
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (packed, params)]
    print(f"bytes: {sizes[0]:,} packed, {sizes[1]:,} in float32")
    return ours, hand, error


if __name__ == "__main__":
    main()
