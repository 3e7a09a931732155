"""The ways of a sum over ranks, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jchop.distributed._axes import RankAxes

#: Every rank sends its piece of each other rank's sum once, in codes; the sums are quantized once more.
TWO_SHOT = "two_shot"
#: Partial sums go round the ranks, and each rank quantizes them again.
RING = "ring"


@dataclass(frozen=True)
class Hierarchical:
    """A sum over `inner` ranks first, and of these sums over `outer` ranks; see `hierarchical`."""

    inner: Any
    outer: Any

    def __str__(self) -> str:
        return f"hierarchical({self.inner!r}, {self.outer!r})"


Algorithm = str | Hierarchical


def hierarchical(inner: Any, outer: Any) -> Hierarchical:
    """The algorithm of a sum over two mesh axes, one after the other: three roundings, less data between nodes.

    The ranks along `inner` exchange codes and add them; the partial sums are quantized again, exchanged along `outer`
    and added. So each rank sends 1/I of its numbers along `outer`, with I ranks along `inner`.

    Args:
        inner: name of the mesh axis with fast links, inside a node.
        outer: name of the mesh axis between nodes.

    Returns:
        A value for the argument `algorithm` of the sums of `jchop.distributed`, whose `axis_name` then has these two
        names.

    Raises:
        ValueError: if both are the same axis.

    References:
        ZeRO++, arXiv 2306.10209, section 3.3 (qgZ).

    Example:
        >>> import jchop as jc
        >>> jc.distributed.hierarchical("chip", "node")
        Hierarchical(inner='chip', outer='node')
    """
    if inner == outer:
        raise ValueError(f"inner={inner!r} and outer={outer!r} must be two different mesh axes")
    return Hierarchical(inner, outer)


def stages_of(algorithm: Any, axes: RankAxes) -> tuple[RankAxes, ...] | None:
    """The axes of each exchange of a sum; None for the ring.

    Raises:
        ValueError: for another algorithm, or axes that are not those of the hierarchy.
    """
    if isinstance(algorithm, Hierarchical):
        if {algorithm.inner, algorithm.outer} != set(axes.names):
            raise ValueError(
                f"algorithm={algorithm} is over two axes, and axis_name={axes.name!r}; pass "
                f"axis_name=({algorithm.outer!r}, {algorithm.inner!r})"
            )
        sizes = dict(zip(axes.names, axes.sizes, strict=True))
        return tuple(RankAxes((name,), (sizes[name],)) for name in (algorithm.inner, algorithm.outer))
    if algorithm == TWO_SHOT:
        return (axes,)
    if algorithm == RING:
        return None
    raise ValueError(
        f"algorithm={algorithm!r} must be {TWO_SHOT!r}, {RING!r} or a value of jchop.distributed.hierarchical(inner, "
        "outer)"
    )
