"""Published training methods as rules."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jchop._common.checks import check_choice, check_int
from jchop._quantized.products.operand_layout import Hadamard
from jchop._quantized.products.rule import Rule
from jchop._quantized.products.scale_from import DelayedScaling
from jchop._spec.accumulation import MatmulSpec

_FLOAT8_ROWS = "float8_e4m3fn(group=all,scale=e8m0fnu,rule=rceil)"
_MXFP8 = "mxfp8_e4m3(rule=rceil)"
_MXFP4_STOCHASTIC = "mxfp4(rule=floor_unclipped):stochastic"


def _recipe_fields(forward: str, gradient: str | None = None, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType(
        {"weight": forward, "activation": forward, "gradient": forward if gradient is None else gradient, **more}
    )


def _backward(text: str) -> dict[str, str]:
    """The fields that round all four operands of the backward products alike."""
    return dict.fromkeys(("gradient", "input_gradient", "weight_gradient"), text)


#: The fields of the rule of each recipe.
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # torchao.float8: one scale for each tensor; or for each row of each operand, powers of two; the third keeps
        # the product of the weights' gradient in high precision.
        "float8_tensorwise": _recipe_fields("float8_e4m3fn(group=tensor)", "float8_e5m2(group=tensor)"),
        "float8_rowwise": _recipe_fields(_FLOAT8_ROWS),
        "float8_rowwise_with_gw_hp": _recipe_fields(_FLOAT8_ROWS, weight_gradient="binary32"),
        # NVIDIA's Transformer Engine: tensors, under the scales of the last 1024 steps; gradients under their own.
        "float8_delayed": _recipe_fields(
            "float8_e4m3fn(group=tensor)", "float8_e5m2(group=tensor)", scale_from=DelayedScaling()
        ),
        # OCP Microscaling: blocks of 32 along the sum of each of the three products, scales rounded up.
        "mxfp8": _recipe_fields(_MXFP8),
        # NVIDIA, arXiv 2509.25149: two-level scales, weights in tiles, gradients rounded stochastically, and a rotation
        # of the operands of dw.
        "nvfp4": _recipe_fields("nvfp4", "nvfp4:stochastic", weight="nvfp4(group=(16,16))", rotation=Hadamard()),
        # Tseng et al., arXiv 2502.20586, algorithms 2 and 3: both operands of both backward products are rotated, and
        # rounded stochastically under scales that clip nothing.
        "mxfp4": _recipe_fields(
            "mxfp4(rule=rceil)", **_backward(_MXFP4_STOCHASTIC), rotation=Hadamard(64, products="both")
        ),
        # Castro et al., arXiv 2505.14669, algorithm 1: the same backward, and forward operands rotated too, clipped
        # where normal numbers lose least; no gradient where they are clipped.
        "mxfp4_quartet": _recipe_fields(
            "mxfp4(rule=quest):gradient=clipped", **_backward(_MXFP4_STOCHASTIC), rotation=Hadamard(32, products="all")
        ),
        # Panferov et al., arXiv 2601.22813: four over six forward; MS-EDEN backward, which draws signs and scales.
        "nvfp4_quartet2": _recipe_fields(
            "nvfp4(rule=four_over_six)",
            **_backward("nvfp4(rule=eden):stochastic"),
            rotation=Hadamard(128, "random", products="both"),
        ),
        # DeepSeek-V3, arXiv 2412.19437, section 3.3: rows of 128, tiles of 128 x 128, sums of 128 products, added in
        # float32.
        "deepseek_fp8": _recipe_fields(
            "float8_e4m3fn(group=128)", weight="float8_e4m3fn(group=(128,128))", product="codes"
        ),
        # torchao's int8_mixed_precision_training: three products of int8 codes, a scale for each row of each operand;
        # and the same with every operand rounded stochastically, so that each gradient is right on average.
        "int8": _recipe_fields("int8(group=all)", product="codes"),
        "int8_stochastic": _recipe_fields("int8(group=all):stochastic", product="codes"),
        # Wang et al., NeurIPS 2018: e5m2 operands, sums in e6m9, in chunks of 64.
        "ibm_fp8": _recipe_fields("float8_e5m2", matmul=MatmulSpec(accumulate="e6m9", order="blocked(64)")),
        # Sun et al., NeurIPS 2019: e4m3 of bias 11 forward, e5m2 backward.
        "ibm_hybrid_fp8": _recipe_fields("e4m3(bias=11)", "float8_e5m2"),
        # Wu et al., ICLR 2018, equations 6 and 10: ternary weights, all else in 8 bits; errors under a power of two.
        "wage": MappingProxyType(
            {
                "weight": "fixed1.1(symmetric=true)",
                "activation": "fixed1.7(symmetric=true):gradient=clipped",
                "gradient": "fixed1.7(symmetric=true,group=tensor,scale=float8_e8m0fnu)",
            }
        ),
    }
)


def recipe(name: str, path: str = "*", **changes: Any) -> Rule:
    """Returns the rule of a published training method.

    Some recipes use the same rounded weight in the forward product and in the product for the inputs' gradient, Q(W^T)
    = Q(W)^T. They are ``"float8_tensorwise"``, ``"float8_delayed"``, ``"nvfp4"``, ``"ibm_fp8"``, ``"ibm_hybrid_fp8"``,
    ``"wage"`` and, for weights with two axes, ``"deepseek_fp8"``. Others do not, by design, because their scales are
    for rows or blocks along the sum of each product. They are ``"float8_rowwise"``, ``"float8_rowwise_with_gw_hp"``,
    ``"mxfp8"``, ``"mxfp4"``, ``"mxfp4_quartet"``, ``"nvfp4_quartet2"``, ``"int8"`` and ``"int8_stochastic"``.

    ``"nvfp4"``, ``"mxfp4"`` and ``"nvfp4_quartet2"`` rotate the operands of backward products (`jchop.Hadamard`).
    Convolutions and experts have no rotation: give them a rule of their own, ``recipe(name, operation="conv",
    rotation=None)``, before the other. The published runs keep the first and the last blocks, the embeddings and the
    last layer in high precision. For this, put the rules of `keep_wide` before the recipe. Four over six is an option
    of NVIDIA's recipe: ``recipe("nvfp4", activation="nvfp4(rule=four_over_six)")``. The weight, in tiles, and the
    gradient have the same option.

    In ``"mxfp4"`` and ``"mxfp4_quartet"`` all four operands of the backward products are rounded stochastically. Each
    product is right on average, since the rule ``floor_unclipped`` clips nothing. Its scales are 4/3 of the powers of
    two of OCP: the papers' factor of 3/4 before the rounding and 16/9 after the product.

    ``"nvfp4_quartet2"`` draws the signs of rotations and rounds scales stochastically, not elements (the rule
    ``eden``). Each backward product is right on average over both draws, if a sum has a whole block of 128. Sums of
    fewer numbers need a smaller block: ``rotation=jc.Hadamard(64, "random", products="both")``. The authors pass the
    rounded x and w to the backward products, and divide by 6.07 in place of 6. One of their two kernels corrects the
    scales of a whole block of 128 by one factor; the other one each scale, as here.

    Some things differ from the papers. Signs of rotations are fixed in ``"mxfp4"`` and ``"mxfp4_quartet"``, not drawn
    in each step, and ``"mxfp4_quartet"`` rotates forward operands with them too. Tseng et al. have the forward product
    in bfloat16 or float8; here it is in MXFP4. Theirs is ``recipe("mxfp4", weight="bfloat16", activation="bfloat16")``.
    Castro et al. pass the rounded x and w to the backward products; here x and w come from full precision. They have no
    gradient of numbers beyond the largest element; here numbers that round beyond it, 7/6 of it and more, have none.
    Their released kernels divide by the standard deviation of a block, plus 1e-8. QuEST (arXiv 2502.05003), and the
    rule ``quest`` here, divide by the root mean square. ``"mxfp4_quartet"`` is for programs (`jchop.quantize_fn`,
    ``jc.nn.quantize(model, rules, inputs=...)``).

    ``"int8"``, ``"int8_stochastic"`` and ``"deepseek_fp8"`` multiply codes. With ``product="codes"`` so do ``"mxfp8"``,
    ``"mxfp4"``, ``"nvfp4"`` and the others of float8, except ``"float8_delayed"``, whose scales have a source of their
    own.

    A rule describes products. For the update of the weights use `jchop.optim`; docs/nn.md has both halves of
    ``"ibm_fp8"`` and ``"wage"``. Three things differ from WAGE. Errors keep their power of two; an update that scales
    each gradient by its own power of two gives the same numbers. That power is the nearest to the largest magnitude by
    difference, not by logarithm: half the paper's where its significand is from 1.414 to 1.488. The paper divides the
    result of a layer by a factor alpha, a power of two; here the model has to apply it.

    Args:
        name: the method. ``"float8_tensorwise"``, ``"float8_rowwise"``, ``"float8_rowwise_with_gw_hp"``: from torchao,
            with scales chosen anew for each tensor. ``"float8_delayed"``: tensorwise, with scales from a
            `DelayedScaling`; longer or shorter by ``scale_from=``. ``"mxfp8"`` (OCP): blocks of 32 along the sum of
            each product. ``"mxfp4"`` (Tseng et al., AISTATS 2025): backward products of stochastic operands, rotated.
            ``"mxfp4_quartet"`` (Castro et al., NeurIPS 2025): the forward product rotated and clipped, too.
            ``"nvfp4_quartet2"`` (Panferov et al., arXiv 2601.22813): four over six, and MS-EDEN gradients. ``"nvfp4"``
            (NVIDIA): weights in tiles of 16 x 16, stochastic gradients, dw rotated. ``"deepseek_fp8"``: rows of 128,
            tiles of 128 x 128, sums of 128 products in float32. ``"int8"``: torchao's int8 mixed precision.
            ``"int8_stochastic"``: the same, with operands rounded stochastically. ``"ibm_fp8"`` (Wang et al., NeurIPS
            2018): sums in e6m9 in chunks of 64. ``"ibm_hybrid_fp8"`` (Sun et al., NeurIPS 2019): e4m3 forward, e5m2
            backward. ``"wage"`` (Wu et al., ICLR 2018): 2-8-8-8 bits of weights, activations, gradients, errors.
        path: the path of the `Rule`. Default ``"*"``.
        changes: fields of the rule in place of the recipe's.

    Raises:
        TypeError, ValueError: for an unknown name or field.

    Example:
        >>> import jchop as jc
        >>> str(jc.nn.recipe("ibm_hybrid_fp8", "blocks", weight_gradient="e6m9", activation=None))
        "Rule('blocks', weight=e4m3(bias=11), gradient=float8_e5m2, weight_gradient=e6m9)"
    """
    check_choice("name", name, tuple(RECIPES))
    return Rule(path, **{**RECIPES[name], **changes})


def keep_wide(blocks: str, count: int, *, first: int = 2, last: int = 8, others: str = "{embed,head}") -> list[Rule]:
    """Returns rules that keep the first and the last blocks of a model, and other layers, in full precision.

    Put them before a recipe, since the first rule that matches applies. NVIDIA's run of 62 blocks in NVFP4 keeps the
    first two and the last eight (arXiv 2509.25149), and the embeddings and the last layer.

    Args:
        blocks: the path of the list of blocks, as ``"blocks"`` or ``"decoder/layers"``.
        count: the number of blocks.
        first: the number of blocks at the start that stay as they are. Default 2.
        last: the number of blocks at the end that stay as they are. Default 8.
        others: a pattern for the other layers that stay as they are. Default ``"{embed,head}"``; empty for none.

    Raises:
        TypeError, ValueError: for numbers of blocks that are negative, or more than there are.

    Example:
        >>> import jchop as jc
        >>> rules = [*jc.nn.keep_wide("blocks", 12, first=1, last=2), jc.nn.recipe("nvfp4")]
        >>> [rule.path for rule in rules]
        ['blocks/{0,10,11}', '{embed,head}', '*']
    """
    check_int("count", count, 1)
    check_int("first", first, 0, count)
    check_int("last", last, 0, count - first)
    indices = [*range(first), *range(count - last, count)]
    paths = [f"{blocks}/{{{','.join(map(str, indices))}}}"] if indices else []
    return [Rule(path) for path in (*paths, others) if path]
