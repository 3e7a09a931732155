"""The steps that change parameters before they are rounded, and leave the function what it is."""

from __future__ import annotations

from dataclasses import dataclass

from jchop._common.checks import check_int

__all__ = ["Awq", "Mapping", "Rotate", "Smooth", "awq", "rotate", "smooth"]


@dataclass(frozen=True)
class Smooth:
    """SmoothQuant; `smooth` makes it."""

    alpha: float

    #: Its name in a report.
    name = "smooth"

    def __str__(self) -> str:
        return f"smooth({self.alpha:g})"


@dataclass(frozen=True)
class Awq:
    """AWQ; `awq` makes it."""

    points: int
    duo: bool

    #: Its name in a report.
    name = "awq"

    def __str__(self) -> str:
        return f"awq({self.points}, duo={self.duo})"


@dataclass(frozen=True)
class Rotate:
    """Rotations; `rotate` makes it."""

    seed: int | None

    #: Its name in a report.
    name = "rotate"

    def __str__(self) -> str:
        return f"rotate({self.seed})"


Mapping = Smooth | Awq | Rotate


def smooth(alpha: float = 0.5) -> Smooth:
    """SmoothQuant: large channels of the inputs of products are made smaller, and their weights larger.

    Channel j of the input of a weight is divided by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), and the weight is
    multiplied by it: by factors folded into parameters, so that nothing is divided when the function runs. The program
    shows where they can go: into the scale of a norm, or the outputs of the product before. Weights that share an input
    (queries, keys and values) share its factors. A weight whose factors cannot be folded stays as it is, and the report
    says why. A channel whose input was always zero has the factor 1.

    Args:
        alpha: how much of the difficulty goes from inputs to weights, from 0 to 1. Default 0.5.

    Raises:
        TypeError, ValueError: for another alpha.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    arXiv 2211.10438, 2022.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.smooth(0.8))
        'smooth(0.8)'
    """
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha={alpha!r} must be a number from 0 to 1")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha!r} must be a number from 0 to 1")
    return Smooth(float(alpha))


def awq(points: int = 20, *, duo: bool = True) -> Awq:
    """AWQ: channels with large inputs get more of the levels of a weight, as much as makes the errors of outputs least.

    For r = 0, 1/n, ..., 1 - 1/n the factors s = mean|x|^r are tried, and factors of 1: the weight times s is rounded to
    nearest and divided by s again, and the s is kept with which W x has the least mean squared error on the data,
    summed over the weights that share the input. The error is computed from the Gram matrix of the inputs, so no inputs
    are kept. Factors are divided by the root of their largest times their smallest, and folded as those of `smooth`
    are. Each turn of a loop over a stack has an r of its own.

    Args:
        points: n, at least 1. Default 20.
        duo: whether the factors are mean|x|^r / (mean|w|^(1 - r) + 1e-4), with each w in units of the largest of its
            group. Default True.

    Raises:
        TypeError, ValueError: for other arguments.

    Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv
    2306.00978, 2023; `duo` is the duo scaling of llm-compressor.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.awq(duo=False))
        'awq(20, duo=False)'
    """
    if not isinstance(duo, bool):
        raise TypeError(f"duo={duo!r} must be True or False")
    return Awq(check_int("points", points, 1), duo)


def rotate(seed: int | None = 0) -> Rotate:
    """Rotations: the inputs of products are multiplied by orthogonal matrices, which spread large channels over all.

    The input x of a weight becomes x R, and the weight R^T W, by parameters alone: R goes into the outputs of the
    products before, if nothing but sums, moves, and factors that all channels share lies between. So a residual stream
    is rotated in all that writes and reads it, embeddings too, and the values of attention for each head. RMSNorm
    commutes with R if its scale is the same for all channels; another scale goes into the weights that follow first. R
    is the same in all turns of loops. A weight whose input cannot be rotated stays as it is, and the report says why.

    R is a Hadamard matrix over the root of its size, after random signs. Sizes are powers of two times one, or a size
    that Paley's construction gives from a prime (12, 20, 24, 28, 44, ...); for another one R has blocks of the largest
    power of two that divides it.

    Args:
        seed: of the signs, from 0 to 2^32 - 1; None for no signs. Default 0.

    Raises:
        TypeError, ValueError: for another seed.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456, 2024, and Liu et
    al., "SpinQuant: LLM Quantization with Learned Rotations", arXiv 2405.16406, 2024, whose R1 and R2 these are.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> params = {"a": jnp.eye(8), "b": jnp.ones((8, 2))}
        >>> rule = jc.Rule("b", weight="int8(group=all)", activation="int4(group=all)")
        >>> two = lambda p, x: (x @ p["a"]) @ p["b"]
        >>> packed, report = jc.ptq.quantize(two, rule, params, [jnp.ones((4, 8))], [jc.ptq.rotate()])
        >>> report.weights[0].note.partition(";")[0], float(jnp.abs(packed["a"]).max())
        ('rotate by Hadamard 8 folded into a', 0.3535533845424652)
    """
    return Rotate(None if seed is None else check_int("seed", seed, 0, 2**32 - 1))
