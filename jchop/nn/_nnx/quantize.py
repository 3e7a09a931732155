"""`quantize`: converts a model into one whose layers round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from flax import nnx

from jchop._common.checks import short_repr
from jchop._quantized.products.rule import Rule
from jchop.nn._nnx.layers import (
    check_norm_wrappers,
    check_program_inputs,
    needs_nnx_program,
    quantize_layers,
    refuse_quantized_layers,
)
from jchop.nn._nnx.programs import quantize_program
from jchop.nn._shared.modes import LayerMode, check_layer_modes, rules_of_mode
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import is_equinox_module, quantize_equinox_module

T = TypeVar("T")


def quantize(
    model: T,
    rules: Rule | Iterable[Rule],
    mode: LayerMode = "qat",
    *,
    inputs: ExampleInputs | None = None,
    rngs: nnx.Rngs | None = None,
    key: jax.Array | None = None,
) -> T:
    """A copy of a model that rounds by rules.

    With `inputs`, or if a rule matches a module with parameters that is no layer of Flax, the *program* of the model is
    quantized: `jchop.quantize_fn` runs each of its methods, and rounds the parameters that reach products, whatever
    modules they are in. A rule then may have `weight`, `bias`, `activation`, `matmul` and the specs of gradients.
    Calls of a module in the model by itself (``model.encoder(x)``) are under the rules, too, as long as these need no
    stream of keys and no kept scales, which are those of the model; else they are an error.

    Without `inputs`, the *layers* of the model are quantized: they become layers of `jchop.nn` with the same name,
    parameters and paths, which round in place of Flax's `rounded_dot_general`, `rounded_conv`, `einsum_op`,
    `attention_fn` and `promote_dtype`, and round their result. A product in the model's own code, ``x @ kernel``, is
    not rounded then. `scale_from`, `calibrate`, `output` and `cache` need layers.

    Of a module of Equinox the program is quantized: the result has the fields, paths and methods of the module, and
    its class is derived from the module's. Packed parameters are QArrays in the places of arrays.

    Layers without a rule do not change; `report` lists the effect on each. A rule rounds the scale and the input of a
    norm only if all layers that it decides are norms. So a rule for products gives the same model in both ways.

    Args:
        model: a module of Flax NNX or of Equinox, or a quantized one, which is then quantized again. Calibrated and
            learned scales (`calibrate`, `Rule.scale_from`) are kept if the rounding of the operand is the same.
        rules: a `Rule`, or several; the first that matches a layer's path applies.
        mode: ``"qat"`` (default): parameters are rounded at each use, with straight-through gradients. ``"ptq"``:
            weights and biases are rounded once and stored packed, as `QuantizedParam`; other tensors are rounded at
            each use. These two compute the same numbers, bit for bit, if the rounding is not stochastic.
            ``"weight_only"``: like ``"ptq"``, and a rule may round nothing else; a rule without a `product` has
            ``"auto"``, so that products read weights as they are stored, and sums differ in last digits from those of
            ``"ptq"``. ``"emulate"``: `jchop.emulate` runs the layer, with
            every operation rounded to the rule's activation, and sums by its matmul.
        inputs: example arguments of the model's call, ``(x,)`` or by name ``{"x": x, "cache": cache}``, or of several
            methods, ``{"decode": (x, step), "encode": {"x": x}}``: arrays or `jax.ShapeDtypeStruct`. With them the
            program is quantized. They are required to pack a model that is not made of plain layers of Flax alone: a
            layer with parameters or methods that other code has given it is none. Default None.
        rngs: `flax.nnx.Rngs`, required if a rule is stochastic: every rounding draws from its own stream, forked from
            the one named by the rule, and advances it, like a dropout. Not for Equinox.
        key: Equinox: a typed key, required to pack if the rounding of a parameter is stochastic. Calls of a module with
            a stochastic rule then take a key each, ``model(x, rounding_key=key)``. Default None.

    Returns:
        The new model. Arrays that did not change are shared with the given one.

    Raises:
        TypeError: for invalid rules or `rngs`.
        ValueError: for a rule that matches no layer, or has a field without effect on those it matches; a layer with
            its own functions instead of Flax's; a stochastic rule without `rngs`; with `inputs`, a layer that rounds
            its parameters already, or a method that is an attribute of one object; other arguments in `inputs`.
        NotImplementedError: for a product that is out of reach, a field that a program does not have, or packed
            parameters that `flax.nnx.SpectralNorm` or `WeightNorm` would normalize.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
        >>> rules = [jc.Rule("layers/2"), jc.Rule(weight="int4(group=all)", activation="int8(group=all)")]
        >>> trained, packed = jc.nn.quantize(model, rules), jc.nn.quantize(model, rules, mode="ptq")
        >>> x = jnp.linspace(-1, 1, 24).reshape(3, 8)
        >>> bool((trained(x) == packed(x)).all()), packed.layers[0].kernel[...].nbytes
        (True, 32)
    """
    all_rules = rules_of_mode(rules, mode)
    if is_equinox_module(model):
        if rngs is not None:
            raise TypeError("rngs is for modules of Flax NNX; one of Equinox takes key=")
        return quantize_equinox_module(model, all_rules, mode, inputs, key)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model={short_repr(model)} must be a module of Flax NNX or Equinox; for one of Linen use "
            "jchop.nn.linen.quantize, for a function of parameters jchop.quantize_fn"
        )
    if key is not None:
        raise TypeError("key is for modules of Equinox; one of Flax NNX takes rngs=")
    result: Any = nnx.merge(*nnx.split(model), copy=True)  # variables of its own, holding the same arrays
    if inputs is None and not needs_nnx_program(result, all_rules, mode):
        quantize_layers(result, all_rules, mode, rngs)
        check_norm_wrappers(result)
    else:
        check_layer_modes(all_rules, mode, program=True)
        refuse_quantized_layers(result, all_rules)
        if inputs is None and mode != "qat":
            check_program_inputs(result, all_rules)
        quantize_program(result, all_rules, mode, inputs, rngs)
    return result
