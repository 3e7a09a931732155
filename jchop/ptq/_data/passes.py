"""Data run through a program, batch after batch, and the sums and statistics of the inputs of its products."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jchop._common.checks import check, check_instance
from jchop._common.text import table_lines
from jchop._program.run import interpret
from jchop._quantized.program.call import (
    CallArguments,
    Keys,
    batch_arguments,
    check_batches,
    enumerate_batches,
    is_packed_param,
    unpack_param,
)
from jchop._quantized.program.runner import QuantizedRunner
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop.ptq._data.collect import (
    Collector,
    ErrorCollector,
    InputSums,
    add_sums,
    input_means,
    pair_value,
    sums_over_rows,
)
from jchop.ptq._data.sites import Stage, WeightSite, WeightSites, find_sites
from jchop.ptq._steps.round import fraction_of_gap, move_offset
from jchop.ptq._steps.steps import SignDescent

_BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_bytes(memory: Any) -> int | None:
    """An amount of memory in bytes.

    Raises:
        TypeError, ValueError: that name the argument.
    """
    requirement = "must be a number of bytes above 0, or text such as '4GiB' (B, KiB, MiB, GiB or TiB)"
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise TypeError(f"memory={memory!r} {requirement}")
    if isinstance(memory, str):
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?) ?([KMGT]iB|B)", memory)
        count = int(float(match[1]) * _BYTE_UNITS[match[2]]) if match else 0
    else:
        count = memory
    check(count >= 1, f"memory={memory!r} {requirement}")
    return count


def sum_bytes(site: WeightSite, parameter: Any, two_trajectories: bool = False) -> tuple[int, int]:
    """The bytes of the statistics of a parameter in a turn of its outermost loop, and the number of these turns.

    Args:
        site: the place of the parameter.
        parameter: its value. The totals and the sums of a batch count.
        two_trajectories: whether there are two trajectories, as `sums_over_rows` of x and y.
    """
    dtype = jnp.promote_types(parameter.dtype, jnp.float32)
    loops = parameter.shape[: site.turns]
    inputs = jax.ShapeDtypeStruct((site.layout.matrix_shape[0], 1, site.layout.matrix_shape[1]), dtype)
    sums = jax.eval_shape(sums_over_rows, inputs, inputs if two_trajectories else None)
    bytes_of_turn = 2 * sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(sums))
    return bytes_of_turn * math.prod(loops[1:]), loops[0] if loops else 1


class StagePart(NamedTuple):
    """Stages whose statistics are summed up in one pass over the data.

    Args:
        stages: the stages.
        leaves: the indexes of their parameters.
        window: the first turn, and how many turns, of the loops over them; None for all.
    """

    stages: tuple[Stage, ...]
    leaves: tuple[int, ...]
    window: tuple[int, int] | None


def check_memory(stages: Sequence[Stage], sizes: Mapping[int, tuple[int, int]], memory: int, path_of: Any) -> None:
    """Refuse less memory than each turn of weights that share an input needs; arguments as of `split_stages`.

    Raises:
        ValueError: that names the parameters that need the most.
    """
    needs = {stage.leaves: sum(sizes[i][0] for i in stage.leaves) for stage in stages}
    largest = max(needs.values(), default=0)
    if largest > memory:
        leaves = next(leaves for leaves, need in needs.items() if need == largest)
        raise ValueError(
            f"memory={memory} bytes is less than the {largest} bytes that the statistics of "
            f"{', '.join(repr(path_of(i)) for i in leaves)} need, the most of all"
        )


def split_stages(
    stages: Sequence[Stage], sizes: Mapping[int, tuple[int, int]], memory: int, path_of: Any
) -> list[StagePart]:
    """Stages cut into parts whose statistics need no more memory than there is.

    Weights that share an input are in one part. If all turns of a loop over them are too many, parts have some of them.

    Args:
        stages: all of them.
        sizes: the bytes of each parameter in each turn of its outermost loop, and the number of these turns, by index.
        memory: in bytes.
        path_of: of a parameter by its index, for an error.

    Raises:
        ValueError: as `check_memory`.
    """
    check_memory(stages, sizes, memory, path_of)
    groups: dict[tuple[int, ...], list[Stage]] = {}
    for stage in stages:
        groups.setdefault(stage.leaves, []).append(stage)
    parts: list[StagePart] = []
    for leaves, group in groups.items():
        shared = parts.pop() if parts and parts[-1].window is None else StagePart((), (), None)
        both = tuple(dict.fromkeys((*shared.leaves, *leaves)))
        if sum(math.prod(sizes[i]) for i in both) <= memory:
            parts.append(StagePart((*shared.stages, *group), both, None))
            continue
        parts += [shared] if shared.stages else []
        if sum(math.prod(sizes[i]) for i in leaves) <= memory:
            parts.append(StagePart(tuple(group), leaves, None))
            continue
        count, turns = memory // sum(sizes[i][0] for i in leaves), max(sizes[i][1] for i in leaves)
        for start in range(0, turns, count):
            part_stages = tuple(stage for stage in group if start <= stage.turn[0] < start + count)
            first = min(start, turns - count)  # every window has one size, so that it is compiled once
            parts.append(StagePart(part_stages, leaves, (first, count)))
    return parts


class BatchData:
    """Batches of arguments for a function.

    Args:
        low: the function under rules.
        params: the parameters in full precision.
        batches: the arguments after the parameters.
        key: a typed key, if a rounding of an activation is stochastic.
        progress: called with the number of batches that were run.
        adds_in_place: whether later batches have another program, with a half of the memory of sums.
    """

    def __init__(
        self,
        low: QuantizedFunction,
        params: Any,
        batches: Iterable[Any],
        key: Array | None = None,
        progress: Callable[[int], object] | None = None,
        adds_in_place: bool = False,
    ) -> None:
        self.low, self.params, self.batches, self.progress = low, params, batches, progress
        self.keys = None if key is None or not any(rule.stochastic for rule in low.rules) else Keys(key)
        self.count, self.adds_in_place = 0, adds_in_place
        self.packed: dict[int, Any] = {}  # parameters whose arrays are deleted
        self._sites: dict[int, tuple[Any, WeightSites]] = {}  # with the program, so that no other gets its id
        self._functions: dict[Any, Any] = {}

    def first(self) -> tuple[Any, Any, WeightSites]:
        """The program of the first batch, its arguments taken apart, and its sites; takes a batch."""
        return self.program(next(enumerate_batches(self.batches))[1])

    def last(self) -> tuple[Any, Any, WeightSites]:
        """The program of the last batch, as `first`; the programs of other batches are traced, too."""
        return [self.program(batch) for _, batch in enumerate_batches(self.batches)][-1]

    def program(self, batch: Any) -> tuple[Any, Any, WeightSites]:
        """The program of a batch, its arguments taken apart, and its sites."""
        empty = [tuple(x.shape) for x in jax.tree.leaves(batch) if hasattr(x, "shape") and 0 in x.shape]
        if empty:
            raise ValueError(f"batches: one has an argument of shape {empty[0]}, which holds no number; leave it out")
        program, call = self.low.traced(self.params, *batch_arguments(batch))
        return program, call, self.sites(program)

    def sites(self, program: Any) -> WeightSites:
        """The sites of a program."""
        if id(program) not in self._sites:
            self._sites[id(program)] = program, find_sites(program)
        return self._sites[id(program)][1]

    @property
    def programs(self) -> list[tuple[Any, WeightSites]]:
        """The programs of all batches so far, each with its sites."""
        return [*self._sites.values()]

    def sums(
        self,
        trajectories: Sequence[Mapping[int, Array]] = ({},),
        round_activations: bool = False,
        leaves: Sequence[int] | None = None,
        window: tuple[int, int] | None = None,
    ) -> tuple[dict[int, InputSums], tuple[Any, Any, WeightSites]]:
        """The sums over all batches of the inputs of some parameters, by their index; and the last batch's program.

        Args:
            trajectories: parameters, by index, that differ from full precision, for each trajectory. Default:
                one, with none.
            round_activations: whether the last trajectory rounds activations as the rules say. Default False.
            leaves: the indexes of the parameters. Default: all that are rounded, or all if there are no rules.
            window: the first turn, and how many turns, of the outermost loop over stacks of parameters. Default: all.

        Raises:
            ValueError: if there is no batch, or an input of a product is not finite.
        """
        total: dict[int, InputSums] = {}
        last = None
        for _, batch in enumerate_batches(self.batches):
            last = self.program(batch)
            collect, args = self._collect(last, trajectories, round_activations, leaves, window)
            if self.adds_in_place:
                total = collect(total, *args)
            else:
                for leaf, sums in collect({}, *args).items():
                    total[leaf] = _add_in_place(total[leaf], sums) if leaf in total else sums
            self._count_batch()
        assert last is not None
        for leaf, finite in _finite_inputs(lambda: total).items():
            _check_inputs(last[0], leaf, finite)
        return total, last

    def check(
        self, trajectories: Sequence[Mapping[int, Array]], round_activations: bool, leaves: Sequence[int]
    ) -> dict[int, frozenset[int]]:
        """The parameters, by index, that the sums of each of some parameters depend on; errors as of `sums`."""
        reads: dict[int, frozenset[int]] = dict.fromkeys(leaves, frozenset())
        traced: dict[int, Any] = {}
        for _, batch in enumerate_batches(self.batches):
            program, call, _ = trace = self.program(batch)
            collect, args = self._collect(trace, trajectories, round_activations, leaves, None)
            if id(program) not in traced:
                steps = jax.jit(partial(_finite_inputs, partial(collect, {}))).trace(*args)
                traced[id(program)] = steps.lower().compile()
                places = [i for i, value in enumerate(call.values) for _ in jax.tree.leaves(value)]
                for leaf, out in zip(sorted(steps.out_info), steps.jaxpr.jaxpr.outvars, strict=True):
                    reads[leaf] |= {places[i] for i in _read_inputs(steps.jaxpr.jaxpr, [out]) if i < len(places)}
            for leaf, is_finite in traced[id(program)](*args).items():
                _check_inputs(program, leaf, is_finite)
            self._count_batch()
        return reads

    def _collect(
        self, trace: tuple[Any, Any, WeightSites], trajectories: Sequence[Mapping[int, Any]], round_activations: bool,
        leaves: Sequence[int] | None, window: tuple[int, int] | None,
    ) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
        """The function that adds the sums of a batch to earlier ones, in their memory, and its other arguments."""
        program, call, sites = trace
        default = [i for i in sites.by_leaf if not self.low.rules or i in program.rounded_params]
        leaf_set = frozenset(default if leaves is None else leaves) & frozenset(sites.by_leaf)
        start, size = (None, None) if window is None else window
        options = len(trajectories), round_activations, leaf_set
        key = (id(program), *options, size)
        if key not in self._functions:
            plain = partial(self._collector(program, *options).collect, program.plan, window_size=size)
            shardings = [getattr(value, "sharding", None) for value in call.values]

            def add(earlier: dict[int, InputSums], values: Any, changes: Any, *rest: Any) -> dict[int, InputSums]:
                found = plain(*_unpack((values, changes)), *rest).items()
                sums = {leaf: _parted(own, shardings[leaf]) for leaf, own in found}
                return earlier | {i: add_sums(earlier[i], own) if i in earlier else own for i, own in sums.items()}

            self._functions[key] = jax.jit(add, donate_argnums=0)
        values = [_as_jax_leaf(self.packed.get(i, value)) for i, value in enumerate(call.values)]
        return self._functions[key], (values, [*map(dict, trajectories)], self.keys, start)

    def _count_batch(self) -> None:
        self.count += 1
        if self.progress is not None:
            self.progress(self.count)

    def errors(
        self, others: Mapping[int, Sequence[Any]], roundings: Sequence[Mapping[int, Array]]
    ) -> dict[tuple[int, int], tuple[float, float, float]]:
        """Sums of squares over all batches: of the results that uses of parameters give, and of their errors.

        Args:
            others: the uses, as `WeightSites.others` of the first batch; uses in other programs count, too.
            roundings: two roundings of the parameters.

        Returns:
            By the parameter and the number of its use; uses that are not reached are absent.
        """
        total: dict[tuple[int, int], Any] = {}
        for _, batch in enumerate_batches(self.batches):
            program, call, sites = self.program(batch)
            if (id(program), "errors") not in self._functions:
                collector = ErrorCollector({leaf: sites.others.get(leaf, ()) for leaf in others})
                self._functions[id(program), "errors"] = jax.jit(partial(collector.collect, program.plan))
            overrides = [{}, *map(dict, roundings)]
            errors = self._functions[id(program), "errors"]([*map(_as_jax_leaf, call.values)], overrides)
            for use_key, sums in errors.items():
                total[use_key] = total.get(use_key, 0) + np.diagonal(np.asarray(pair_value(sums.gram)[0], np.float64))
        return {use_key: tuple(map(float, sums)) for use_key, sums in total.items()}  # type: ignore[misc]

    def descend(
        self, step: SignDescent, targets: Mapping[int, tuple[Array, Array, Array]], fixed: Mapping[int, Array]
    ) -> tuple[dict[int, Array], int]:
        """Which numbers take the neighbour above, as by `sign_descent`, for the error of all results in all batches.

        Args:
            step: the step.
            targets: the numbers of each weight, and their neighbours below and above, by index.
            fixed: other rounded parameters.

        Returns:
            The choices with the least error, and the number of passes over the batches.

        Raises:
            ValueError: for results that are not finite.
        """
        no_backward = dict.fromkeys(("gradient", "input_gradient", "weight_gradient"))
        programs: dict[int, Any] = {}  # by the number of the batch
        functions: dict[int, Any] = {}  # the results in full precision, and the error with its slopes, by program
        wanted: dict[int, list[Array]] = {}  # the results in full precision, by the number of the batch

        def error_and_slopes(index: int, batch: Any, numbers: Mapping[int, Array]) -> tuple[Array, dict[int, Array]]:
            program = programs[index] = programs.get(index) or self.program(batch)[0]
            if id(program) not in functions:
                roundings = program.runner.roundings.items()
                low = QuantizedRunner({i: replace(how, codes=False, **no_backward) for i, how in roundings})

                def error(numbers: Mapping[int, Array], values: list[Any], exact: list[Array]) -> Array:
                    rounded = [numbers.get(i, value) for i, value in enumerate(values)]
                    results = zip(exact, interpret(low, program.plan, self.keys, rounded), strict=True)
                    pairs = ((a, b) for a, b in results if jnp.issubdtype(a.dtype, jnp.inexact))
                    return sum((jnp.square(jnp.abs(a - b)).sum() for a, b in pairs), jnp.zeros(()))

                full = jax.jit(partial(interpret, QuantizedRunner({}), program.plan, self.keys))
                functions[id(program)] = full, jax.jit(jax.value_and_grad(error))
            full, with_slopes = functions[id(program)]
            values = [*map(_as_jax_leaf, CallArguments(self.params, batch_arguments(batch), {}).values)]
            if index not in wanted:
                wanted[index] = full(values)
            return with_slopes(numbers, [fixed.get(i, value) for i, value in enumerate(values)], wanted[index])

        @jax.jit
        def choose(offsets: dict[int, Array]) -> tuple[dict[int, Array], dict[int, Array]]:
            places = {i: fraction_of_gap(*targets[i]) for i in offsets}
            takes_above = {i: (fraction + offsets[i] > 0.5) & (gap > 0) for i, (fraction, gap) in places.items()}
            return takes_above, {i: jnp.where(v, targets[i][2], targets[i][1]) for i, v in takes_above.items()}

        offsets = slope_sums = {i: jnp.zeros_like(weight) for i, (weight, *_) in targets.items()}
        best, least = choose(offsets)[0], math.inf
        for i in range(step.iterations + 1):
            takes_above, numbers = choose(offsets)
            runs = [error_and_slopes(index, batch, numbers) for index, batch in enumerate_batches(self.batches)]
            error = math.fsum(float(error) for error, _ in runs)
            check(math.isfinite(error), f"batches give results, or errors of them, that are not finite, for {step}")
            if error < least:
                best, least = takes_above, error
            slope_sums = jax.tree.map(lambda v, *slopes: step.momentum * v + sum(slopes), slope_sums,
                                      *(slopes for _, slopes in runs))  # fmt: skip
            move = partial(move_offset, i=i, iterations=step.iterations, rate=step.rate)
            offsets = jax.tree.map(move, offsets, slope_sums)
        return best, step.iterations + 1

    def _collector(self, program: Any, lane_count: int, round_activations: bool, leaves: frozenset[int]) -> Collector:
        roundings = {
            step_id: replace(rounding, codes=False)
            for step_id, rounding in program.runner.roundings.items()
            if round_activations
        }
        runners = [*[QuantizedRunner({})] * (lane_count - 1), QuantizedRunner(roundings)]
        return Collector(runners, roundings, self.sites(program), leaves)


class LazySums:
    """The sums of the inputs of parameters, as they are asked for: as many in one pass as there is memory for.

    Args:
        data: the batches.
        sites: of the parameters that may be asked for, by their indexes, in the order of the program.
        trace: the program, its arguments and its sites.
        memory: in bytes.
        sums: the sums that are known, if all are.
    """

    def __init__(
        self, data: BatchData, sites: Mapping[int, WeightSite], trace: tuple[Any, Any, WeightSites], memory: int,
        sums: dict[int, InputSums] | None = None,
    ) -> None:  # fmt: skip
        self.data, self.sites, self.trace, self.memory = data, sites, trace, memory
        self.sums, self.passes = sums or {}, 0 if sums is None else 1

    def sums_of(self, leaves: Sequence[int], step: object) -> dict[int, InputSums]:
        """The sums of some parameters at once.

        Raises:
            ValueError: if they need more memory than there is; `step` is that which needs them.
        """
        if not self.sums.keys() >= set(leaves):
            if not self.fits(leaves):
                paths = ", ".join(repr(self.trace[0].paths[i]) for i in leaves)
                raise ValueError(
                    f"memory={self.memory} bytes is less than the {sum(map(self._bytes, leaves))} bytes that the "
                    f"statistics of {paths} need, all of which {step} looks at together"
                )
            pass_leaves, all_leaves = list(leaves), list(self.sites)
            for leaf in all_leaves[all_leaves.index(leaves[0]) :]:  # and of those after them
                if leaf not in pass_leaves and self.fits([*pass_leaves, leaf]):
                    pass_leaves.append(leaf)
            self.sums = {}
            self.sums = self.data.sums(leaves=pass_leaves)[0]
            self.passes += 1
        return {leaf: self.sums[leaf] for leaf in leaves}

    def fits(self, leaves: Iterable[int]) -> bool:
        """Whether the sums of some parameters may be held at once."""
        return sum(map(self._bytes, leaves)) <= self.memory

    def _bytes(self, leaf: int) -> int:
        """The bytes of the sums of a weight's inputs."""
        return math.prod(sum_bytes(self.sites[leaf], self.trace[1].values[leaf]))


