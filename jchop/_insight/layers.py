"""`nn.allocate_bits` and `nn.sensitivity`: formats for the layers of a model, and the error of one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jchop._common.checks import as_iterable, call_hint, check, check_choice, check_float, check_instance, first_names
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._common.text import PictureReport, RowReport, TableOrLine, decibels, format_decibels
from jchop._insight.tune._search import front_of_sums
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.call import batch_arguments
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.nn._nnx.layer_kinds import NnxKind, packed_param_shape
from jchop.nn._nnx.layers import nnx_layers
from jchop.nn._quantize import quantize
from jchop.nn._report import LayerCall, bytes_of_tree, record_layer_calls, weight_names, weight_ratio

_SENSITIVITY_TENSORS = ("weight", "activation")
_ALL_LAYERS = "all"


@dataclass(frozen=True)
class SensitivityRow:
    """A row of a report: one layer in one format.

    Args:
        path: its path in the model; ``"all"`` for one rule of all layers.
        layer: its class; empty for all layers.
        format: the spec, as text.
        snr: signal-to-noise ratio of the model's output in dB; infinite without an error, -infinite if an output of the
            rounded model is not finite.
    """

    path: str
    layer: str
    format: str
    snr: float


@dataclass(frozen=True)
class Sensitivity(PictureReport):
    """The layers of a model by formats. Its text is a table of decibels: the lowest layer of a column matters most.

    Args:
        rows: a `SensitivityRow` for each layer and format, layer by layer. The last rows are of one rule for all
            layers.
        formats: the formats, as texts, in their order.
    """

    rows: tuple[SensitivityRow, ...]
    formats: tuple[str, ...]

    _infinities_as_text = True

    _picture, _title = "draw_sensitivity", "Layers rounded one at a time"

    @property
    def _align(self) -> str:
        return "<<" + ">" * len(self.formats)

    def _parts(self) -> list[TableOrLine]:
        snr_by_layer: dict[tuple[str, str], dict[str, float]] = {}
        for row in self.rows:
            snr_by_layer.setdefault((row.path, row.layer), {})[row.format] = row.snr
        head = ("path", "layer", *self.formats)
        body = [(*name, *(format_decibels(snr[fmt]) for fmt in self.formats)) for name, snr in snr_by_layer.items()]
        return [[head, *body], "decibels of the output, one layer rounded; the last line has one rule for all layers"]


@call_hint("jchop.nn.sensitivity(model, ['int8', 'int4'], [x])")
def sensitivity(
    model: nnx.Module,
    formats: Sequence[SpecLike] | Spec | ElementFormat | ScaledFormat,
    batches: Iterable[Any],
    *,
    tensors: Sequence[str] = ("weight",),
    call: Callable[..., Any] | None = None,
    rngs: nnx.Rngs | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Measures the error of a model's output when one layer is rounded, for each layer and each format.

    The signal-to-noise ratio is 10 log10(Σ y² / Σ (y - z)²) in dB over all batches. Here y are the outputs of the
    model, and z its outputs with a rule for one layer alone. A last row for each format has one rule for all layers,
    which leaves norms as they are (`jchop.Rule`). Layers with a low ratio should keep more bits.

    Args:
        model: a module of Flax NNX that is not quantized; it is not changed.
        formats: the formats of the layer, one or several. Scaled formats have their scales along the inputs of a layer.
        batches: the arguments of the model: tuples, or the only argument.
        tensors: the rounded tensors of the layer: ``"weight"``, ``"activation"``, or both. Default ``("weight",)``.
        call: a function of the model and a batch's arguments to arrays. Default ``model(*batch)``.
        rngs: with a stream ``"rounding"``, for stochastic formats. Default None.
        progress: function of the number of completed layers and formats, and of all.

    Returns:
        A `Sensitivity`. Its `str` is a table; `as_dict`, `to_json` and `plot` show it in other ways.

    Raises:
        TypeError: for a model that is no module of Flax NNX.
        ValueError: without batches, formats, tensors or layers that can be rounded, and for a batch with an output that
            is not finite.

    Example:
        >>> import jax, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
        >>> found = jc.nn.sensitivity(model, ["int8", "int4"], [jax.random.normal(jax.random.key(2), (16, 8))])
        >>> [(row.path, row.format) for row in found.rows if row.snr < 30]
        [('layers/0', 'int4'), ('layers/2', 'int4'), ('all', 'int4')]
    """
    check_instance("model", model, nnx.Module, "a module of Flax NNX")
    tensor_names = tuple(check_choice("tensors", name, _SENSITIVITY_TENSORS) for name in tensors)
    specs = [as_spec(fmt, scaled=True) for fmt in as_iterable(formats)]
    data = [batch_arguments(batch) for batch in batches]
    layers = {
        path: type(layer).__name__
        for path, layer, kind in nnx_layers(model)
        if kind is not None and set(tensor_names) <= set(kind.fields(layer))
    }
    for name, value in (("tensors", tensor_names), ("formats", specs), ("batches", data), ("model", layers)):
        check(value, f"{name}: there must be at least one" + (" layer to round" if value is layers else ""))
    run = nnx.jit(call if call is not None else lambda model, *args: model(*args))
    exact = [_flat_outputs(run(model, *batch)) for batch in data]
    check(all(np.isfinite(y).all() for y in exact), "batches: an output of the model is not finite")
    rows, total = [], (len(layers) + 1) * len(specs)
    for path, name in [*layers.items(), (_ALL_LAYERS, "")]:
        pattern = " ".join(layers) if path == _ALL_LAYERS else path
        for spec in specs:
            fields: dict[str, Any] = dict.fromkeys(tensor_names, spec)
            rounded_model = quantize(model, Rule(pattern, **fields), rngs=rngs)
            outputs = [_flat_outputs(run(rounded_model, *batch)) for batch in data]
            rows.append(SensitivityRow(path, name, str(spec), _output_snr(exact, outputs)))
            if progress is not None:
                progress(len(rows), total)
    return Sensitivity(tuple(rows), tuple(dict.fromkeys(map(str, specs))))


