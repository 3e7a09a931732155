"""Blocks of numbers that are hard to scale, for every test of scaled formats."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import cases
import numpy as np
import oracle
from oracle import CARRIERS, Special

import jchop as jc
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat


def blocks(element: str, group: int, axis: int = -1, scale: Any = "e8m0fnu", rule: str = "floor", **more: Any) -> Spec:
    """Blocks along an axis, from the text of the elements' spec, whose overflow rule is its own."""
    spec = jc.Spec(element)
    return replace(spec, format=ScaledFormat(spec.element, group, axis, scale=scale, rule=rule, **more))


def mx(element: str, *, rule: str = "floor", block: int = 32, axis: int = -1) -> Spec:
    """Elements under powers of two, as those of OCP MX; int8 is MXINT8, and int4 likewise."""
    fixed = {"int8": "fixed2.6(symmetric=true)", "int4": "fixed2.2(symmetric=true)"}
    return blocks(f"{fixed.get(element, element)}:saturate", block, axis, rule=rule)


def nvfp4(*, two_level: bool = True, axis: int = -1) -> Spec:
    return Spec(jc.formats.nvfp4(axis=axis, rule="two_level" if two_level else "absmax"))


def integer_groups(bits: int, block: int, *, scale: str = "float32", rule: str = "absmax", axis: int = -1) -> Spec:
    return blocks(f"integer{bits}", block, axis, scale, rule)


def values_of(x: np.ndarray) -> list[oracle.Value]:
    carrier = CARRIERS[x.dtype.name]
    return [oracle.from_bits(pattern, carrier) for pattern in cases.bits(x)]


def moved(x: np.ndarray, ulps: np.ndarray | int) -> np.ndarray:
    """Finite numbers moved away from zero by units in the last place, within the finite ones."""
    carrier = CARRIERS[x.dtype.name]
    sign = cases.bits(x) & carrier.words.type(carrier.sign)
    magnitude = (cases.bits(x) & carrier.words.type(carrier.sign - 1)).astype(np.int64) + ulps
    return (np.clip(magnitude, 0, carrier.infinity - 1).astype(carrier.words) | sign).view(x.dtype)


