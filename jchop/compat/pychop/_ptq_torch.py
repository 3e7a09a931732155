"""Post-training quantization for modules of torch."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from jchop._common.checks import check, check_choice
from jchop._spec.spec import Spec
from jchop.compat._arrays import apply_to_arrays, dtype_name, round_first
from jchop.compat._torch import fx, nn, torch
from jchop.compat.pychop._quantizers import Chopi

_PTQ_METHODS = ("minmax", "percentile", "kl_divergence", "mse")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def rounded_copy(model: Any, chop: Any, eval_mode: bool, verbose: bool) -> Any:
    """A copy with rounding of the parameters whose names contain ``weight`` or ``bias``."""
    result = copy.deepcopy(model)
    if eval_mode:
        result.eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "weight" in name or "bias" in name:
                parameter.copy_(chop(parameter))
                if verbose:
                    print(f"rounded {name}, {tuple(parameter.shape)}")
    return result


def round_layer_outputs(model: nn.Module, chop: Any, data: Iterable | None, method: str, percentile: float) -> None:
    """Makes every layer of `model` round its output, after clamping to its range on `data`, if any.

    Of several outputs the first is rounded, as of recurrent layers and attention.
    """
    check_choice("calibration_method", method, _PTQ_METHODS)
    check(0 < percentile <= 100, f"percentile={percentile} must be more than 0 and at most 100")
    layers = _leaf_layers(model)
    if data is None:
        ranges = dict.fromkeys(layers.values())
    else:
        ranges = _output_ranges(model, data, _method_for_calibrate(chop, method, percentile), chop)
        if missing := [name for name, layer in layers.items() if layer not in ranges]:
            names = ", ".join(map(repr, missing))
            why = "no batch of calibration_data gave their range"
            warnings.warn(f"the outputs of the layers {names} are not rounded: {why}", RuntimeWarning, stacklevel=3)
    for layer, output_range in ranges.items():
        layer.register_forward_hook(partial(_round_in_range, chop, output_range))


def _method_for_calibrate(chop: Any, method: str, percentile: float) -> str:
    """The name of a method in `jchop.nn.calibrate`."""
    if method == "percentile":
        return f"percentile({percentile})"
    if isinstance(chop, Chopi):
        return {"kl_divergence": "entropy"}.get(method, method)
    needs = f"equally spaced levels, which {type(chop).__name__} does not have; use 'mse'"
    check(method != "kl_divergence", f"calibration_method='kl_divergence' needs {needs}")
    return "minmax"  # values do not depend on the range, so the whole range has the least error


def _leaf_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name. An attention is one layer: it does not call the module of its last product."""
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    output_projections = [attention.out_proj for attention in attentions]
    return {
        name: module
        for name, module in model.named_modules()
        if (module in attentions or not list(module.children()))
        and module not in output_projections
        and type(module).forward is not nn.Module.forward  # a list of layers or of parameters has none
    }


def _round_in_range(chop: Any, output_range: list[float] | None, module: nn.Module, args: Any, output: Any) -> Any:
    return round_first(lambda x: chop(x if output_range is None else x.clamp(*output_range)), output)


class _OutputObserver:
    """The range of outputs: their least and largest number, in their dtype, or by another method of `nn.calibrate`."""

    def __init__(self, method: str, spec: Spec) -> None:
        from jchop._quantized.products.scales import range_observer_for

        self.by_method = None if method == "minmax" else range_observer_for(method, "widest")(spec)
        self.ends = [float("inf"), float("-inf")]

    def see(self, x: torch.Tensor) -> None:
        if self.by_method is None:
            self.ends = [min(self.ends[0], x.min().item()), max(self.ends[1], x.max().item())]
        else:
            apply_to_arrays(self.by_method.see, x.float())

    def range(self) -> list[float]:
        value_range = None if self.by_method is None else self.by_method.range()
        return value_range.tolist() if value_range is not None else self.ends if self.by_method is None else []


def _output_ranges(model: nn.Module, data: Iterable[Any], method: str, chop: Any) -> dict[nn.Module, list[float]]:
    """The range of the outputs of each layer that returned numbers."""
    observers: dict[nn.Module, _OutputObserver] = {}

    def observe(module: nn.Module, _args: Any, output: Any) -> None:
        while isinstance(output, tuple) and output:  # sequences of several lengths begin with their data, too
            output = output[0]
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
            if module not in observers:
                spec = chop.spec_for(output if isinstance(chop, Chopi) else dtype_name(output))
                observers[module] = _OutputObserver(method, spec)
            observers[module].see(output)

    handles = [layer.register_forward_hook(observe) for layer in _leaf_layers(model).values()]
    batch = None
    try:
        with torch.no_grad():
            for batch in data:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
    finally:
        for handle in handles:
            handle.remove()
    if batch is None:
        raise ValueError(
            "calibration_data has no batch, and outputs are clamped to their range on it; a generator can be read once"
        )
    return {layer: output_range for layer, observer in observers.items() if (output_range := observer.range())}


# -- batch norms into convolutions -------------------------------------------------------------------------------------


def fuse_batch_norms(model: Any) -> Any:
    """A copy in evaluation mode with batch norms folded into the convolutions before them.

    A norm is folded if only it reads the output of a convolution, and both are called once.
    """
    result = copy.deepcopy(model).eval()
    if not any(type(module) in _BATCH_NORMS for module in result.modules()):
        return result
    for convolution, norm in _conv_norm_pairs(result):
        both = nn.utils.fuse_conv_bn_eval(result.get_submodule(convolution), result.get_submodule(norm))  # type: ignore[type-var]
        for name, module in ((convolution, both), (norm, nn.Identity())):
            parent, _, attribute = name.rpartition(".")
            setattr(result.get_submodule(parent), attribute, module)
    return result


def _conv_norm_pairs(model: nn.Module) -> list[tuple[str, str]]:
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:  # any error of the model's code during tracing
        raise ValueError(f"fuse_bn=True needs a model that torch.fx can trace ({error}); pass fuse_bn=False") from error
    modules = dict(model.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    uses = Counter(modules[str(node.target)] for node in calls)
    pairs = []
    for norm in calls:
        conv_node = next(iter(norm.args), None)
        if not isinstance(conv_node, fx.Node) or conv_node not in calls or len(conv_node.users) > 1:
            continue
        conv, batch_norm = modules[str(conv_node.target)], modules[str(norm.target)]
        if type(conv) in _CONVOLUTIONS and type(batch_norm) in _BATCH_NORMS and uses[conv] == uses[batch_norm] == 1:
            pairs.append((str(conv_node.target), str(norm.target)))
    return pairs
