"""Modules that round: `Quantizer`, and `quantize` on modules."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from further import Further

pytest.importorskip("torch")

import torch
from refusals import assert_refused
from torch import nn
from torch_bridge.tensors import array, same_bits

import jchop as jc

further = Further()

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

rounded = jc.torch.round_to_format


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2))


def inputs() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def key_of(*numbers: int) -> jax.Array:
    key = jax.random.key(numbers[0])
    for number in numbers[1:]:
        key = jax.random.fold_in(key, number)
    return key


# -- Quantizer ---------------------------------------------------------------------------------------------------------


@further
def both_ways_are_rounded_with_the_bits_of_the_call():
    quantizer = jc.torch.Quantizer("e4m3:stochastic", "e5m2:stochastic", seed=2**33 + 7)
    x, g = inputs(), torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    with jax.enable_x64(True):
        seed = jax.random.key(2**33 + 7)
    for call in range(2):
        leaf = x.clone().requires_grad_()
        y = quantizer(leaf)
        y.backward(g)
        forward, backward = (jax.random.fold_in(jax.random.fold_in(seed, call), place) for place in (0, 1))
        assert same_bits(y, jc.round_to_format(array(x), "e4m3:stochastic", forward))
        assert leaf.grad is not None and same_bits(leaf.grad, jc.round_to_format(array(g), "e5m2:stochastic", backward))
    assert quantizer.state_dict().keys() == {"calls"} and quantizer.calls == 2


def test_each_rounding_draws_for_itself():
    """Of each parameter, layer and call, of inputs, results and gradients: of halves, which become 0 or 1."""
    wide, eye = {name: nn.Linear(1, 64) for name in "ab"}, {name: nn.Linear(64, 64, bias=False) for name in "cdef"}
    for layer in wide.values():
        nn.init.constant_(layer.weight, 0.5)
        nn.init.constant_(layer.bias, 0.5)
    for layer in eye.values():
        nn.init.eye_(layer.weight)
    half = "fixed8.0:stochastic"
    rules = {
        "{a,b}": {"weight": half, "bias": half},
        "{c,d}": {"activation": half},
        "*": {"output": half, "gradient": half},
    }
    low: Any = jc.torch.quantize(nn.ModuleDict({**wide, **eye}), rules)
    drawn = [getattr(low[layer], name) for layer in "aabb" for name in ("weight", "bias")]
    for layer in "ccddeeff":
        x = torch.full((1, 64), 0.5, requires_grad=True)
        drawn.append(low[layer](x))
        drawn[-1].backward(x.detach())
        drawn += [x.grad] if layer in "ef" else []
    rows = [tuple(v.flatten().tolist()) for v in drawn]
    assert set().union(*rows) == {0, 1} and len(set(rows)) == len(rows) == 20


def test_one_way_alone():
    x = inputs().requires_grad_()
    (5 * jc.torch.Quantizer(backward="e3m1")(x)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 4.0))  # 5 is a tie between 4 and 6
    forward = jc.torch.Quantizer("fixed2.2:gradient=clipped+[e3m1]")
    assert torch.equal(forward(x), rounded(x, "fixed2.2")) and not forward.state_dict()
    assert str(forward) == "Quantizer(forward=fixed2.2:gradient=clipped, backward=e3m1)"
    numbers = torch.arange(3)
    assert forward(numbers) is numbers
    assert torch.equal(forward(inputs()[:, ::2]), rounded(inputs()[:, ::2].clone(), "fixed2.2"))
    for wrong in ({"forward": "e5m2:gradient=e5m2", "backward": "e5m2"}, {"backward": "e5m2:gradient=clipped"}):
        with pytest.raises(ValueError, match="gradient"):
            jc.torch.Quantizer(**wrong)
    with pytest.raises(ValueError, match="seed=-1"):
        jc.torch.Quantizer("e5m2", seed=-1)


# -- quantize ----------------------------------------------------------------------------------------------------------


def test_everything_that_a_rule_names_is_rounded():
    plain, x = model(), inputs()
    rule = {"weight": "e4m3", "bias": "bfloat16", "activation": "e3m4", "output": "e5m3", "gradient": "e5m2"}
    low = jc.torch.quantize(plain, {"0": rule})
    leaf = x.clone().requires_grad_()
    y = low[0](leaf)  # type: ignore[index]
    g = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    y.backward(g)
    weight, bias = rounded(plain[0].weight, "e4m3"), rounded(plain[0].bias, "bfloat16")  # type: ignore[arg-type]
    a = rounded(x, "e3m4")
    assert torch.equal(y, rounded(nn.functional.linear(a, weight, bias), "e5m3"))
    h = rounded(g, "e5m2")
    assert leaf.grad is not None and torch.equal(leaf.grad, h @ weight)
    original = low[0].parametrizations.weight.original  # type: ignore[index]
    torch.testing.assert_close(original.grad, h.T @ a)
    assert torch.equal(low[3].weight, plain[3].weight)  # type: ignore[index]
    assert not hasattr(plain[0], "parametrizations")  # the given module stays as it is


def test_the_first_pattern_that_matches_counts():
    rules = {"2.0": {"weight": "e2m1"}, "3": {}, "2": {"weight": "e3m2"}, "*": {"weight": "int4(group=all)"}}
    low = jc.torch.quantize(model(), rules)
    found = {
        name: layer.parametrizations.weight[0].rounding.spec
        for name, layer in low.named_modules()
        if hasattr(layer, "parametrizations")
    }
    assert found == {"0": "int4(group=all)", "2.0": str(jc.Spec("e2m1")), "2.1": str(jc.Spec("e3m2"))}


ONE_SPEC: list[Any] = ["int4(group=4)", jc.Spec("int4(group=4)"), {"*": "int4(group=4)"},
                       jc.Rule(weight="int4(group=4)", product="float"), [jc.Rule("*", weight="int4(group=4)")],
                       {"0": jc.Rule(weight="int4(group=4)"), "*": "int4(group=4)"},
                       [jc.Rule("0", layer="Linear", weight="int4(group=4)"), jc.Rule(weight="int4(group=4)")],
                       ]  # fmt: skip


@pytest.mark.parametrize("rules", ONE_SPEC, ids=str)
def test_every_form_of_rules_says_the_same(rules: Any):
    wanted = jc.torch.quantize(model(), {"*": {"weight": "int4(group=4)"}})(inputs())
    assert torch.equal(jc.torch.quantize(model(), rules)(inputs()), wanted)
    assert torch.equal(jc.torch.quantize(model(), rules, "ptq")(inputs()), wanted)


def test_a_dtype_is_a_spec_of_weights():
    for rules in (torch.bfloat16, {"*": torch.bfloat16}):
        low: Any = jc.torch.quantize(model(), rules)
        assert torch.equal(low[0].weight, model()[0].weight.bfloat16().float())  # type: ignore[index, operator]


def test_a_name_of_torch_s_manner_is_answered():
    with pytest.raises(AttributeError, match=r"write round_to_format\(tensor, spec, inplace=True\)"):
        jc.torch.round_to_format_  # noqa: B018


def test_a_class_of_layers_selects():
    """By its own name, also where torch has put a parametrization on it."""
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    low: Any = jc.torch.quantize(nn.Sequential(plain, nn.Conv1d(8, 8, 1)), [jc.Rule(layer="Linear", weight="e2m1")])
    assert torch.equal(low[0].weight, rounded(plain.weight, "e2m1")) and not hasattr(low[1], "parametrizations")


@further.first
def layers_draw_bits_of_their_own():
    low = jc.torch.quantize(model(), {"*": {"weight": "e5m1:stochastic", "gradient": "e5m1:stochastic"}}, seed=3)
    plain, layer = model(), low[0]  # type: ignore[index]
    call = int(layer.parametrizations.weight[0].calls)
    expected = jc.round_to_format(jnp.asarray(array(plain[0].weight)), "e5m1:stochastic", key_of(3, 0, 2, call, 0))  # type: ignore[arg-type]
    assert same_bits(layer.weight, expected)
    assert not torch.equal(layer.weight, layer.weight)  # another draw each time
    rule = {"*": {"weight": "e5m1:stochastic"}}
    first, zero = (jc.torch.quantize(model(), rule, **seed)[0].weight for seed in ({}, {"seed": 0}))  # type: ignore[index]
    assert torch.equal(first, zero)


@further
def models_are_copied_saved_trained_and_compiled():
    low = jc.torch.quantize(
        model(), {"*": {"weight": "e5m2:stochastic", "activation": "e4m3", "gradient": "e5m2:stochastic"}}
    )
    x = inputs()
    twin = copy.deepcopy(low)
    again = jc.torch.quantize(
        model(), {"*": {"weight": "e5m2:stochastic", "activation": "e4m3", "gradient": "e5m2:stochastic"}}
    )
    again.load_state_dict(low.state_dict())
    compiled = torch.compile(copy.deepcopy(low), fullgraph=True, backend="aot_eager")
    y = low(x)
    assert torch.equal(y, twin(x)) and torch.equal(y, again(x)) and torch.equal(y, compiled(x))
    y.sum().backward()
    assert all(p.grad is not None for p in low.parameters())
    assert torch.equal(pickle.loads(pickle.dumps(low.state_dict()))["0.jchop_output.calls"], low[0].jchop_output.calls)  # type: ignore[index]


class Pair(NamedTuple):
    """What a layer may return."""

    first: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class Branching(nn.Linear):
    """A layer that takes and returns more than a tensor."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0, *, more: torch.Tensor) -> Any:  # type: ignore[override]
        if scale == 0:
            return None
        return Pair(super().forward(pair[0]), {"sums": [scale * (pair[1] + more)]})


