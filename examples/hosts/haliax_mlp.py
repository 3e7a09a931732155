"""Haliax: train a module of named axes with int4 weights and int8 activations, in two ways, and pack it.

    pip install --no-deps haliax==1.4.dev453 aqtp==0.9.0 jmp==0.0.4
    pip install equinox jaxtyping safetensors
    python examples/hosts/haliax_mlp.py

`jc.quantize_fn` takes the module as parameters. Or each layer has a `DotGeneralOp` from a rule. A loop with the
roundings written out trains beside both.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.nn import MLP
from haliax.quantization import DefaultDotGeneralOp

import jchop as jc

IN, OUT, BATCH = hax.Axis("features", 32), hax.Axis("classes", 4), hax.Axis("batch", 8)
RULE = jc.Rule(weight="int4(group=32)", activation="int8(group=all)")


class Rounded(DefaultDotGeneralOp):
    """The product of a layer under a rule."""

    rule: jc.Rule = eqx.field(static=True)

    def __call__(self, lhs, rhs, *dims, **more):
        return jc.quantize_fn(lambda w, x: super(Rounded, self).__call__(x, w, *dims, **more), self.rule)(rhs, lhs)


def losses(call, model, x, y):
    """The losses of 20 steps, and the model after them."""

    @eqx.filter_jit
    def step(model):
        value, gradient = eqx.filter_value_and_grad(lambda m: ((call(m, x).array - y) ** 2).mean())(model)
        return value, jax.tree.map(lambda p, g: p if g is None else p - 0.1 * g, model, gradient)

    found = []
    for _ in range(20):
        value, model = step(model)
        found.append(float(value))
    return found, model


def by_hand(model, x):
    """The model with its roundings written out; the axes of a weight are (out, in)."""
    value = x.array
    for number, layer in enumerate(model.layers):
        weight = jc.round_to_format(layer.weight.array, RULE.weight)
        value = jc.round_to_format(value, RULE.activation) @ weight.T + layer.bias.array
        value = value if number == len(model.layers) - 1 else jax.nn.relu(value)
    return hax.named(value, (BATCH, OUT))


def main():
    model = MLP.init(IN, OUT, width=64, depth=1, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), (BATCH, IN))
    y = jnp.sin(x.array[:, :4])
    low = jc.quantize_fn(lambda m, x: m(x), RULE)
    layers = [dataclasses.replace(layer, dot_general=Rounded(RULE)) for layer in model.layers]
    ours, trained = losses(low, model, x, y)
    operator, _ = losses(lambda m, x: m(x), dataclasses.replace(model, layers=layers), x, y)
    hand, _ = losses(by_hand, model, x, y)
    packed = low.pack(trained, x)
    print(f"losses of 20 steps: {ours[0]:.4f} to {ours[-1]:.4f}")
    for name, found in (("quantize_fn", ours), ("DotGeneralOp", operator)):
        error = max(abs(a - b) for a, b in zip(found, hand, strict=True))
        print(f"{name}: largest difference from the losses by hand:", error)
    difference = jnp.abs(low(packed, x).array - low(trained, x).array)
    print("largest difference of the packed module:", float(difference.max()))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(each, eqx.is_array))) for each in (packed, model)]
    print(f"bytes: {sizes[0]:,} packed, {sizes[1]:,} in float32")
    return ours, operator, hand


if __name__ == "__main__":
    main()