def adversarial(fmt: Any, block: int, dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks (count, block) that are hard to scale to an element format.

    Their largest magnitudes are powers of two over the whole range of exponents and their neighbours; the other numbers
    lie on the scaled grid and halfway, moved by units in the last place. Some blocks are all zeros, have one number,
    hold infinities and NaN, are subnormal or NaN throughout.
    """
    carrier, kind = CARRIERS[dtype], cases.DTYPES[dtype]
    most = float(fmt.max)
    grid = fmt.values() if fmt.bits <= 8 else np.linspace(-most, most, 999)
    grid = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    with np.errstate(all="ignore"):
        exponents = np.linspace(1 - carrier.bias - carrier.m, carrier.bias, count).round().astype(int)
        largest = np.ldexp(rng.choice([1, 1, 1.5, 1.75], count), exponents).astype(kind)
        largest = moved(np.where(np.isfinite(largest), largest, 1).astype(kind), rng.integers(-2, 3, count))
        bound = largest.astype(np.float64)[:, None]
        near = rng.choice(grid, (count, block)) * (bound / most * rng.choice([1, 1, 2, 0.5, 4 / 3], (count, 1)))
        x = moved(np.clip(near, -bound, bound).astype(kind), rng.integers(-1, 2, (count, block)))
        x = np.where(np.abs(x.astype(np.float64)) > bound, largest[:, None], x)
    x[np.arange(count), rng.integers(0, block, count)] = np.where(rng.random(count) < 0.5, largest, -largest)
    which = rng.integers(0, 10, count)
    x[which == 0] = rng.choice(np.array([0.0, -0.0], kind), (int(np.sum(which == 0)), block))
    x[which == 1, 1:] = 0
    for row in np.flatnonzero(which == 2):
        x[row, rng.integers(0, block, 2)] = rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf], kind), 2)
    tiny = (int(np.sum(which == 3)), block)
    bits = rng.integers(0, 2 ** rng.integers(1, carrier.m + 1, (tiny[0], 1)), tiny).astype(carrier.words)
    x[which == 3] = np.where(rng.random(tiny) < 0.5, bits, bits | carrier.words.type(carrier.sign)).view(kind)
    x[which == 4] = rng.choice(np.array([np.nan, np.inf, -np.inf], kind), (int(np.sum(which == 4)), block))
    return x


def value_of(x: Any) -> oracle.Value:
    """A float as the oracle has it."""
    x = float(x)
    if np.isnan(x):
        return Special.NAN
    if np.isinf(x):
        return Special.INF if x > 0 else Special.NEG_INF
    return Special.NEG_ZERO if x == 0 and np.signbit(x) else Fraction(x)


def ranges(levels: int, block: int, dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks (count, block) that are hard to give a zero point, for integers of so many values.

    Most span a range of levels - 1 powers of two, its ends moved by units in the last place, and hold whole and half
    multiples of that power; the power runs over the whole range of exponents. In others the two ends are far apart in
    magnitude, of one sign, or beyond halves; some are zeros, subnormal, or hold infinities and NaN.
    """
    carrier, kind = CARRIERS[dtype], cases.DTYPES[dtype]
    with np.errstate(all="ignore"):
        unit = np.ldexp(1.0, np.linspace(1 - carrier.bias - carrier.m, carrier.bias - 1, count).round().astype(int))
        least = -rng.integers(0, levels, count)
        x = (rng.integers(0, 2 * levels - 1, (count, block)) / 2 + least[:, None]) * unit[:, None]
        x[:, 0], x[:, -1] = least * unit, (least + levels - 1) * unit
        largest = float(oracle.largest(oracle.ieee(carrier.e, carrier.m)))
        steps = rng.integers(-1, 2, (count, block)) * (rng.random((count, 1)) < 0.6)
        x = moved(np.clip(x, -largest, largest).astype(kind), steps)
    which = rng.integers(0, 12, count)
    x[which == 0] = np.abs(x[which == 0])
    x[which == 1] = -np.abs(x[which == 1])
    x[which == 2] = rng.choice(np.array([0.0, -0.0], kind), (int(np.sum(which == 2)), block))
    for row in np.flatnonzero(which == 3):
        x[row, rng.integers(0, block, 2)] = rng.choice(np.array([np.nan, np.inf, -np.inf], kind), 2)
    for row in np.flatnonzero(which == 4):  # one end far below the other
        x[row, 0] = moved(np.ldexp(x[row, -1:].astype(np.float64), -int(rng.integers(1, 60))).astype(kind), 1)[0] * -1
        x[row, 1:-1] = 0
    tiny = (int(np.sum(which == 5)), block)
    bits = rng.integers(0, 2 ** rng.integers(1, carrier.m + 1, (tiny[0], 1)), tiny).astype(carrier.words)
    x[which == 5] = np.where(rng.random(tiny) < 0.5, bits, bits | carrier.words.type(carrier.sign)).view(kind)
    x[which == 6] = (rng.standard_normal((int(np.sum(which == 6)), block)) * unit[which == 6, None]).astype(kind)
    return x


def extreme(dtype: str) -> list[np.ndarray]:
    """Arrays whose rows of four are groups at the ends of a carrier: all of them together, and each by itself."""
    carrier, kind = CARRIERS[dtype], cases.DTYPES[dtype]
    fraction = 1 << carrier.m
    patterns = {
        "tiny": [1, 0, 3, 2],
        "subnormal": [fraction - 1, 5, fraction // 2 + 1, 1],
        "normal": [fraction, fraction - 1, fraction + 1, 2 * fraction + 3],
        "huge": [carrier.infinity - 1, carrier.infinity - 2, carrier.infinity - fraction, 1],
        "zero": [0, 0, 0, 0],
        "infinite": [carrier.infinity, 1, carrier.infinity - 1, carrier.infinity],
        "nan": [carrier.infinity + 1, carrier.infinity, carrier.infinity + 1, carrier.infinity + 1],
    }
    signs = np.array([0, carrier.sign, 0, carrier.sign], carrier.words)
    rows = [(np.array(row, carrier.words) | signs).view(kind) for row in patterns.values()]
    rows += [np.array(row, kind) for row in ((1, 0.3, -0.7, 0.01), (1, -1e-4, 6e4, -0.0))]
    rows.append(np.concatenate([rows[0][:1], rows[3][1:2], rows[2][2:3], rows[-1][:1]]))  # mixed
    return [np.stack(rows), *(np.stack([row] * len(rows)) for row in rows)]