def _flat_outputs(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def _output_snr(exact: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    if not all(np.isfinite(z).all() for z in outputs):
        return -math.inf
    noise = math.fsum(float(np.sum((y - z) ** 2)) for y, z in zip(exact, outputs, strict=True))
    signal = math.fsum(float(np.sum(y**2)) for y in exact)
    return decibels(signal, noise)


LossFunction = Callable[..., Any]
ALLOCATION_SCORES = ("fisher", "loss")


@dataclass(frozen=True)
class TunedLayer:
    """A row of a report: one layer and the format that was chosen for it.

    Args:
        path: its path in the model.
        group: the number of its group; layers of one group have one format.
        option: its format as text; ``"carrier"`` for none.
        weights: the count of its weights.
        bits: the bits of a weight, with its part of the scales.
        score: its part in the total score.
        weight_snr: signal-to-noise ratio of its weights in dB; infinite if they are exact.
        activation_snr: the same of its inputs, rounded to the rule's activation; infinite without one. NaN if the loss
            does not call the layer, or calls it within a transformation of JAX.
        output_snr: the same of its results on the data, of the same inputs; NaN as `activation_snr`.
    """

    path: str
    group: int
    option: str
    weights: int
    bits: float
    score: float
    weight_snr: float
    activation_snr: float
    output_snr: float

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        ratios = map(format_decibels, (self.weight_snr, self.activation_snr, self.output_snr))
        return self.path, self.option, str(self.weights), f"{self.bits:.3g}", f"{self.score:.2g}", *ratios


@dataclass(frozen=True)
class BitAllocation(RowReport):
    """The result of `allocate_bits`; its ``str`` is a table.

    Args:
        rules: for `jchop.nn.quantize`: a rule for each layer with a format.
        rows: the layers.
        bits: the mean bits of a weight.
        bytes: the bytes of all weights.
        loss: the loss on the data of the model under the rules.
        loss_before: the loss of the model itself.
        uniform: the bits and the loss if every layer has one format, for each format of the menu as text.
        front: (bits, score) of the best choices, from cheap to exact.
        notes: sentences about the choice, and about the parameters and layers without a format.
    """

    rules: tuple[Rule, ...]
    rows: tuple[TunedLayer, ...]
    bits: float
    bytes: int
    loss: float
    loss_before: float
    uniform: dict[str, tuple[float, float]]
    front: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = ()

    _align, _optional = "<<>>>>>>", ("weights dB", "inputs dB", "weights")

    def _parts(self) -> Iterator[TableOrLine]:
        head = ("layer", "format", "weights", "bits", "score", "weights dB", "inputs dB", "results dB")
        yield [head, *(row._cells() for row in self.rows)]
        yield f"{self.bits:.3g} bits of a weight, {self.bytes} bytes"
        yield f"loss {self.loss:.4g}, before {self.loss_before:.4g}"
        yield from (f"{name} alone: {bits:.3g} bits, loss {loss:.4g}" for name, (bits, loss) in self.uniform.items())
        yield from self.notes


@dataclass
class _TunableLayer:
    """A layer with weights of a product, and the number of its group."""

    path: str
    module: Any
    kind: NnxKind
    group: int = 0

    def weights(self) -> Iterator[tuple[str, Any]]:
        """The names and values of its weights."""
        return ((name, getattr(self.module, name).get_value()) for name in weight_names(self.module, self.kind))

    @property
    def count(self) -> int:
        """The count of its weights."""
        return sum(value.size for _, value in self.weights())

    def bytes_under(self, option: Rule | None) -> int:
        """The bytes of its weights, packed."""
        total = 0
        for name, value in self.weights():
            spec = None if option is None else self.kind.spec(option, name)
            total += bytes_of_tree(value if spec is None else packed_param_shape(self.module, self.kind, name, spec))
        return total


@dataclass
class _LayerProblem:
    """Layers, the options for each, and the losses of the model under assignments of these."""

    model: nnx.Module
    loss: LossFunction
    batches: Sequence[tuple[Any, ...]]
    layers: Sequence[_TunableLayer]
    options: Sequence[Rule | None]
    _losses: dict[tuple[int, ...], float] = field(default_factory=dict)

    def rules(self, assignment: Sequence[int]) -> list[Rule]:
        """A rule for each layer with a format; layers at level -1 have none."""
        levels = ((layer, self.options[j]) for layer, j in zip(self.layers, assignment, strict=True) if j >= 0)
        return [replace(rule, path=f"/{x.path}/" if x.path else "/") for x, rule in levels if rule is not None]

    def loss_under(self, assignment: Sequence[int]) -> float:
        """The mean loss of the model under an assignment, computed once."""
        key = tuple(assignment)
        if key not in self._losses:
            rules = self.rules(key)
            graph, state = nnx.split(quantize(self.model, rules) if rules else self.model)
            run = jax.jit(lambda state, batch: self.loss(nnx.merge(graph, state), *batch))
            self._losses[key] = float(np.mean([float(run(state, batch)) for batch in self.batches]))
        return self._losses[key]

    def by_group(self, table: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The sums over the layers of each group."""
        sums = [[0] * len(self.options) for _ in range(1 + max(layer.group for layer in self.layers))]
        for layer, row in zip(self.layers, table, strict=True):
            sums[layer.group] = [total + value for total, value in zip(sums[layer.group], row, strict=True)]
        return sums


@call_hint("jchop.nn.allocate_bits(model, ['int4(group=32)', 'int8'], [(x, y)], loss=loss, bits=4.5)")
def allocate_bits(
    model: nnx.Module,
    menu: Sequence[SpecLike | Rule | None],
    batches: Iterable[Any],
    *,
    loss: LossFunction,
    bits: float | None = None,
    bytes: int | None = None,
    score: Literal["fisher", "loss"] = "fisher",
    groups: Sequence[str] = (),
    layers: str = "*",
) -> BitAllocation:
    """Chooses a format for each layer of a model, with the least total score under a budget of bits or bytes.

    The Fisher score of a layer in a format is the sum of (∂L/∂y)²·(ŷ − y)² over its results y on the data. Here ŷ are
    the results of the rounded layer for the same inputs. The sum is the second-order change of a loss whose curvature
    is the square of its gradient. The scores of the layers add up. A dynamic program finds the best sum under the
    budget exactly. A score holds the roundings of its own layer alone. The score of an `nnx.Embed` holds its lookups
    and its products. The loss of the model is then measured under the rules, and in each single format. A note names
    the single formats within the budget that have a lower loss. Near a minimum of the loss a gradient says little. Use
    labels that the model itself draws there: the square of the gradient is then the curvature of the divergence from
    the model.

    Args:
        model: a module of Flax NNX.
        menu: two formats or more for the weights: specs, formats, scaled formats or text. A `Rule` with the default
            path is for more tensors than the weights. None leaves a layer as it is.
        batches: the arguments of `loss` after the model: tuples, or the only argument.
        loss: a function of the model and of a batch's arguments to a number, which JAX can differentiate.
        bits: the most mean bits of a weight, the scales included. Either this or `bytes`.
        bytes: the most bytes of all weights of the layers.
        score: ``"fisher"`` (default), or ``"loss"``: the loss of the model with only this layer rounded, minus the loss
            of the model. It needs a run for each layer and format.
        groups: patterns ([](patterns.md)) of layers that must agree. The layers that match a pattern and have the same
            parent are one group, as ``"attention/{query,key,value}"`` or ``"experts/*"``. Default: none.
        layers: a pattern for the layers that get a format. Default ``"*"``: every layer with weights of a product.
            These are dense layers, convolutions, transposed ones too, embeddings, and `nnx.LoRA`. Norms and modules
            that are no layers of Flax get no format, and their parameters have no part in the budget. A note names
            them.

    Returns:
        A `BitAllocation`, with ``rules`` for `quantize`.

    Raises:
        TypeError, ValueError: for an argument of another type or value, a model without layers, or a group that matches
            none. For a budget below the cheapest choice. For a Fisher score of a layer that the loss calls within a
            transformation of JAX, as in the scan of an `nnx.RNN`. Use ``score="loss"`` there.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
        >>> x, y = jax.random.normal(jax.random.key(0), (32, 8)), jnp.zeros((32, 4))
        >>> loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
        >>> found = jc.nn.allocate_bits(model, ["e2m1fn", "e4m3"], [(x, y)], loss=loss, bits=6)
        >>> found.bits <= 6, sorted({row.option for row in found.rows})
        (True, ['float4_e2m1fn', 'float8_e4m3'])
    """
    options = _menu_options(menu)
    check_instance("model", model, nnx.Module, "a module of Flax NNX")
    check_instance("loss", loss, Callable, "a function of the model and a batch")
    check_choice("score", score, ALLOCATION_SCORES)
    data = [batch_arguments(batch) for batch in batches]
    check(data, "batches: there must be at least one")
    targets, other_layers = _tunable_layers(model, layers, groups)
    problem = _LayerProblem(model, loss, data, targets, options)
    costs = [[layer.bytes_under(option) for option in options] for layer in targets]
    uniform_costs = [sum(column) for column in zip(*costs, strict=True)]
    count = sum(layer.count for layer in targets)
    budget = _byte_budget(bits, bytes, count)
    carrier = [-1] * len(targets)
    model_loss = problem.loss_under(carrier)
    # First, since errors about rules of the whole model have the paths of the layers.
    losses = [problem.loss_under([j] * len(targets)) for j in range(len(options))]
    scores, ratios, opaque, uncalled = _fisher_scores(problem)
    if opaque and score == "fisher":
        raise ValueError(
            f"score='fisher': the calls of {first_names(sorted(opaque))} are within a transformation of "
            "JAX, as a scan, jit or remat, or of a stack of layers, so the gradients of their results cannot be had. "
            "Use score='loss', or leave them out by layers="
        )
    if score == "loss":
        scores = [
            [problem.loss_under([*carrier[:i], j, *carrier[i + 1 :]]) - model_loss for j in range(len(options))]
            for i in range(len(targets))
        ]
    front = front_of_sums(problem.by_group(costs), problem.by_group(scores))
    best = next((trial for trial in reversed(front) if trial.cost <= budget), None)
    if best is None:
        raise ValueError(
            f"{'bits' if bytes is None else 'bytes'}={bits if bytes is None else bytes}: the cheapest choice takes "
            f"{8 * front[0].cost / count:.4g} bits of a weight, {front[0].cost} bytes"
        )
    choice = [best.assignment[layer.group] for layer in targets]
    chosen_loss = problem.loss_under(choice)
    texts = [_option_text(option) for option in options]
    notes = [
        f"{text} alone has a lower loss than the choice by scores"
        for text, cost, single_loss in zip(texts, uniform_costs, losses, strict=True)
        if cost <= budget and single_loss < chosen_loss
    ]
    if other_layers:
        notes.append(f"without a format, and not in the budget: {first_names(other_layers, str)}")
    if uncalled:
        notes.append(f"not called by the loss, so without a ratio: {first_names(sorted(uncalled))}")
    rows = []
    for i, (layer, j) in enumerate(zip(targets, choice, strict=True)):
        facts = layer.path, layer.group, texts[j], layer.count, 8 * costs[i][j] / layer.count, scores[i][j]
        rows.append(TunedLayer(*facts, weight_ratio(layer.module, layer.kind, options[j]), *ratios[i][j]))
    total = sum(costs[i][j] for i, j in enumerate(choice))
    uniform = {text: (8 * cost / count, one) for text, cost, one in zip(texts, uniform_costs, losses, strict=True)}
    points = tuple((8 * trial.cost / count, trial.error) for trial in front)
    sizes = 8 * total / count, total
    return BitAllocation(
        tuple(problem.rules(choice)), tuple(rows), *sizes, chosen_loss, model_loss, uniform, points, tuple(notes)
    )


# -- arguments ---------------------------------------------------------------------------------------------------------


def _menu_options(menu: Any) -> list[Rule | None]:
    if isinstance(menu, str) or not isinstance(menu, Sequence) or len(menu) < 2:
        raise TypeError(f"menu={menu!r} must be a list of two formats or more, as ['int4(group=all)', 'e4m3']")
    options: list[Rule | None] = []
    for i, value in enumerate(menu):
        if isinstance(value, Rule) and (value.path != "*" or value.weight is None):
            raise ValueError(f"menu[{i}]={value} must have the path '*' and a weight")
        option = value if value is None or isinstance(value, Rule) else Rule(weight=value)
        if option is not None and option.stochastic:
            raise ValueError(f"menu[{i}]={value} rounds stochastically; allocate_bits needs deterministic roundings")
        options.append(option)
    check(len(set(map(_option_text, options))) >= len(options), f"menu={list(menu)!r} has a format twice")
    return options


def _byte_budget(bits: float | None, bytes_: int | None, count: int) -> int:
    check((bits is None) != (bytes_ is None), f"bits={bits!r}, bytes={bytes_!r}: give one of both")
    if bytes_ is None:
        return math.floor(check_float("bits", bits, 0, ends="(]") * count / 8 + 1e-9)
    return int(check_float("bytes", bytes_, 0, ends="(]"))


def _tunable_layers(model: nnx.Module, layers: str, groups: Sequence[str]) -> tuple[list[_TunableLayer], list[str]]:
    """The layers with weights of a product, each with the number of its group; and the others, as text."""
    check_path_pattern("layers", layers)
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise TypeError(f"groups={groups!r} must be a list of patterns")
    usable, others = [], []
    for path, module, kind in nnx_layers(model):
        if kind is not None and not weight_names(module, kind):
            continue
        if kind is not None and kind.operation:
            usable.append(_TunableLayer(path, module, kind))
        elif matches_path(layers, path):  # the scale of a norm, or parameters that no layer of Flax holds
            others.append(f"{path!r} ({type(module).__name__})")
    targets = [layer for layer in usable if matches_path(layers, layer.path)]
    if not targets:
        hint = (
            f", only {first_names(others, str)}" if others else nearest_paths_hint([layers], [x.path for x in usable])
        )
        raise ValueError(f"layers={layers!r} matches no layer with weights of a product{hint}")
    group_indexes: dict[Any, int] = {}
    for pattern in groups:
        check_path_pattern("groups", pattern)
        if not any(matches_path(pattern, layer.path) for layer in targets):
            hint = nearest_paths_hint([pattern], [x.path for x in targets])
            raise ValueError(f"groups: {pattern!r} matches no layer{hint}")
    for layer in targets:
        pattern = next((one for one in groups if matches_path(one, layer.path)), None)
        key = layer.path if pattern is None else (pattern, layer.path.rpartition("/")[0])
        layer.group = group_indexes.setdefault(key, len(group_indexes))
    return targets, others


def _option_text(option: Rule | None) -> str:
    if option is None:
        return "carrier"
    is_weight_only = option == Rule(weight=option.weight)
    return str(option.weight) if is_weight_only else str(option)


# -- the Fisher score --------------------------------------------------------------------------------------------------


def _fisher_scores(
    problem: _LayerProblem,
) -> tuple[list[list[float]], list[list[tuple[float, float]]], set[str], set[str]]:
    """The scores of layers and formats, signal-to-noise ratio of inputs and results in dB, and layers without these.

    First those whose calls are unknown, then those that have no calls.
    """
    paths = [layer.path for layer in problem.layers]
    inputs_only = [
        None if option is None or option.activation is None else Rule(activation=option.activation)
        for option in problem.options
    ]
    rounded, input_rounded = (_layers_under(problem.layers, rules) for rules in (problem.options, inputs_only))
    shape = (len(paths), len(problem.options))
    scores, noise, noise_of_inputs, power = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(len(paths))
    call_paths: set[str] = set()
    opaque: set[str] = set()
    for batch in problem.batches:
        calls, gradients, opaque_paths = _calls_and_gradients(problem.model, problem.loss, batch, paths)
        for call, gradient in zip(calls, gradients, strict=True):
            i, y = paths.index(call.path), call.result
            power[i] += float(jnp.sum(jnp.square(y)))
            for j, (layers, input_layers) in enumerate(zip(rounded, input_rounded, strict=True)):
                if layers is None:
                    continue
                error = call.of(layers) - y
                scores[i, j] += float(jnp.sum(jnp.square(gradient) * jnp.square(error)))
                noise[i, j] += float(jnp.sum(jnp.square(error)))
                if input_layers is not None:
                    noise_of_inputs[i, j] += float(jnp.sum(jnp.square(call.of(input_layers) - y)))
        call_paths |= {call.path for call in calls}
        opaque |= opaque_paths
    ratios = [
        [(decibels(power[i], noise_of_inputs[i, j]), decibels(power[i], noise[i, j])) for j in range(shape[1])]
        if path in call_paths - opaque
        else [(math.nan, math.nan)] * shape[1]
        for i, path in enumerate(paths)
    ]
    return (scores / len(problem.batches)).tolist(), ratios, opaque, set(paths) - call_paths - opaque


def _layers_under(layers: Sequence[_TunableLayer], options: Sequence[Rule | None]) -> list[dict[str, Any] | None]:
    """The layers under each option, by path; each alone: a layer inside it, as in LoRA, has a score of its own."""
    return [
        None if option is None else {layer.path: quantize(layer.module, replace(option, path="/")) for layer in layers}
        for option in options
    ]


def _calls_and_gradients(
    model: nnx.Module, loss: LossFunction, batch: tuple[Any, ...], paths: list[str]
) -> tuple[list[LayerCall], list[Array], set[str]]:
    """The calls of layers, the gradient of the loss by the result of each, and the layers whose calls are unknown."""
    shapes: list[Any] = []

    def record_shapes() -> Any:
        out, calls, _ = record_layer_calls(model, lambda copy: loss(copy, *batch), paths)
        shapes.extend((call.result.shape, call.result.dtype) for call in calls)
        return out

    jax.eval_shape(record_shapes)
    traced_calls: list[LayerCall] = []
    opaque: set[str] = set()

    def loss_and_calls(probes: list[Array]) -> Any:
        out, calls, opaque_paths = record_layer_calls(model, lambda copy: loss(copy, *batch), paths, probes)
        traced_calls[:] = calls
        opaque.update(opaque_paths)
        return out, [(call.args, call.kwargs, call.result) for call in calls]

    gradients, arrays = jax.grad(loss_and_calls, has_aux=True)([jnp.zeros(*shape) for shape in shapes])
    calls = [LayerCall(call.path, call.method, *values) for call, values in zip(traced_calls, arrays, strict=True)]
    return calls, gradients, opaque