def test_layers_of_several_tensors():
    low = jc.torch.quantize(Branching(8, 2), {"*": {"activation": "e2m1", "output": "e3m1"}})
    x = inputs()
    got = low((x, 0.3 * x), 3.0, more=x)
    a, b = rounded(x, "e2m1"), rounded(0.3 * x, "e2m1")
    assert type(got) is Pair and torch.equal(got.first, rounded(nn.functional.linear(a, low.weight, low.bias), "e3m1"))  # type: ignore[arg-type]
    assert torch.equal(got.rest["sums"][0], rounded(3.0 * (b + a), "e3m1"))
    with pytest.raises(TypeError, match="Branching returns NoneType"):
        low((x, x), 0.0, more=x)


def test_attention_and_tied_weights():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    low = jc.torch.quantize(attention, {"*": {"weight": "e4m3"}})
    x = inputs()[None]
    by_hand = copy.deepcopy(attention)
    with torch.no_grad():
        for p in (by_hand.in_proj_weight, by_hand.out_proj.weight):
            jc.torch.round_to_format(p, "e4m3", inplace=True)
    assert torch.equal(low(x, x, x)[0], by_hand(x, x, x)[0])
    with pytest.raises(NotImplementedError, match=r"'out_proj'.*activation"):
        jc.torch.quantize(attention, {"out_proj": {"activation": "e4m3"}})
    tied = nn.ModuleDict({"a": nn.Embedding(6, 4), "b": nn.Linear(4, 6, bias=False)})
    tied["b"].weight = tied["a"].weight
    low = jc.torch.quantize(tied, {"*": {"weight": "e4m3"}})
    assert low["a"].parametrizations.weight.original is low["b"].parametrizations.weight.original  # type: ignore[index]
    assert torch.equal(low["a"](torch.arange(6)), rounded(tied["a"].weight, "e4m3"))  # type: ignore[index, arg-type]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_errors():
    table: Any = [
        (nn.Linear(2, 2), {"head": {"weight": "e5m2"}}, ValueError, "^Rule\\('head', weight=.*\\) matches no layer$"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            {"*": {"weight": "e5m2"}, "1": {}},
            ValueError,
            r"^Rule\('1'\) matches only layers that an earlier rule matches; put it before Rule\('\*', weight=",
        ),
        (
            nn.Linear(2, 2, device="meta"),
            {"*": {"weight": "e5m2"}},
            ValueError,
            r"weight of the layer '' \(Linear\): x is on device meta; allowed: cpu, cuda",
        ),
        (nn.Linear(2, 2), {"*": {"weight": "e5m2"}, "0": {}}, ValueError, "'0'\\) matches no layer"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            {"1.weight": {"weight": "e5m2"}},
            ValueError,
            r"^Rule\('1.weight', .* matches no layer, but its parameter 'weight': name the layer alone, as '1'$",
        ),
        (nn.Linear(2, 2, bias=False), {"*": {"bias": "e5m2"}}, ValueError, "bias has no effect"),
        (nn.Linear(2, 2), {"*": {"weights": "e5m2"}}, TypeError, "weights"),
        (nn.Linear(2, 2), {"*": {"gradient": "e5m2:gradient=clipped"}}, ValueError, "has no gradient of its own"),
        (nn.Linear(2, 2), {}, TypeError, "or a mapping such as"),
        (nn.Linear(2, 2), [jc.Rule(cache="int8(group=all)")], ValueError, "cache= is of jc.nn alone; rules of torch"),
        (nn.Linear(2, 2), ["int4"], TypeError, "must be a jchop.Rule, several, or a mapping such as {'\\*': 'int4'}"),
        (nn.Linear(2, 2), {"*": {"weight": "e5m2", "product": "codes"}}, ValueError, "product= is of jc.nn alone"),
        (nn.Linear(2, 2), jc.Rule(operation="conv", weight="e5m2"), ValueError, "operation= is of jc.nn alone"),
        (nn.Linear(2, 2), jc.Rule(layer="Conv2d", weight="e5m2"), ValueError, "layer=Conv2d.* matches no layer"),
        (nn.Linear(2, 2), {3: {}}, TypeError, "must be a pattern"),
        (nn.Linear(2, 2), {"*": {"weight": "e5mm2"}}, ValueError, "e5mm2"),
        (nn.LSTM(2, 2), {"*": {"weight": "e5m2"}}, NotImplementedError, "'' .LSTM. .* LSTMCell"),
        (nn.LazyLinear(2), {"*": {"weight": "e5m2"}}, ValueError, "run it once"),
    ]
    assert_refused({text: (partial(jc.torch.quantize, *given), error, text) for *given, error, text in table})


