"""QArrays as those of qwix and back: the same codes, scales and numbers. Skipped where qwix is not installed."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import assert_refused

import jchop as jc

#: Both of one grouping: text, and what qwix is asked for.
BOTH = [
    ("int8(channel=0)", jnp.int8, {"channelwise_axes": (0,)}),
    ("int4(group=8,axis=1)", jnp.int4, {"channelwise_axes": (0,), "tiled_axes": {1: 8}}),
    ("int3(group=tensor)", "int3", {}),
    ("float8_e4m3fn(channel=-1)", jnp.float8_e4m3fn, {"channelwise_axes": (1,)}),
    ("nf4(group=(2,8))", "nf4", {"tiled_axes": {0: 2, 1: 8}}),
    ("uint8(channel=0,zero_point=integer)", None, {}),
    ("mxfp4(group=8,axis=-1)", None, {}),
]


@pytest.fixture(scope="module")
def x() -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(2).standard_normal((4, 32)), jnp.float32)


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("text", [row[0] for row in BOTH])
def test_there_and_back(x, text):
    qwix = pytest.importorskip("qwix")
    q = jc.quantize(x, text)
    theirs = jc.to_qwix(q)
    assert theirs.qvalue.shape == x.shape and theirs.qvalue.dtype.itemsize == 1
    np.testing.assert_array_equal(qwix.dequantize(theirs), jc.dequantize(q))
    again = jc.from_qwix(theirs)
    np.testing.assert_array_equal(again.qvalue, q.qvalue)
    assert again.shape == q.shape and again.spec.element == q.spec.element
    assert again.scale.shape == q.scale.shape


def test_two_scales_become_their_product(x):
    qwix = pytest.importorskip("qwix")
    for shape in ((4, 32), (2, 2, 32)):
        q = jc.quantize(x.reshape(shape), jc.Spec("nvfp4"))
        theirs = jc.to_qwix(q)
        block, tensor = q.scale
        product = np.asarray(jc.formats.float8_e4m3fn.decode(np.asarray(block)), np.float32) * np.asarray(tensor)
        np.testing.assert_array_equal(theirs.scale, product)
        np.testing.assert_array_max_ulp(np.asarray(qwix.dequantize(theirs)), np.asarray(jc.dequantize(q)), 2)
        assert theirs.qvalue.dtype == jnp.float4_e2m1fn and theirs.scale.shape == (*shape[:-1], 2)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("text", "qtype", "how"), [row for row in BOTH if row[1] is not None])
def test_what_qwix_quantized(x, text, qtype, how):
    qwix = pytest.importorskip("qwix")
    theirs = qwix.quantize(x, qtype, **how)
    q = jc.from_qwix(theirs)
    np.testing.assert_array_equal(jc.dequantize(q), qwix.dequantize(theirs))
    assert q.spec.scaled is not None
    assert q.spec.scaled.group_shape(x.shape) == jc.Spec(text).scaled.group_shape(x.shape)  # type: ignore[union-attr]
    back = jc.to_qwix(q)
    assert back.qtype == theirs.qtype and back.qvalue.dtype == theirs.qvalue.dtype
    np.testing.assert_array_equal(qwix.dequantize(back), qwix.dequantize(theirs))


def test_what_qwix_has_no_form_for(x):
    pytest.importorskip("qwix")

    def converted(text):
        return jc.to_qwix(jax.eval_shape(lambda x: jc.quantize(x, text), x))

    texts = ["int4(group=8,scale=int8(channel=0))", "uint4(channel=0,zero_point=float)", "e3m2fn(channel=0)",
             "e3m2fn", "int4(group=12)"]  # fmt: skip
    assert_refused({text: (partial(converted, text), ValueError, r"q has|q is of") for text in texts})


def test_other_refusals(x):
    qwix = pytest.importorskip("qwix")
    with pytest.raises(TypeError, match=r"^q is \w+ float32\[.*\]; it must be a QArray.*$"):
        jc.to_qwix(x)
    for given in (x, jc.quantize(x, "int8(channel=0)")):
        with pytest.raises(TypeError, match=r"^q is \w+ float32\[.*\]; it must be a qwix\.QArray$"):
            jc.from_qwix(given)
    with pytest.raises(ValueError, match="zero_point has shape"):
        jc.from_qwix(qwix.QArray(x.astype(jnp.int8), x[:, :1], jnp.zeros((1, 1), jnp.int8)))


@pytest.mark.smoke
def test_where_qwix_is_missing_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "qwix" else find(name, *more))
    q = jc.quantize(np.ones(4, np.float32), "int8(group=tensor)")
    for convert in (jc.to_qwix, jc.from_qwix):
        with pytest.raises(ModuleNotFoundError, match=r"needs qwix: pip install .\.\[qwix\]"):
            convert(q)
