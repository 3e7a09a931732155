"""MaxText: a twin of its ``maybe_quantize_model(model, config)``, and a decoder of its form that trains with it.

    python examples/hosts/maxtext.py

The decoder is a Linen module as MaxText has them: layers in a scan, remat, kernels with logical axes. It trains 20
steps in int8. A function with the roundings written out trains beside it, from the same parameters.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jchop as jc

QTYPES = {"int4": "int4", "int8": "int8", "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp4": "float4_e2m1fn"}


def maybe_quantize_model(model, config):
    """The model with the rules that MaxText has for ``config.quantization``; its own formats beside them."""
    if not config.quantization:
        return model
    if config.quantization not in QTYPES:  # nvfp4, mxfp8_e4m3 and others: scales of groups, which qwix has not here
        spec = config.quantization
        return jc.nn.quantize(model, jc.Rule("decoder/*layers", weight=spec, activation=spec, gradient=spec))
    qtype, rows = QTYPES[config.quantization], config.rows // config.quantization_local_shard_count
    rule = {"module_path": "decoder/.*layers.*", "op_names": ("dot_general",), "bwd_weight_grad_tile_size": rows}
    rule |= {"weight_qtype": qtype, "act_qtype": qtype, "bwd_qtype": qtype}
    return jc.nn.quantize(model, jc.Rule.from_qwix(rule))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        def dense(name, size, *axes):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(size, use_bias=False, name=name, kernel_init=init)

        h = nn.silu(dense("wi_0", 64, "embed", "mlp")(x)) * dense("wi_1", 64, "embed", "mlp")(x)
        return x + dense("wo", 32, "mlp", "embed")(h), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        layers = nn.scan(nn.remat(Layer, prevent_cse=False), **stack, metadata_params={nn.PARTITION_NAME: "layers"})
        return layers(name="layers")(x, None)[0]


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = Decoder(name="decoder")(nn.Embed(64, 32, name="token_embedder")(tokens))
        return nn.Dense(64, use_bias=False, name="logits_dense")(x)


def by_hand(variables, tokens):
    """The same logits; each product has rounded operands, and so have its two gradients."""
    p = variables["params"]
    x, layers = p["token_embedder"]["embedding"][tokens], p["decoder"]["layers"]
    for i in range(3):
        w = {name: layers[name]["kernel"][i] for name in layers}
        x = x + int8_dot(nn.silu(int8_dot(x, w["wi_0"])) * int8_dot(x, w["wi_1"]), w["wo"])
    return x @ p["logits_dense"]["kernel"]


def rounded(matrix, axis):
    """Rounded to int8; the numbers along the axis share a scale."""
    return jc.round_to_format(matrix, f"int8(channel={1 - axis},rule=half_range)")


@jax.custom_vjp
def int8_dot(x, w):
    return (rounded(x.reshape(-1, len(w)), 1) @ rounded(w, 0)).reshape(*x.shape[:-1], -1)


def int8_dot_gradients(residuals, g):
    x, w = residuals
    rows, g = x.reshape(-1, len(w)), g.reshape(-1, w.shape[1])
    return (rounded(g, 1) @ rounded(w, 1).T).reshape(x.shape), rounded(rows, 0).T @ rounded(g, 0)


int8_dot.defvjp(lambda x, w: (int8_dot(x, w), (x, w)), int8_dot_gradients)


def losses(fun, variables, tokens):
    def loss(variables):
        logits = fun(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(variables):
        value, gradients = jax.value_and_grad(loss)(variables)
        return value, jax.tree.map(jnp.subtract, variables, gradients)

    found, step = [], jax.jit(step)
    for _ in range(20):
        value, variables = step(variables)
        found.append(float(value))
    return found


def main():
    tokens = jax.random.randint(jax.random.key(0), (4, 17), 0, 64)
    config = SimpleNamespace(quantization="int8", quantization_local_shard_count=1, rows=64)
    plain = Transformer()
    low = maybe_quantize_model(plain, config)
    variables = nn.meta.unbox(low.init(jax.random.key(1), tokens[:, :-1]))
    ours, hand, wide = (losses(fun, variables, tokens) for fun in (low.apply, by_hand, plain.apply))
    print(f"losses of 20 steps: {ours[0]:.4f} to {ours[-1]:.4f}; float32 to {wide[-1]:.4f}")
    print("largest difference from the losses by hand:", max(abs(a - b) for a, b in zip(ours, hand, strict=True)))
    return ours, hand, wide


if __name__ == "__main__":
    main()
