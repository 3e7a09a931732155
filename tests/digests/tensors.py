"""PyTorch: `jchop.torch`, and the parts of `jchop.compat` that are for torch. Without torch they are named alone."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from digests import Call
from digests.common import coarse, jc
from digests.emulated import whole
from digests.face import facts

LAYERS = ["AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Dropout", "ELU", "Embedding", "GELU", "GRU", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LSTM", "LayerNorm", "LeakyReLU", "Linear", "MaxPool1d", "MaxPool2d", "MaxPool3d", "MultiheadAttention", "PReLU", "RNN", "ReLU", "SiLU", "Sigmoid", "Softmax", "Tanh", "Attention", "AvgPool", "Flatten", "Layer"]
OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD", "RMSProp")
NEEDED = {"Linear": (6, 3), "Embedding": (5, 3), "LayerNorm": (6,), "GroupNorm": (1, 2), "Softmax": (-1,), "RNN": (6, 3), "LSTM": (6, 3),
          "GRU": (6, 3), "MultiheadAttention": (6, 2), "Attention": (6, 2), "AvgPool": (2,)}


def tensor(name: str, shape: tuple[int, ...] = (8, 16)) -> Any:
    import torch

    return torch.from_numpy(coarse(name, shape)).clone()  # in the memory of torch, which JAX can read


def network(*, norm: bool = False) -> Any:
    import torch

    torch.manual_seed(0)
    middle = [torch.nn.BatchNorm1d(8)] if norm else []
    return torch.nn.Sequential(torch.nn.Linear(16, 8), *middle, torch.nn.ReLU(), torch.nn.Linear(8, 2))


def stepped(make: Callable[[Any], Any], count: int = 2) -> Any:
    """Steps of an optimizer on one parameter."""
    import torch

    torch.manual_seed(3)
    weight = torch.nn.Parameter(tensor("weight", (12,)))
    optimizer = make([weight])
    for _ in range(count):
        weight.grad = tensor("grad", (12,)) / 4
        optimizer.step(closure=lambda: 5.0)
    return weight, optimizer.state_dict(), type(optimizer)


def bridge() -> Iterator[tuple[str, Callable[[], Any]]]:
    t = lambda: jc.torch
    for spec in ("bfloat16", "e5m2:up", "e4m3fn:saturate", "e5m2:stochastic", "int8(group=8)", "nf4(group=8)", "nvfp4(group=16)", "mxfp4(group=16)", "fixed4.4:stochastic_equal"):
        yield f"torch.round_to_format {spec}", lambda s=spec: t().round_to_format(tensor=tensor("x"), spec=s, seed=3)
        yield f"torch.round_to_format_ {spec}", lambda s=spec: t().round_to_format(tensor=tensor("x"), spec=s, inplace=True, seed=3)
        yield f"torch.quantize {spec}", lambda s=spec: (lambda q: (q, t().dequantize(q=q)))(t().quantize(x=tensor("x"), rules=s, seed=3, copy=True))
    yield "torch.dequantize dtype", lambda: t().dequantize(t().quantize(tensor("x"), "int8(group=8)"), dtype=__import__("torch").bfloat16)
    for name, more in (("round_to_format", {}), ("round_to_format_", {"inplace": True})):

        def gradient(more: Any = more) -> Any:
            import torch

            x = tensor("x").requires_grad_()
            y = t().round_to_format(x * 1, "e5m2:gradient=[e4m3:stochastic]", gradient_seed=5, copy=True, **more)
            y.backward(tensor("g"))
            generator = torch.Generator().manual_seed(4)
            return x.grad, t().round_to_format(tensor("x"), "e5m2:stochastic", generator=generator, **more)

        yield f"torch.{name} gradient", gradient
    yield "torch.quantize generator", lambda: t().quantize(tensor("x"), "int4(group=8):stochastic", generator=__import__("torch").Generator().manual_seed(4))
    for spec in ("bfloat16", "e6m9:stochastic"):
        yield f"torch.matmul {spec}", lambda s=spec: t().matmul(a=tensor("a", (4, 16)), b=tensor("b", (16, 4)), spec=s, seed=3)
    yield "torch.matmul options", lambda: t().matmul(tensor("a", (4, 16)), tensor("b", (16, 4)), "e6m9:stochastic", copy=True, generator=__import__("torch").Generator().manual_seed(2))
    yield "torch.as_jax", lambda: (t().as_jax(tensor=tensor("x")), t().as_jax(tensor("x"), copy=True))
    yield "torch.as_tensor", lambda: t().as_tensor(array=t().as_jax(tensor("x")))
    for mode, how in {"qat": {"0": {"weight": "int4(group=8)", "activation": "bfloat16"}, "*": {"output": "e5m2"}}, "weight_only": {"*": {"weight": "int4(group=8)"}},
                      "ptq": {"*": {"weight": "int8(group=all)", "activation": "int8(group=all)"}}}.items():

        def model(mode: str = mode, how: Any = how) -> Any:
            low = t().quantize(network(), how, mode=mode)
            return low, low(tensor("x")), whole(t().report(module=low)), facts(t().report(low)), [facts(row) for row in t().report(low).rows]

        yield f"torch.quantize model {mode}", model

    def packed() -> Any:
        q = t().quantize(tensor("x"), "int4(group=8)")
        module = t().PackedTensor(q=q)
        return module, module(), module.extra_repr(), module.as_qarray(copy=True), module.get_extra_state(), facts(module)

    yield "torch.PackedTensor", packed

    def quantizer() -> Any:
        module, x = t().Quantizer(forward="e5m2:stochastic", backward="bfloat16", seed=5), tensor("x").requires_grad_()
        y = module(x)
        y.backward(tensor("g"))
        return y, x.grad, module.extra_repr(), module.right_inverse(x)

    yield "torch.Quantizer", quantizer
    for case, options in {"plain": {"weight": "e5m2"}, "all": {"weight": "bfloat16", "gradient": "e5m2", "momentum": "e6m9:stochastic", "accumulator": "e6m9:stochastic",
                                                               "gradient_scale": 0.5, "seed": 4}}.items():

        def low(options: Any = options) -> Any:
            import torch

            def make(weights: Any) -> Any:
                one = t().OptimLP(optimizer=torch.optim.SGD(weights, lr=0.125, momentum=0.5), **options)
                one.add_param_group({"params": [torch.nn.Parameter(tensor("other", (4,)))]})
                one.load_state_dict(one.state_dict())
                return one

            return stepped(make)

        yield f"torch.OptimLP {case}", low


def qtorch() -> Iterator[tuple[str, Callable[[], Any]]]:
    q = lambda: jc.compat.qtorch
    numbers = {"float": lambda: q().FloatingPoint(5, 2), "fixed": lambda: q().FixedPoint(5, 3), "block": lambda: q().BlockFloatingPoint(5)}
    for name, number in numbers.items():
        for kind in ("Quantizer", "quantizer"):

            def used(kind: str = kind, number: Any = number) -> Any:
                import torch

                torch.manual_seed(1)
                x = tensor("x").requires_grad_()
                options = {"forward_rounding": "nearest", "backward_rounding": "nearest", "backward_hooks": [lambda g: g / 2]}
                make = getattr(q().quant, kind)(forward_number=number(), backward_number=number(), clamping_grad_zero=name_is(number, numbers), **options)
                y = make(x)
                y.backward(tensor("g"))
                return y, x.grad, [make.extra_repr(), make.right_inverse(x), facts(make)] if kind == "Quantizer" else None

            yield f"qtorch.{kind} {name}", used
    yield "qtorch.Number", lambda: [facts(make()) for make in numbers.values()]
    for name in ("lower", "sequential_lower"):

        def lowered(name: str = name) -> Any:
            model = network()
            options = {"forward_rounding": "nearest", "backward_rounding": "nearest"}
            again = getattr(q().auto_low, name)(model=model, layer_types=["linear", "activation"], forward_number=numbers["float"](),
                                                backward_number=numbers["fixed"](), **options)
            x = tensor("x").requires_grad_()
            y = (again or model)(x)
            y.sum().backward()
            return y, x.grad

        yield f"qtorch.{name}", lowered

    def low() -> Any:
        import torch

        nearest = {"forward_rounding": "nearest"}
        w, acc = (q().quant.quantizer(forward_number=n(), **nearest) for n in (numbers["float"], numbers["fixed"]))

        def make(weights: Any) -> Any:
            one = q().optim.OptimLP(optim=torch.optim.SGD(weights, lr=0.125, momentum=0.5), weight_quant=w, grad_scaling=0.5, grad_quant=w, momentum_quant=w, acc_quant=acc)
            one.add_param_group({"params": [torch.nn.Parameter(tensor("other", (4,)))]})
            one.load_state_dict(one.state_dict())
            return one

        return stepped(make)

    yield "qtorch.OptimLP", low


def name_is(number: Any, numbers: dict[str, Any]) -> bool:
    return number is numbers["fixed"]


def ran(prefix: str, name: str) -> Any:
    """A layer of Pychop under its quantizer, forward and backward."""
    import torch

    torch.manual_seed(0)
    p = jc.compat.pychop
    chop = None if prefix + name == "IntQuantizedLinear" else p.ChopiSTE(8, symmetric=True) if prefix[0] == "I" else p.ChopSTE(5, 10)
    shapes = {"1d": (2, 2, 6), "2d": (2, 2, 6, 6), "3d": (2, 2, 4, 4, 4)}
    x = tensor(name, (2, 2, 6) if name in ("RNN", "LSTM", "GRU", "MultiheadAttention", "Attention") else shapes.get(name[-2:], (2, 2, 6, 6))).requires_grad_()
    args = ((2, 3, 2) if name.startswith("Conv") else (2,)) if name[-2:] in shapes else NEEDED.get(name, ())
    kind = getattr(p.layers, prefix + name)
    layer = kind(*args, chop=chop) if prefix != "FPQuantized" else kind(*args, ibits=4, fbits=6)
    x = torch.tensor([1, 2]) if name == "Embedding" else x
    y = layer(x, x, x) if "ttention" in name else layer(x)
    first = y[0] if isinstance(y, tuple) else y
    first.square().sum().backward()
    return first, x.grad, layer


def pychop() -> Iterator[tuple[str, Callable[[], Any]]]:
    for prefix in ("Quantized", "IQuantized", "FPQuantized", "IntQuantized"):
        for name in LAYERS:
            yield f"pychop.{prefix}{name}", lambda p=prefix, n=name: ran(p, n)
    for prefix in ("Quantized", "IQuantized"):
        for name in OPTIMIZERS:

            def make(weights: Any, prefix: str = prefix, name: str = name) -> Any:
                p = jc.compat.pychop
                chop = p.Chopi(8, symmetric=True) if prefix == "IQuantized" else p.Chop(5, 7)
                return getattr(p.optimizers, prefix + name)(params=weights, lr=0.125, chop=chop)

            yield f"pychop.{prefix}{name}", lambda make=make: stepped(make)
    x = lambda: [(tensor("batch"),)]
    for name, options in {
        "post_quantization": {"eval_mode": False, "verbose": True}, "dynamic_post_quantization": {"eval_mode": False, "verbose": True},
        "static_post_quantization": {"calibration_data": x, "calibration_method": "percentile", "percentile": 90.0, "fuse_bn": False, "eval_mode": False, "verbose": True},
        "mixed_post_quantization": {"calibration_data": x, "calibration_method": "mse", "percentile": 90.0, "dynamic": False, "eval_mode": False, "verbose": True},
    }.items():
        for case in ("plain", "options"):

            def after(name: str = name, options: Any = options, case: str = case) -> Any:
                p, given = jc.compat.pychop, {k: v() if callable(v) else v for k, v in options.items()}
                chop = {"weight_chop": p.Chopi(8, symmetric=True), "activation_chop": p.Chop(5, 10)} if "mixed" in name else {"chop": p.Chop(4, 3)}
                given = given if case == "options" else {"calibration_data": x()} if "static" in name else {}
                model = getattr(p.layers, name)(model=network(norm=True), **chop, **given)
                return model(tensor("batch")), model

            yield f"pychop torch.{name} {case}", after
    yield "pychop.Chop torch", lambda: [jc.compat.pychop.Chop(4, 3, rmode=m)(tensor("x")) for m in (1, 5)]
    yield "pychop.Chopi torch", lambda: (lambda c: (c.calibrate(x=tensor("x")), c.quantize(tensor("x")), c(tensor("x"))))(jc.compat.pychop.Chopi(8, symmetric=True))


def calls() -> Iterator[Call]:
    for part in (bridge, qtorch, pychop):
        for name, run in part():
            yield Call(name, run, loose=True, torch=True)
