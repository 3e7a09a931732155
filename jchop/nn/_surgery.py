"""`quantize`: a model whose layers round, made from one whose layers do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from flax import nnx

from jchop.nn._layers import Mode, apply
from jchop.nn._rule import Rule, as_rules

Model = TypeVar("Model", bound=nnx.Module)

__all__ = ["quantize"]


def quantize(model: Model, rules: Rule | Iterable[Rule], mode: Mode = "qat", *, rngs: nnx.Rngs | None = None) -> Model:
    """A model that rounds as rules say; the given one stays as it is.

    Layers of Flax become layers of `jchop.nn` of the same name, parameters and paths: what they multiply with
    (`dot_general`, `conv_general_dilated`, `einsum_op`, `attention_fn`), `promote_dtype` and their result are rounded
    there. Nothing is intercepted while the model runs, so a product that the model itself writes, ``x @ kernel``, stays
    as it is; a module with parameters that is no layer of Flax is an error where a rule matches it. Layers that no rule
    matches stay as they are; `report` shows what becomes of each.

    Args:
        model: a module of Flax NNX, or a quantized one, which is then quantized anew. What its layers found or learned
            about scales (`calibrate`, `Rule.scale_from`) goes on where a rule rounds the same to the same.
        rules: a `Rule`, or several, of which the first that matches a layer's path counts.
        mode: ``"qat"``: parameters stay what they are and are rounded each time they are used, with gradients straight
            through (default). ``"ptq"``: weights and biases are rounded now and stored packed, as `QuantizedParam`; all
            else is rounded each time. ``"weight_only"``: likewise, and a rule may round nothing else. These three
            compute the same numbers, bit for bit, where the rounding is not stochastic. ``"emulate"``: a layer is run
            by `jchop.emulate`, every operation in it rounded to the rule's activation, with the sums of its matmul.
        rngs: `flax.nnx.Rngs`, needed where a rule is stochastic: every place draws from a stream of its own, forked
            from the one that the rule names, and advances it as a dropout does.

    Returns:
        The new model. Arrays that did not change are shared with the given one.

    Raises:
        TypeError: for rules that are none, or `rngs` that are no `flax.nnx.Rngs`.
        ValueError: for a rule that matches no layer, or has a field that says nothing for those it matches; a layer
            with functions of its own where Flax's are expected; a stochastic rule without `rngs`.
        NotImplementedError: for a module with parameters that is no known layer, or a product that is out of reach.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
        >>> rules = [jc.nn.Rule("layers/2"), jc.nn.Rule(weight="int4(group=all)", activation="int8(group=all)")]
        >>> trained, packed = jc.nn.quantize(model, rules), jc.nn.quantize(model, rules, mode="ptq")
        >>> x = jnp.linspace(-1, 1, 24).reshape(3, 8)
        >>> bool((trained(x) == packed(x)).all()), packed.layers[0].kernel[...].nbytes
        (True, 32)
    """
    given = as_rules(rules)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model={model!r} must be a module of Flax NNX; for one of Linen use jchop.nn.linen.quantize")
    result: Any = nnx.merge(*nnx.split(model), copy=True)  # variables of its own, holding the same arrays
    apply(result, given, mode, rngs)
    return result
