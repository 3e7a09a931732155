"""The steps of a calibration, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from jchop._common.checks import check_bool, check_choice, check_float, check_int
from jchop._storage._quantize import check_hqq_search
from jchop.sparsity._masks import check_sparsity_pattern


@dataclass(frozen=True)
class CalibrationStep:
    """A step; its text is the call that makes it."""

    #: The function that makes it; its field of `CalibrationSteps`; how many of its arguments have no name in its text.
    name: ClassVar[str]
    field: ClassVar[str]
    positional: ClassVar[int] = 1

    def __str__(self) -> str:
        values = [(f.name, v) for f in fields(self) if (v := getattr(self, f.name)) is not f.default]
        texts = [f"{value:g}" if isinstance(value, float) else repr(value) for _, value in values]
        named = [text if i < self.positional else f"{values[i][0]}={text}" for i, text in enumerate(texts)]
        return f"{self.name}({', '.join(named)})"


class MappingStep(CalibrationStep):
    """A step that changes parameters before they are rounded, and keeps the function the same."""

    field = "mappings"
    #: Whether factors that no parameter can take are multiplied when the function runs.
    online = False


@dataclass(frozen=True)
class Smooth(MappingStep):
    """SmoothQuant; `smooth` makes it."""

    name = "smooth"
    alpha: float
    online: bool = False


@dataclass(frozen=True)
class Awq(MappingStep):
    """AWQ; `awq` makes it."""

    name = "awq"
    points: int
    duo: bool
    online: bool = False


@dataclass(frozen=True)
class Rotate(MappingStep):
    """Rotations; `rotate` makes it."""

    name = "rotate"
    seed: int | None


@dataclass(frozen=True)
class InOrder(CalibrationStep):
    """Weights rounded one after the other; `sequential` makes it."""

    name, field = "sequential", "in_order"


@dataclass(frozen=True)
class Correction(CalibrationStep):
    """A correction of weights before they are rounded; `correct_error` makes it."""

    name, field = "correct_error", "correction"
    strength: float
    damping: float


@dataclass(frozen=True)
class Sparse(CalibrationStep):
    """Pruning; `sparse` makes it."""

    name, field, positional = "sparse", "pruning", 2
    n: int
    m: int
    by: str


@dataclass(frozen=True)
class Clip(CalibrationStep):
    """Clipped scales; `clip` makes it."""

    name, field = "clip", "scales"
    points: int
    least: float


@dataclass(frozen=True)
class HalfQuadratic(CalibrationStep):
    """Zero points by half-quadratic quantization; `hqq` makes it."""

    name, field = "hqq", "scales"
    iterations: int
    norm: float
    weight: float
    growth: float
    whole_start: bool = False


@dataclass(frozen=True)
class Sweep(CalibrationStep):
    """GPTQ; `gptq` makes it."""

    name, field, positional = "gptq", "sweep", 0
    order: str
    damping: float
    block: int


@dataclass(frozen=True)
class SignDescent(CalibrationStep):
    """SignRound; `sign_round` makes it."""

    name, field = "sign_round", "sweep"
    iterations: int
    rate: float
    momentum: float
    loss: str = "product"


@dataclass(frozen=True)
class BiasCorrection(CalibrationStep):
    """A correction of biases after weights are rounded; `correct_biases` makes it."""

    name, field = "correct_biases", "biases"


@dataclass(frozen=True)
class CalibrationSteps:
    """The steps for each weight: at most one of each kind, None for one that is not taken; mappings before."""

    in_order: InOrder | None = None
    mappings: tuple[MappingStep, ...] = ()
    correction: Correction | None = None
    pruning: Sparse | None = None
    scales: Clip | HalfQuadratic | None = None
    sweep: Sweep | SignDescent | None = None
    biases: BiasCorrection | None = None

    @property
    def without_data(self) -> CalibrationSteps:
        """The steps that look at no inputs."""
        pruning = self.pruning if self.pruning is not None and self.pruning.by == "magnitude" else None
        scales = self.scales if isinstance(self.scales, HalfQuadratic) else None
        return CalibrationSteps(None, self.mappings, None, pruning, scales, None, self.biases)

    @property
    def names(self) -> str:
        """The steps that round a weight, for a report."""
        steps = (self.correction, self.pruning, self.scales, self.sweep)
        return ", ".join(step.name for step in steps if step is not None) or "nearest"


def smooth(alpha: float = 0.5, *, online: bool = False) -> Smooth:
    """Makes large channels of the inputs of products smaller, and their weights larger (SmoothQuant).

    Channel j of the input of a weight is divided by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), and the weight is
    multiplied by it. The factors are folded into parameters, so that nothing is divided when the function runs. The
    program shows where they can go: into the scale of a norm, or the outputs of the product before. Weights that share
    an input (queries, keys and values) share its factors. A weight whose factors cannot be folded stays as it is, and
    the report says why. A channel whose input was always zero has the factor 1.

    Args:
        alpha: the share of the difficulty that goes from inputs to weights, from 0 to 1. Default 0.5.
        online: whether an input whose factors cannot be folded is multiplied by them when the function runs. This is
            for the input of a first layer, or after a norm without a scale. The factors are stored with the packed
            weight, each weight with its own. They apply to products of matrices that read the whole weight, without an
            axis of a batch. Weights must not be rounded one after the other (`sequential`, `correct_error`). Default
            False.

    Raises:
        TypeError, ValueError: for other arguments.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    arXiv 2211.10438, 2022.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.smooth(0.8))
        'smooth(0.8)'
    """
    return Smooth(check_float("alpha", alpha, 0, 1), check_bool("online", online))


def awq(points: int = 20, *, duo: bool = True, online: bool = False) -> Awq:
    """Gives channels with large inputs more of the levels of a weight, so that the errors of outputs are least (AWQ).

    The step tries factors of 1 and the factors s = mean|x|^r for r = 0, 1/n, ..., 1 - 1/n. For each it rounds the
    weight times s to nearest and divides it by s again. It keeps the s with which W x has the least mean squared error
    on the data, summed over the weights that share the input. The error is computed from the Gram matrix of the inputs,
    so no inputs are kept. Factors are divided by the root of their largest times their smallest, and folded as in
    `smooth`. Each turn of a loop over a stack has an r of its own.

    Args:
        points: n, at least 1. Default 20.
        duo: whether the factors are mean|x|^r / (mean|w|^(1 - r) + 1e-4), with each w in units of the largest of its
            group. Default True.
        online: as in `smooth`. Default False.

    Raises:
        TypeError, ValueError: for other arguments.

    Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv
    2306.00978, 2023; `duo` is the duo scaling of llm-compressor.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.awq(duo=False))
        'awq(20, duo=False)'
    """
    return Awq(check_int("points", points, 1), check_bool("duo", duo), check_bool("online", online))


def rotate(seed: int | None = 0) -> Rotate:
    """Multiplies the inputs of products by orthogonal matrices, which spread large channels over all (rotations).

    The input x of a weight becomes x R, and the weight R^T W, by changes of parameters alone. R goes into the outputs
    of the products before, if only sums, moves, and factors that all channels share are between. So a residual stream
    is rotated in all products that write and read it, embeddings too. The values of attention are rotated for each
    head. RMSNorm commutes with R if its scale is the same for all channels. Another scale first goes into the weights
    that follow. R is the same in all turns of loops. A weight whose input cannot be rotated stays as it is, and the
    report says why.

    R is a Hadamard matrix over the root of its size, after random signs. Sizes are powers of two times one, or times a
    size that Paley's construction gives from a prime (12, 20, 24, 28, 44, ...). For another size R has blocks of the
    largest power of two that divides it.

    Args:
        seed: the seed of the signs, from 0 to 2^32 - 1; None for no signs. Default 0.

    Raises:
        TypeError, ValueError: for another seed.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456, 2024. These are
    R1 and R2 of Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", arXiv 2405.16406, 2024.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> params = {"a": jnp.eye(8), "b": jnp.ones((8, 2))}
        >>> rule = jc.Rule("b", weight="int8(group=all)", activation="int4(group=all)")
        >>> two, data = jc.quantize_fn(lambda p, x: (x @ p["a"]) @ p["b"], rule), [jnp.ones((4, 8))]
        >>> packed, report = two.pack(params, batches=data, steps=[jc.ptq.rotate()], return_report=True)
        >>> report.weights[0].note.partition(";")[0], float(jnp.abs(packed["a"]).max())
        ('rotate by Hadamard 8 folded into a', 0.3535533845424652)
    """
    return Rotate(None if seed is None else check_int("seed", seed, 0, 2**32 - 1))


def gptq(order: Literal["activation", "plain"] = "activation", *, damping: float = 0.01, block: int = 128) -> Sweep:
    """Rounds the columns of a weight one after the other, and subtracts the error of each from the others (GPTQ).

    The rule of the format chooses the scales of all groups before, from the weight itself. Each element is rounded as
    the format says. So every format, grouping and rounding mode works alike, and the order of columns is independent of
    the groups. A column whose input was always zero is rounded as it is.

    Args:
        order: ``"activation"``: columns with larger inputs first. ``"plain"``: in the order of the inputs in
            `statistics`. If a product sums over several axes, it is their order in the traced product, which can differ
            from the weight's.
        damping: the number added to the diagonal of H, the mean of x x^T, over the mean of that diagonal; at least 0.
            If H cannot be factorized, it is made four times larger until it can be. The report has the last one.
            Default 0.01.
        block: the number of columns that are brought up to date at once. It changes the order of sums alone. Default
            128.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
    The order by activation, with groups that stay where they are, follows its authors' code.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.gptq("plain"))
        "gptq(order='plain', damping=0.01, block=128)"
    """
    check_choice("order", order, ("activation", "plain"))
    return Sweep(order, check_float("damping", damping, 0), check_int("block", block, 1))


def sign_round(
    iterations: int = 200, *, rate: float = 0.5, momentum: float = 0.9, loss: Literal["product", "results"] = "product"
) -> SignDescent:
    """Rounds each number to one of its two neighbours, chosen by descent along the signs of gradients (SignRound).

    Neighbours are values of the format under its scales. Every format has them, and the rounding mode of the spec plays
    no part.

    Args:
        iterations: the number of steps. Default 200.
        rate: the move of an offset in the first step, times `iterations`; it falls to 0. An offset is from -1/2 to 1/2
            of the distance of the neighbours. Above 0. Default 0.5.
        momentum: the momentum of the descent, from 0 to below 1. Default 0.9.
        loss: the squared error that falls. ``"product"`` (default): of each weight's product, from the Gram matrix of
            its inputs, so no data are run again. ``"results"``: of all results of the function, for all weights
            together. A step then runs every batch forward and backward. For block-wise reconstruction, round the
            function of each block. Inputs are not rounded in order (`sequential`, `correct_error`), weights are not
            pruned, and the statistics are in memory at once.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023. It
    has rate 1, no momentum, and the results of a block. Its clipping of scales is left out here. Reconstruction of
    blocks is that of Li et al., "BRECQ", arXiv 2102.05426, 2021.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.sign_round(100))
        'sign_round(100, rate=0.5, momentum=0.9)'
    """
    return SignDescent(
        check_int("iterations", iterations, 1, (1 << 31) - 1),
        check_float("rate", rate, 0, ends="(]"),
        check_float("momentum", momentum, 0, 1, "[)"),
        check_choice("loss", loss, ("product", "results")),
    )


def sequential() -> InOrder:
    """Rounds weights one after the other, with inputs from the model as it is rounded so far, activations too.

    The order is the program's. The data are run once for each stage: weights that share an input, and each turn of a
    loop over a stack. Without this step the inputs come from the model in full precision, in one pass.

    Example:
        >>> import jchop as jc
        >>> steps = [jc.ptq.sequential(), jc.ptq.gptq()]
        >>> str(steps[0])
        'sequential()'
    """
    return InOrder()


def correct_error(strength: float = 0.5, *, damping: float = 0.01) -> Correction:
    """Moves a weight before it is rounded, so that its product corrects errors of the layers before it.

    Let x be the inputs in full precision and y the inputs in the rounded model. Then W becomes W + strength W E[(x - y)
    y^T] (E[y y^T] + d I)^-1. With strength 1 and no damping this is the least squares solution of W x = W' y. Both
    trajectories run through the program side by side, layer after layer. Data may choose rows, their order, experts or
    a branch (sorts, indexes of maxima, numbers made integers, `cond`). The choices of the rounded model then hold for
    both, except within a `while` loop.

    Args:
        strength: the factor of the correction, from 0 to 1. Default 0.5.
        damping: d over the mean of the diagonal; above 0. Default 0.01.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Arai and Ichikawa, "Quantization Error Propagation", arXiv 2504.09629, 2025.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.correct_error(1.0))
        'correct_error(1, damping=0.01)'
    """
    return Correction(check_float("strength", strength, 0, 1), check_float("damping", damping, 0, ends="(]"))


def sparse(n: int, m: int, *, by: Literal["loss", "inputs", "magnitude"] = "loss") -> Sparse:
    """Keeps n of every m consecutive inputs of a weight for each output; the other numbers become zero.

    The consecutive inputs are along the axes that the product sums over, in the order of `statistics`. The last group
    may be shorter. The format of the weight must have a zero, which a format with float zero points lacks.

    Args:
        n: the count of numbers that stay, from 1 to m - 1.
        m: the count of numbers in a group.
        by: ``"loss"`` (SparseGPT), the default, needs a `gptq` after it. When its sweep reaches a group, the numbers w
            with the largest w^2 / U_jj^2 stay. So pruning and rounding are one sweep, in which the columns that are
            left correct the error of both. ``order="activation"`` then orders groups by their largest column, and
            columns within groups. ``"inputs"`` (Wanda): the largest w^2 E[x_j^2]. ``"magnitude"``: the largest numbers.
            These two choose before anything is rounded, and scales are fitted to the numbers that stay.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", arXiv
    2301.00774, 2023; Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", arXiv 2306.11695,
    2023.

    Example:
        >>> import jax, jchop as jc
        >>> x, w = (jax.random.normal(jax.random.key(i), (64, 8)) for i in (0, 1))
        >>> dense, steps = jc.quantize_fn(lambda p, x: x @ p.T, "int4(group=all)"), [jc.ptq.sparse(2, 4), jc.ptq.gptq()]
        >>> packed, report = dense.pack(w, batches=[x], steps=steps, return_report=True)
        >>> int((jc.dequantize(packed).reshape(64, 2, 4) != 0).sum(-1).max()), report.weights[0].method
        (2, 'sparse, gptq')
    """
    check_choice("by", by, ("loss", "inputs", "magnitude"))
    (n, m), _ = check_sparsity_pattern(n, m)
    return Sparse(n, m, by)


def clip(points: int = 20, *, least: float = 0.5) -> Clip:
    """Computes the scale of each group from its numbers clipped to a share of their range, the best of several.

    A smaller scale serves most numbers of a group better, and the largest ones worse. The best share has the least
    error of the product on the data, tr(E^T H E). E are the errors of a group that is rounded to nearest by itself, and
    H has the group's rows and columns. Before `gptq` the error is the part that remains once later columns have
    corrected it, and a share must save three tenths of it. The rule of the format makes the scales, from clipped
    numbers. The numbers that are rounded under them, by a step after this one or to nearest, are not clipped before. So
    any format may have this step. A format whose scales are powers of two changes only if a range passes one of them.

    Args:
        points: the number of shares below 1. Default 20.
        least: the smallest share, above 0 and below 1. Default 0.5.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023, and its authors' code, which search clips by
    the errors of outputs. GPTQ's code searches scales by errors of weights.

    Example:
        >>> import jax, jchop as jc
        >>> x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in (0, 1))
        >>> dense, rule = lambda p, x: x @ p, jc.Rule(weight="int3(group=all)")
        >>> _, report = jc.quantize_fn(dense, rule).pack(w, batches=[x], steps=[jc.ptq.clip()], return_report=True)
        >>> report.weights[0].method, report.weights[0].after > report.weights[0].before + 1
        ('clip', True)
    """
    return Clip(check_int("points", points, 1), check_float("least", least, 0, 1, "()"))


def hqq(
    iterations: int = 20, *, norm: float = 0.7, weight: float = 10.0, growth: float = 1.01, whole_start: bool = False
) -> HalfQuadratic:
    """Finds zero points with the least p-th powers of the errors of a weight, so that outliers count little (HQQ).

    The search reads each weight by itself; it needs no data. A step after this one rounds under its scales and zero
    points; without one, numbers are rounded to nearest. The format of each weight must have float zero points, as
    ``"uint4(group=64,zero_point=float)"``.

    Args:
        iterations: the number of steps of the search, at least 1. Each one subtracts sparse errors and then moves the
            zero points. Default 20.
        norm: p, between 0 and 1, both excluded. Default 0.7.
        weight: the weight b of the errors in the first step, above 0. Default 10.
        growth: the factor of b after each step, above 0. Default 1.01.
        whole_start: whether to start with zero points that are whole multiples of the scales, as the authors do for 4
            bits. Default False.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Example:
        >>> import jax, jchop as jc
        >>> x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in (0, 1))
        >>> dense = jc.quantize_fn(lambda p, x: x @ p, "uint3(group=all,zero_point=float)")
        >>> _, report = dense.pack(w, batches=[x], steps=[jc.ptq.hqq(), jc.ptq.gptq()], return_report=True)
        >>> report.weights[0].method
        'hqq, gptq'
    """
    check_hqq_search(iterations, norm, weight, growth, whole_start)
    return HalfQuadratic(iterations, float(norm), float(weight), float(growth), whole_start)


def correct_biases() -> BiasCorrection:
    """Corrects the bias that the program adds to a product by the mean error of its rounded weight.

    The bias is the parameter that is added to the product, perhaps after transposes, reshapes and casts. If there is
    none, or it has other uses, the report says so. After `sequential`, biases also correct the mean errors of the
    layers before. Otherwise they correct the weight's own rounding alone.

    Source: Nagel et al., "Data-free quantization through weight equalization and bias correction", ICCV 2019,
    appendix D (empirical bias correction).

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> dense = lambda p, x: x @ p["w"] + p["b"]
        >>> params, x = {"w": jnp.linspace(-1, 1, 16).reshape(8, 2), "b": jnp.zeros(2)}, jnp.ones((4, 8))
        >>> low = jc.quantize_fn(dense, "int2(group=all)")
        >>> packed, report = low.pack(params, batches=[x], steps=[jc.ptq.correct_biases()], return_report=True)
        >>> report.weights[0].bias, bool(jnp.allclose(low(packed, x), dense(params, x)))
        ('b', True)
    """
    return BiasCorrection()


def as_steps(steps: Any) -> CalibrationSteps:
    """A list of steps, checked.

    Raises:
        TypeError: for an object that is no step.
        ValueError: for two steps of one kind, a correction after the rounding, or a mapping after either.
    """
    values = [steps] if isinstance(steps, CalibrationStep) else list(steps) if isinstance(steps, Iterable) else None
    other_types = [step for step in values or () if not isinstance(step, CalibrationStep)]
    if values is None or other_types:
        raise TypeError(f"steps={steps!r} must be a list of steps, such as [jc.ptq.correct_error(), jc.ptq.gptq()]")
    kinds = [f.name for f in fields(CalibrationSteps)]
    others = [step for step in values if step.field != "mappings"]
    order = [kinds.index(step.field) for step in values]
    if order != sorted(order) or len({step.field for step in others}) < len(others):
        raise ValueError(
            f"steps=[{', '.join(map(str, values))}] may have sequential, then smooth, awq and rotate, then one "
            "correct_error, then one sparse, then one clip or hqq, then one gptq or sign_round, then correct_biases"
        )
    mappings = tuple(step for step in values if isinstance(step, MappingStep))
    by_field: dict[str, Any] = {step.field: step for step in others}
    result = CalibrationSteps(mappings=mappings, **by_field)
    if result.pruning is not None and result.pruning.by == "loss" and not isinstance(result.sweep, Sweep):
        raise ValueError(f"{result.pruning} prunes in the sweep of gptq: add it, or choose by='inputs' or 'magnitude'")
    return result
