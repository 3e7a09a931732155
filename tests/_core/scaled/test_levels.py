"""HiF4: scales that double for groups within groups, against NumPy and fractions written from the definition."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further

import jchop as jc

further = Further()

SCALES = oracle.FloatSet(6, 2, 48, subnormals=False, inf=False, nan="top", signed=False, zero=False)


def reference(row: list[Fraction]) -> tuple[Fraction, list[int], list[int], list[Fraction]]:
    """Scale, doublings for each 8 and for each 4 numbers, and elements: HiF4 (arXiv 2602.11287), exact quotients."""
    sizes = [abs(x) for x in row] + [Fraction(0)] * (-len(row) % 8)
    scale = oracle.round_exact(SCALES, max(sizes) / 7, "nearest_even", "saturate") if any(sizes) else Fraction(1)
    assert isinstance(scale, Fraction)
    eights = [2 if max(sizes[at : at + 8]) >= 4 * scale else 1 for at in range(0, len(sizes), 8)]
    fours = [2 if max(sizes[at : at + 4]) >= 2 * scale * eights[at // 8] else 1 for at in range(0, len(sizes), 4)]
    elements = []
    for i, x in enumerate(row):
        count = abs(x) / (scale * eights[i // 8] * fours[i // 4]) * 4 + Fraction(1, 2)
        elements.append(Fraction(min(count // 1, 7), 4) * (-1 if x < 0 else 1))
    return scale, eights, fours, elements


def rows() -> np.ndarray:
    """Numbers of one size, outliers, quarters of the scale and ties, zeros, one number, and both ends of the scales."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((24, 150)) * rng.choice([1, 1, 8, 0.1], (24, 150))
    x[6:12] = rng.integers(-56, 57, (6, 150)) / 8
    x[9:12, ::5] = 7
    x[12:16] = np.repeat(rng.choice([3.5, 4, 2, 1.75, 7, 0.5], (4, 38)), 4, axis=1)[:, :150]
    x[12:16, 0] = 7
    x[16] = 0
    x[17, 1:] = 0
    x[18:20] *= 2.0 ** np.array([[-50], [-46]])
    x[20:22] *= 2.0 ** np.array([[14], [17]])
    return x.astype(np.float32)


@further
def every_number_and_every_code() -> None:
    x = rows()
    q = jc.quantize(x, "hif4:nearest_away")
    numbers, (fours, eights, scales) = np.asarray(jc.dequantize(q)), q.scale
    elements = np.asarray(
        jc.formats.hif4.element.decode(np.stack([q.qvalue & 15, q.qvalue >> 4], -1).reshape(24, -1)[:, :150])
    )
    held_scales = np.asarray(jc.formats.hif4.scale.scale.scale.decode(scales))  # type: ignore[union-attr]
    bits = [np.unpackbits(np.asarray(codes), axis=1, bitorder="little") for codes in (fours, eights)]
    for i, row in enumerate(x):
        for at in range(0, 150, 64):
            exact = [Fraction(float(v)) for v in row[at : at + 64]]
            scale, of_eights, of_fours, wanted = reference(exact)
            steps = [scale * of_eights[k // 8] * of_fours[k // 4] for k in range(len(exact))]
            got = [Fraction(float(v)) for v in numbers[i, at : at + 64]]
            assert got == [step * element for step, element in zip(steps, wanted, strict=True)], (i, at)
            # Doubled eights of two plain fours are plain eights of two doubled fours: the codes have one form.
            held = Fraction(float(held_scales[i, at // 64]))
            code = [
                held * (1 + int(bits[1][i, (at + k) // 8])) * (1 + int(bits[0][i, (at + k) // 4]))
                for k in range(len(exact))
            ]
            if any(exact):
                assert (held, code) == (scale, steps)
            assert [Fraction(float(e)) * s for e, s in zip(elements[i, at : at + 64], code, strict=True)] == got


def test_the_published_array() -> None:
    """21.619 dB, with the products by bfloat16 reciprocals of the paper too; 4.5 bits a number."""
    x = (np.random.default_rng(0).standard_normal((512, 1024)) * 0.02).astype(np.float32)
    rounded = np.asarray(jc.round_to_format(x, "hif4:nearest_away"), np.float64)
    error = ((rounded - x) ** 2).sum()
    assert abs(10 * np.log10((x.astype(np.float64) ** 2).sum() / error) - 21.619) < 0.001
    assert jc.formats.hif4.bits_per_element() == 4.5


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("what", ["saved", "cut", "turned"])
def stored_arrays_are_cut_moved_and_saved(what: str, tmp_path: Path) -> None:
    x = rows()[:, :128]
    q = jc.quantize(jnp.asarray(x), "hif4")
    whole = np.asarray(jc.dequantize(q))
    if what == "cut":
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(q)) * 8 == 4.5 * x.size
        np.testing.assert_array_equal(jc.dequantize(q[3:7, 64:]), whole[3:7, 64:])
        np.testing.assert_array_equal(jc.round_to_format(x, "hif4"), whole)
        np.testing.assert_array_equal(jc.dequantize(q.reshape(4, 6, 128)), whole.reshape(4, 6, 128))
    elif what == "turned":
        turned = jc.quantize(jnp.asarray(x.T), "hif4(axis=0)")
        np.testing.assert_array_equal(jc.dequantize(turned.T), whole)
        given = jc.quantize(x, "hif4", scale=jc.fit_scale(x, "hif4")[0])
        np.testing.assert_array_equal(jc.dequantize(given), whole)
    else:
        jc.save(tmp_path / "w.safetensors", {"w": q})
        loaded = jc.load(tmp_path / "w.safetensors")
        np.testing.assert_array_equal(jc.dequantize(loaded["w"]), whole)


@further.first
def text_and_what_is_refused() -> None:
    assert (str(jc.formats.hif4), str(jc.formats.hif4(axis=0))) == ("hif4", "hif4(axis=0)")
    for fmt in (
        jc.formats.hif4,
        jc.formats.hif4(axis=0),
        jc.formats.hif4(group=8, axis=1),
        jc.formats.hif4(element="integer4"),
    ):
        assert jc.Spec(str(fmt)).format == fmt
    for scale in ("e4m3fn", "int4(group=16)", "codebook(1,2,group=4,scale=bfloat16)"):
        with pytest.raises(ValueError, match="rule='levels' needs scales that are quantized again to codebook"):
            jc.formats.hif4(scale=scale)
    with pytest.raises(ValueError, match="nan_block"):
        jc.formats.hif4(nan_block=True)


test_further = further.test()
