"""`quantize`: a model of Flax or Equinox that rounds by rules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
from flax import linen, nnx
from jax import Array

from jchop._common.checks import check, check_choice, first_names
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.products.rule import Location, Rule, RuleLike, as_rule_tuple
from jchop._quantized.quantize_fn import check_data_arguments, refuse_codes_with_kept_scales
from jchop.nn._linen.quantized import Quantized
from jchop.nn._nnx.layer_kinds import fork_rounding_stream, pack_param, param_layout, weight_names
from jchop.nn._nnx.layers import (
    NnxLayerRule,
    add_zero_biases,
    check_norm_wrappers,
    entry_parameters,
    nnx_layer_rules,
    quantize_layers,
    refuse_quantized_layers,
)
from jchop.nn._nnx.nodes import ModuleEntry, delete_other_arrays, packed_nnx_variable, replace_nodes
from jchop.nn._nnx.programs import is_nnx_program, quantize_program
from jchop.nn._shared.program_classes import (
    INPUTS_ADVICE,
    ExampleInputs,
    Examples,
    LayerMode,
    ModelCall,
    check_layer_modes,
    rules_of_mode,
)
from jchop.nn._trees.equinox_modules import check_flax_or_equinox, is_equinox_module, quantize_equinox_module

T = TypeVar("T")


@overload
def quantize(model: linen.Module, rules: RuleLike) -> Quantized: ...
@overload
def quantize(
    model: T, rules: RuleLike, mode: LayerMode = ..., *, inputs: ExampleInputs | None = ...,
    call: ModelCall | None = ..., batches: Iterable[Any] | None = ..., steps: Any = ..., rngs: nnx.Rngs | None = ...,
    donate: bool = ..., key: Array | None = ..., return_report: Literal[False] = ...,
) -> T: ...  # fmt: skip
@overload
def quantize(
    model: T, rules: RuleLike, mode: LayerMode, *, inputs: ExampleInputs | None = ..., call: ModelCall | None = ...,
    batches: Iterable[Any], steps: Any = ..., rngs: nnx.Rngs | None = ..., donate: bool = ...,
    key: Array | None = ..., return_report: Literal[True],
) -> tuple[T, Any]: ...  # fmt: skip
def quantize(
    model: Any,
    rules: RuleLike,
    mode: LayerMode = "qat",
    *,
    inputs: ExampleInputs | None = None,
    call: ModelCall | None = None,
    batches: Iterable[Any] | None = None,
    steps: Any = None,
    rngs: nnx.Rngs | None = None,
    donate: bool = False,
    key: Array | None = None,
    return_report: bool = False,
) -> Any:
    """Copies a model and makes the copy round by rules.

    With `inputs` or `batches`, the *program* of the model is quantized. So it is if a rule matches a module with
    parameters that is no layer of Flax. `jchop.quantize_fn` then runs each of its methods, and rounds the parameters
    that reach products, whatever modules they are in. A rule then may have `weight`, `bias`, `activation`, `matmul` and
    the specs of gradients. Calls of a module in the model by itself (``model.encoder(x)``) are under the rules, too.
    They are an error if they need a stream of keys or kept scales, which belong to the model.

    Otherwise the *layers* of the model are quantized. They become layers of `jchop.nn` with the same name, parameters
    and paths, and round their result. They round in place of Flax's `dot_general`, `conv_general_dilated`, `einsum_op`,
    `attention_fn` and `promote_dtype`. A product in the model's own code, ``x @ kernel``, is not rounded then. `output`
    and `cache` need layers.

    For a module of Equinox the program is quantized. The result has the fields, paths and methods of the module, and
    its class is derived from the module's. Packed parameters are QArrays in the places of arrays.

    For a module of Flax Linen the program is quantized, too. Its variables are apart, so there are no further
    arguments. The result has `init` and `apply` as the module has, and `start`, `pack`, `calibrate` and `report` of
    variables. Rules may have an `output`, for the results of modules with parameters of their own, and a `cache`, for
    Flax's attention with ``decode=True``. Paths are paths of the variables (``"block/attention/query"``).

    Layers without a rule do not change; `report` lists the effect on each. A rule rounds the scale and the input of a
    norm only if all layers that it decides are norms. So a rule for products has the same effect on layers and on a
    program.

    Args:
        model: a module of Flax or of Equinox, or a quantized one, which is then quantized again. Calibrated and learned
            scales (`calibrate`, `Rule.scale_from`) are kept if the rounding of the operand is the same.
        rules: a `Rule`, or several. The first that matches a layer's path applies.
        mode: ``"qat"`` (default) rounds parameters at each use, with straight-through gradients. ``"ptq"`` rounds
            weights and biases once and stores them packed, as `QuantizedParam`; other tensors are rounded at each use.
            These two compute the same numbers, bit for bit, if the rounding is not stochastic. ``"weight_only"`` is
            like ``"ptq"``, and a rule may round nothing else. A rule without a `product` then has ``"auto"``: products
            read weights as they are stored, and sums differ in last digits from ``"ptq"``. ``"emulate"`` runs the layer
            by `jchop.emulate`, with every operation rounded to the rule's activation, and sums by its matmul.
        inputs: example arguments of the model's call, ``(x,)`` or by name ``{"x": x, "cache": cache}``. Or of several
            methods, ``{"decode": (x, step), "encode": {"x": x}}``. Arrays or `jax.ShapeDtypeStruct`. With them the
            program is quantized. Parameters that no call reaches stay as they are. Default None: the first batch.
        call: a function of the model, and of `inputs` or of a batch. It is run in place of the model's call:
            ``lambda m, *batch: m.decode(*batch)``. For a module of Equinox whose call is for one example,
            ``lambda m, x: jax.vmap(m)(x)``. Default None.
        batches: data, for the modes ``"ptq"`` and ``"weight_only"``: the arguments of each call, tuples, or the only
            argument. Each weight is rounded so that its product has small errors on them. Default None.
        steps: the steps of the rounding, as in `jchop.QuantizedFunction.pack`: ``[jc.ptq.clip(), jc.ptq.gptq()]``. A
            layer of Flax without a bias gets one for `jchop.ptq.correct_biases`. Default: as there.
        rngs: `flax.nnx.Rngs`, required if a rule is stochastic. Every rounding draws from its own stream, forked from
            the one named by the rule, and advances it, like a dropout. Not for Equinox.
        donate: whether each array of `model` that is packed is deleted as soon as its codes exist, so that memory does
            not hold all of both. The model cannot be used afterwards. With `batches` and `jchop.ptq.sequential`, memory
            holds the statistics of one input at a time, too. Default False.
        key: for Equinox, a typed key, required to pack if the rounding of a parameter is stochastic. Calls of a module
            with a stochastic rule then need a key each, ``model(x, rounding_key=key)``. Default None.
        return_report: whether a `jchop.ptq.PtqReport` is returned, too; it needs `batches`. Default False.

    Returns:
        The new model, or the model and the report. Arrays that did not change are shared with the given one.

    Raises:
        TypeError: for invalid rules or `rngs`.
        ValueError: for a rule that matches no layer, or has a field without effect on the layers it matches. For a
            layer with its own functions instead of Flax's, a stochastic rule without `rngs`, other arguments in
            `inputs`, or `batches` in another mode. With `inputs`, for a layer that rounds its parameters already, or a
            method that is an attribute of one object.
        NotImplementedError: for a product that is out of reach, or a field that a program does not have. For packed
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
        >>> better, report = jc.nn.quantize(model, rules, "ptq", batches=[x], return_report=True)
        >>> [row.path for row in report.weights], better(x).shape
        (['layers/0/kernel', 'layers/2/kernel'], (3, 2))
    """
    further = {
        "inputs": inputs, "call": call, "batches": batches, "steps": steps, "rngs": rngs, "key": key,
        "donate": donate or None, "return_report": return_report or None,
    }  # fmt: skip
    check_choice("mode", mode, ("qat", "ptq", "weight_only", "emulate"))
    if isinstance(model, linen.Module):
        names = ["mode"] * (mode != "qat") + [name for name, value in further.items() if value is not None]
        if names:
            raise ValueError(
                f"{', '.join(names)}: the variables of a module of Linen are apart; write jchop.nn.quantize(module, "
                "rules).pack(variables, *args), with batches=..., steps=... to round with data"
            )
        all_rules = as_rule_tuple(rules)
        refuse_codes_with_kept_scales(all_rules)
        return Quantized(model, all_rules)
    if batches is None:
        check_data_arguments(steps=steps, return_report=return_report)
        check(call is None or inputs is not None, "call: pass what it takes, as inputs=(x,) or batches=[(x,), (x,)]")
    elif mode not in ("ptq", "weight_only"):
        raise ValueError(
            f"batches: mode={mode!r} rounds weights in each call; with data use mode='ptq' or 'weight_only'"
        )
    check(not donate or mode in ("ptq", "weight_only"), f"donate=True: mode={mode!r} packs nothing; leave donate out")
    all_rules, examples = rules_of_mode(rules, mode), Examples(inputs, call, batches, steps, donate)
    if is_equinox_module(model):
        if rngs is not None:
            raise TypeError("rngs is for modules of Flax NNX; one of Equinox takes key=")
        result, report = quantize_equinox_module(model, all_rules, mode, key, examples)
        return (result, report) if return_report else result
    check_flax_or_equinox("model", model, "; for a function of parameters use jchop.quantize_fn")
    if key is not None:
        raise TypeError("key is for modules of Equinox; one of Flax NNX takes rngs=")
    if mode not in ("qat", "emulate") and not examples.given and any(map(_is_shape, jax.tree.leaves(nnx.state(model)))):
        return nnx.eval_shape(lambda model: quantize(model, all_rules, mode, rngs=rngs), model)
    result: Any = nnx.merge(*nnx.split(model), copy=True)  # variables of its own, holding the same arrays
    is_program, traced = is_nnx_program(result), examples.given
    decisions = [] if mode == "emulate" or is_program or batches is not None else nnx_layer_rules(result, all_rules)
    custom = [
        (one.entry, one.rule) for one in decisions if one.kind is None and one.rule is not None and one.rule.rounds
    ]
    if not traced and not custom and (mode == "emulate" or not is_program):
        if donate:
            _check_before_donation(result, decisions, all_rules, mode, rngs)
        quantize_layers(result, all_rules, mode, rngs, donate)
        check_norm_wrappers(result)
        return result
    check_layer_modes(all_rules, mode, program=True)
    refuse_quantized_layers(result, all_rules)
    if not traced and mode != "qat" and custom:
        if any(rule.scale_from is not None for rule in all_rules) or not _pack_plain_layers(result, decisions, rngs):
            _refuse_to_pack(custom)
        if donate:
            delete_other_arrays(model, result)
        check_norm_wrappers(result)
        mode = "qat"  # other parameters are rounded in each call
    if batches is not None and any(
        getattr(step, "field", "") == "biases" for step in (steps if isinstance(steps, Sequence) else (steps,))
    ):
        add_zero_biases(result, all_rules)
    report = quantize_program(result, all_rules, mode, rngs, examples)
    return (result, report) if return_report else result


def _check_before_donation(
    model: Any, decisions: Sequence[NnxLayerRule], rules: Sequence[Rule], mode: str, rngs: nnx.Rngs | None
) -> None:
    """Raise the errors of a model that is packed, before any array is deleted."""

    def run(model: Any) -> Any:
        quantize_layers(model, rules, mode, nnx.clone(rngs) if rngs is not None else None)
        check_norm_wrappers(model)
        return model

    nnx.eval_shape(run, model)
    for entry, kind, _, _, rule in decisions:
        if kind is None or rule is None:
            continue
        for name in kind.parameters:
            variable = getattr(entry.module, name)
            if variable is not None and kind.spec(rule, name) is not None:
                check_finite(variable.get_value(), f"{name} of the {type(entry.module).__name__} at {entry.paths[0]!r}")


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _pack_plain_layers(model: Any, decisions: Sequence[NnxLayerRule], rngs: nnx.Rngs | None) -> bool:
    """Pack the weights of plain layers of Flax, in place, as the traced program of the model would.

    Returns:
        Whether that is known of all of them, and each rule for weights has packed one; if not, nothing has changed.
    """
    packed: dict[int, nnx.Variable] = {}
    wide, needed, used = [], set[int](), set[int]()
    for entry, kind, numbers, rule, _ in decisions:
        if rule is None or rule.weight is None or not (kind is None or kind.operation):
            continue
        needed |= {*numbers}
        if kind is None:
            own = entry_parameters(entry).items()
            wide += [
                "/".join(filter(None, (entry.paths[0], name))) for name, value in own if value.get_value().ndim > 1
            ]
            continue
        layer: Any = entry.module
        for name in weight_names(layer, kind):
            layout, stack_ndim = param_layout(layer, kind, name)
            variable, key = getattr(layer, name), None
            if stack_ndim or getattr(layer, "mask", None) is not None or rule.rotation is not None:
                return False
            place = Location(type(layer).__name__, entry.paths[0], rule)
            check_finite(variable.get_value(), f"{name} of the {place}")
            if rule.weight.rounding.stochastic:
                key = fork_rounding_stream(rule, rngs, entry.paths[0])()
            codes, other_layout = pack_param(variable.get_value(), layout, 0, rule.weight, key)
            if other_layout is not None:
                return False
            packed.setdefault(id(variable), packed_nnx_variable(variable, codes))
            used |= {*numbers}
    if not packed or needed - used:
        return False
    if wide:
        text = (
            f"{first_names(wide)} of modules that are no layers of Flax are not packed; if a product takes them, they "
            "are rounded in each call. Pass inputs=(x,) to pack them"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    replace_nodes(model, packed)
    return True


def _refuse_to_pack(modules: Sequence[tuple[ModuleEntry, Rule]]) -> None:
    """Refuse to pack the program of a model without arguments to trace it with.

    Raises:
        ValueError: that names the modules for which the program is quantized.
    """
    text = first_names([f"{entry.paths[0]!r} ({type(entry.module).__name__})" for entry, _ in modules], str)
    raise ValueError(f"{INPUTS_ADVICE}; rules match {text}, whose parameters no plain layer of Flax holds")