def test_errors_of_arguments():
    low = jc.torch.quantize(nn.Linear(2, 2), {"*": {"weight": "e5m2"}})
    with pytest.raises(ValueError, match="quantized already"):
        jc.torch.quantize(low, {"*": {"weight": "e5m2"}})
    with pytest.raises(ValueError, match="for tensors"):
        jc.torch.quantize(nn.Linear(2, 2), {"*": {"weight": "e5m2"}}, copy=True)  # type: ignore[call-overload]


# -- which parameters are weights --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A matrix and an embedding of positions; a gain, a scale of channels, and tokens that are added."""

    def __init__(self):
        super().__init__()
        self.matrix, self.positions = nn.Parameter(torch.randn(4, 4)), nn.Embedding(1, 4)
        self.gain, self.channels = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 1, 1))
        self.added, self.norm = nn.Parameter(torch.randn(1, 5, 4)), nn.LayerNorm([5, 4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x @ self.matrix + self.added) * self.gain) * self.channels[0]


def of_many_kinds() -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = {"linear": nn.Linear(8, 1), "norm": nn.BatchNorm1d(4), "group": nn.GroupNorm(2, 4), "root": nn.RMSNorm(4),
              "conv": nn.Conv1d(1, 4, 1), "act": nn.PReLU(4), "own": Scaled(), "rnn": nn.GRUCell(4, 4)}  # fmt: skip
    return nn.ModuleDict(layers)