_add_in_place = jax.jit(add_sums, donate_argnums=0)


def _parted(sums: InputSums, sharding: Any) -> InputSums:
    """Sums whose matrices have a part on each device of a parameter with this sharding, as far as they can."""
    if not isinstance(sharding, NamedSharding) or sums.gram.hi.shape[-1] % sharding.mesh.size:
        return sums
    mesh = sharding.mesh
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        return sums
    part = NamedSharding(mesh, PartitionSpec(*[None] * (sums.gram.hi.ndim - 1), mesh.axis_names))
    matrices = jax.tree.map(lambda v: jax.lax.with_sharding_constraint(v, part), (sums.gram, sums.cross))
    return sums._replace(gram=matrices[0], cross=matrices[1])


def _unpack(tree: Any) -> Any:
    """The numbers of packed parameters, which enter products as if they had been unpacked before."""
    numbers = lambda v: jax.lax.optimization_barrier(unpack_param(v)) if is_packed_param(v) else v  # noqa: E731
    return jax.tree.map(numbers, tree, is_leaf=is_packed_param)


def _read_inputs(jaxpr: Any, results: Sequence[Any]) -> list[int]:
    """The inputs of a program that some of its results depend on."""
    read = {*map(id, results)}
    for eqn in reversed(jaxpr.eqns):
        places = [i for i, variable in enumerate(eqn.outvars) if id(variable) in read]
        if places and eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"].jaxpr
            read.update(id(eqn.invars[i]) for i in _read_inputs(inner, [inner.outvars[i] for i in places]))
        elif places:
            read.update(map(id, eqn.invars))
    return [i for i, variable in enumerate(jaxpr.invars) if id(variable) in read]