@pytest.mark.parametrize("mode", ["weight_only", pytest.param("qat", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", ["**", pytest.param("!head", marks=pytest.mark.slow)])
def test_a_rule_for_all_layers_rounds_what_products_take_and_tables(mode: str, pattern: str):
    low = jc.torch.quantize(of_many_kinds(), {pattern: {"weight": "float8_e4m3fn"}}, mode=mode)
    rows = {row.path for row in jc.torch.report(low).rows if "e4m3" in f"{row.stored} {row.rounds}"}
    wanted = {"linear.weight", "conv.weight", "own.matrix", "own.positions.weight", "rnn.weight_ih", "rnn.weight_hh"}
    assert rows == wanted


@further
@pytest.mark.parametrize("mode", ["ptq", "qat"])
def norms_take_biases_and_outputs_of_a_rule_for_all_layers(mode: str):
    rule = {"weight": "int4(group=4)", "bias": "float8_e4m3fn", "activation": "e5m2", "gradient": "e5m2"}
    low = jc.torch.quantize(of_many_kinds(), {"*": rule}, mode=mode)
    x = torch.randn(3, 4)
    group: Any = of_many_kinds()["group"]
    wanted = nn.functional.group_norm(x, 2, group.weight, rounded(group.bias, "e4m3"))
    assert torch.equal(low["group"](x), wanted)


@further
def a_rule_for_norms_alone_rounds_their_gains():
    low = jc.torch.quantize(of_many_kinds(), {"/norm group act": {"weight": "int4(group=4)"}}, mode="ptq")
    rows = {row.path for row in jc.torch.report(low).rows if "int4" in row.stored}
    assert rows == {"norm.weight", "group.weight", "act.weight"}


test_further = further.test()