def _finite_inputs(collect: Callable[..., Mapping[int, InputSums]], *args: Any) -> dict[int, Array]:
    return {leaf: jnp.isfinite(sums.gram.hi).all() for leaf, sums in collect(*args).items()}


def _check_inputs(program: Any, leaf: int, finite: Any) -> None:
    """Refuse inputs of the product of a parameter that are not finite."""
    if not bool(finite):
        path, source = program.paths[leaf], program.uses[leaf][0].source
        raise ValueError(
            f"batches give the product of the parameter {path!r} at {source or 'an unknown line'} an input "
            "with NaN or infinities, or one whose square overflows; leave these batches out"
        )


def _as_jax_leaf(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """The inputs x of the product of a parameter, over all rows (tokens) of the data.

    For a stack of layers the turns of the loop are leading axes. The axis after them counts a batch of products
    (experts, groups of a convolution); its length is 1 if there is none.

    Args:
        gram: the mean of x x^T, (batch, summed, summed), in float32 (float64 for inputs of that dtype).
        mean_abs: the mean of abs(x), (batch, summed).
        max_abs: the largest abs(x), (batch, summed).
        count: the number of rows, (batch,).
    """

    gram: Array
    mean_abs: Array
    max_abs: Array
    count: Array


class Statistics(dict[str, InputStatistics]):
    """`InputStatistics` by the path of the parameter.

    Args:
        found: the statistics of the parameters whose inputs were summed up.
        left_out: the reason for each other parameter that reaches a product.
    """

    def __init__(self, found: Mapping[str, InputStatistics], left_out: Mapping[str, str]) -> None:
        super().__init__(found)
        self.left_out = dict(left_out)

    def __str__(self) -> str:
        rows = [("parameter", "inputs", "rows", "largest")]
        for path, inputs in self.items():
            shape = "×".join(map(str, inputs.mean_abs.shape))
            rows.append((path, shape, f"{float(inputs.count.sum()):.0f}", f"{float(inputs.max_abs.max()):.4g}"))
        rows += [(path, "left out", "", reason) for path, reason in self.left_out.items()]
        return "\n".join(table_lines(rows))


def statistics(
    fun: Callable[..., Any], params: Any, batches: Iterable[Any], *, progress: Callable[[int], object] | None = None
) -> Statistics:
    """Measures the second moments and magnitudes of the inputs of all products of parameters and data, in one pass.

    JAX traces `fun`, and the program shows the products. These are `dot_general` with any contracted axes and
    axes of a batch, convolutions (their patches) and `ragged_dot`, each group by itself. They may be within `jit`,
    `remat`, branches, and `scan`, where each turn over a stack of parameters has statistics of its own. So has each
    layer of a stack, if all products read layers by constant indexes. Inputs are multiplied in float32 in full
    precision, 1,024 rows at a time. Further sums are compensated, so that they do not depend on the number of batches.

    Args:
        fun: a function of a pytree of parameters, and of anything else.
        params: the parameters.
        batches: arguments after the parameters: tuples, or the only argument. One is in memory at a time.
        progress: a function of the number of batches that were run. Default None.

    Returns:
        A `Statistics`: a mapping from paths (as in `jchop.quantize_fn`) to `InputStatistics`. Its `left_out` says which
        parameters of products have none, and why. Reasons are `while` loops and `shard_map` around a product,
        computations with a parameter before its product, and parts of an axis.

    Raises:
        TypeError: for `batches` of another type.
        ValueError: for no batch, or NaN and infinities in the inputs of a product.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> dense = lambda p, x: jnp.tanh(x @ p["w"])
        >>> found = jc.ptq.statistics(dense, {"w": jnp.ones((2, 3))}, [jnp.array([[1.0, -2.0], [3.0, 0.0]])])
        >>> found["w"].gram.tolist(), found["w"].max_abs.tolist(), found["w"].count.tolist()
        ([[[5.0, -1.0], [-1.0, 2.0]]], [[3.0, 2.0]], [2.0])
    """
    check_instance("fun", fun, Callable, "a function of parameters and other arguments")
    check_batches(batches, repeated=False)
    data = BatchData(QuantizedFunction(fun, ()), params, batches, progress=progress)
    sums, (program, _, sites) = data.sums()
    by_path = {}
    for leaf, leaf_sums in sums.items():
        means = input_means(leaf_sums)
        by_path[program.paths[leaf]] = InputStatistics(means.gram, means.magnitude, leaf_sums.largest, means.rows)
    return Statistics(by_path, {program.paths[leaf]: reason for leaf, reason in sites.reasons.items()})
