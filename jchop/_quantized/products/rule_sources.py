"""Rules of other libraries as fields of `Rule`: rules of qwix, and the ``quantization_config`` of Hugging Face."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import numpy as np

from jchop._common.checks import as_iterable, check, check_instance, short_repr
from jchop._common.regular_expressions import pattern_of_regex
from jchop._quantized.products.scale_from import MovingAverage
from jchop.formats import CATALOGUE

#: The fields of a rule, or of a configuration.
Fields = dict[str, Any]


def _check_equal(holds: object, field: str, value: object, advice: str) -> None:
    """Refuse a value of a field that rules have no equal for; the advice names the nearest one."""
    check(holds, f"{field}={short_repr(value)} has no equal in a rule of jchop; {advice}")


# == qwix ==============================================================================================================

#: The fields of its rules.
_QWIX_FIELDS = (
    "module_path", "op_names", "weight_qtype", "act_qtype", "tile_size", "weight_calibration_method",
    "act_calibration_method", "act_static_scale", "act_batch_axes", "bwd_qtype", "bwd_weight_grad_tile_size",
    "bwd_calibration_method", "bwd_stochastic_rounding", "channelwise_noise_axes", "disable_channelwise_axes",
    "additional_qt_config",
)  # fmt: skip
#: The fields of adapters and of roundings with data, which are arguments of other functions.
_QWIX_OTHERS = ("rank", "alpha", "dropout", "lora_a_initializer", "lora_b_initializer", "n_grid")
_QWIX_OPERATIONS = {
    "dot_general": "dot_general", "einsum": "dot_general", "dot": "dot_general", "conv_general_dilated": "conv",
    "ragged_dot": "ragged_dot",
}  # fmt: skip
#: Formats of qwix that are defined with the size of their blocks, which its rules repeat.
_QWIX_BLOCKS = {
    "mxfp8": (32, "mxfp8_e4m3(rule=rceil)"),
    "mxfp4": (32, "mxfp4(rule=rceil)"),
    "nvfp4": (16, "float4_e2m1fn(group=16,scale=float8_e4m3fn)"),
}
_QWIX_NOISE = {"uniform": ":stochastic", "low_bit_uniform": ":stochastic_b:random_bits=8"}


def fields_of_qwix(rules: Any, scale: str | None = None, adapters: bool = False) -> list[Fields]:
    """The fields of rules with the effect of rules of qwix, in their order.

    Args:
        rules: rules, dicts with the same fields, or dicts around them.
        scale: the format of scales; None for binary32.
        adapters: whether the rules are for adapters (`jchop.nn.LoraRule`).
    """
    read = _qwix_adapters if adapters else partial(_qwix_rule, scale=scale)
    if isinstance(rules, Mapping):
        inner = next((rules[key] for key in ("quantization", "qwix") if key in rules), None)
        if inner is not None:
            return fields_of_qwix(inner, adapters=adapters)
        if "rules" not in rules:
            return [read(rules)]
        other = next((name for name in rules if name not in ("rules", "scale_dtype", "use_abstract_model")), None)
        check(other is None, f"{other}={rules.get(other)!r} is not read beside rules=")
        dtype = rules.get("scale_dtype")
        return fields_of_qwix(rules["rules"], None if dtype is None else _dtype_name(dtype), adapters)
    if isinstance(rules, Iterable) and not isinstance(rules, str):
        return [each for rule in rules for each in fields_of_qwix(rule, scale, adapters)]
    names = [field.name for field in fields(rules)] if is_dataclass(rules) else _QWIX_FIELDS
    given = {name: getattr(rules, name) for name in names if hasattr(rules, name)}
    if not given or isinstance(rules, type):
        raise TypeError(f"rules={short_repr(rules)} must be rules of qwix, or dicts such as {{'weight_qtype': 'int8'}}")
    return [read(given)]


def _qwix_path(given: Mapping[str, Any]) -> str:
    """The pattern of the paths of a rule, whose fields are checked."""
    for name in given.keys() - {*_QWIX_FIELDS, *_QWIX_OTHERS}:
        near = get_close_matches(name, _QWIX_FIELDS, 1) or _QWIX_FIELDS
        raise ValueError(f"{name}={short_repr(given[name])} is no field of a rule of qwix; close: {', '.join(near)}")
    regex = ".*" if given.get("module_path") is None else given["module_path"]
    path = pattern_of_regex(regex, dotted=False, whole=True)
    _check_equal(path, "module_path", regex, "write the Rule with a pattern, such as '*mlp*' or '!head'")
    return str(path)


def _qwix_adapters(given: Mapping[str, Any]) -> Fields:
    """The fields of a rule for adapters; `_qwix_rule` reads the roundings of qwix."""
    path, a, b = _qwix_path(given), given.get("lora_a_initializer"), given.get("lora_b_initializer")
    check(given.get("rank") is not None, f"rank=None in the rule {short_repr(given)}: rules for adapters have a rank")
    products = {_QWIX_OPERATIONS.get(name) for name in as_iterable(given.get("op_names") or ("dot_general",))}
    advice = "adapters are beside products of matrices: leave it out"
    _check_equal("dot_general" in products, "op_names", given.get("op_names"), advice)
    draw = jax.random.key(0), (4, 2)
    same = a is None or (a(*draw) == jax.nn.initializers.he_uniform()(*draw)).all()
    _check_equal(same, "lora_a_initializer", a, "A is jax.nn.initializers.he_uniform(), as by default in qwix")
    _check_equal(b is None or not b(*draw).any(), "lora_b_initializer", b, "B is zero: init= has 'loftq' and 'pissa'")
    return {"path": path, "rank": given["rank"], "alpha": given.get("alpha"), "dropout": given.get("dropout") or 0.0}


def _qwix_rule(given: Mapping[str, Any], scale: str | None) -> Fields:
    path, rule = _qwix_path(given), {**dict.fromkeys(_QWIX_FIELDS), **given}
    names = list(as_iterable(rule["op_names"] or ()))
    for name in names:
        advice = f"known are {', '.join(_QWIX_OPERATIONS)}, and no kernels of Pallas: leave it out"
        _check_equal(name in _QWIX_OPERATIONS, "op_names", name, advice)
    operations = sorted({_QWIX_OPERATIONS[name] for name in names}) or ["!embedding"]
    operation = operations[0] if len(operations) == 1 else "{" + ",".join(operations) + "}"
    result: Fields = {"path": path, "operation": operation}
    advice = "nearest is Rule(activation='int8', scale_from=jc.MovingAverage()), with one scale"
    _check_equal(not rule["act_static_scale"], "act_static_scale", True, advice)
    more = {name: value for name, value in (rule["additional_qt_config"] or {}).items() if value is not None}
    advice = "nearest are input_gradient=, weight_gradient=, and formats with sparse=2:4"
    _check_equal(not more, "additional_qt_config", more, advice)
    if rule["weight_qtype"] is None:
        for name in ("act_qtype", "bwd_qtype"):
            advice = "qwix quantizes nothing without a weight_qtype: leave it out, or write Rule(activation=...)"
            _check_equal(rule[name] is None, name, rule[name], advice)
        return result
    trains = any(name.startswith("bwd_") for name in given)
    clipped = ":gradient=clipped" if trains else ""
    result["weight"] = _qwix_spec(rule, "weight", "tile_size", scale, clipped)
    if rule["act_qtype"] is not None:
        result["activation"] = _qwix_spec(rule, "act", "tile_size", scale, clipped)
    if rule["bwd_qtype"] is not None:
        return result | _qwix_backward(rule, scale)
    # Without a type for gradients, backward products are products of the numbers before they are rounded.
    return result | (dict.fromkeys(("input_gradient", "weight_gradient"), "binary32") if trains else {})


def _qwix_backward(rule: Mapping[str, Any], scale: str | None) -> Fields:
    qtype, tile, noise = (rule[name] for name in ("bwd_qtype", "bwd_weight_grad_tile_size", "bwd_stochastic_rounding"))
    gradient = _qwix_spec(rule, "bwd", None, scale)
    advice = f"with a bwd_qtype: nearest is gradient={gradient!r}, which rounds the other operands, too"
    _check_equal(not rule["tile_size"], "tile_size", rule["tile_size"], advice)
    if noise is not None:
        _check_equal(noise in _QWIX_NOISE, "bwd_stochastic_rounding", noise, f"known are {', '.join(_QWIX_NOISE)}")
        advice = f"qwix has it for integers, here without tiles; nearest is gradient='{gradient}:stochastic'"
        _check_equal(_is_integer(qtype) and not tile, "bwd_stochastic_rounding", noise, advice)
        gradient += _QWIX_NOISE[noise]
    if not tile or (isinstance(tile, float) and tile == 1):
        return {"gradient": gradient}
    same = rule["act_qtype"] is not None and _dtype_name(rule["act_qtype"]) == _dtype_name(qtype)
    _check_equal(same, "bwd_weight_grad_tile_size", tile, "it needs the same act_qtype and bwd_qtype")
    return {"gradient": gradient, "weight_gradient": _qwix_spec(rule, "bwd", "bwd_weight_grad_tile_size", scale)}


def _dtype_name(value: Any) -> str:
    return value.lower() if isinstance(value, str) else np.dtype(value).name


def _is_integer(qtype: Any) -> bool:
    return re.fullmatch("int[2-8]", _dtype_name(qtype)) is not None


def _qwix_spec(rule: Mapping[str, Any], kind: str, tile_field: str | None, scale: str | None, clipped: str = "") -> str:
    """The spec of a type, with the tiles and the calibration of a kind of tensors."""
    qtype_field, method_field = f"{kind}_qtype", f"{kind}_calibration_method"
    name, text, tile = _dtype_name(rule[qtype_field]), str(rule[method_field] or "absmax"), rule.get(str(tile_field))
    method, *numbers = [word if n == 0 else float(word) for n, word in enumerate(text.lower().split(","))]
    if isinstance(tile, float):
        advice = f"groups have a size: give round({tile:g} * size), for the size of the axis, as an integer"
        _check_equal(tile == 1, str(tile_field), tile, advice)
        tile = None
    whole = rule["disable_channelwise_axes"]
    _check_equal(not (whole and tile), "disable_channelwise_axes", whole, f"with {tile_field}={tile}: leave one out")
    if name in _QWIX_BLOCKS:
        size, block = _QWIX_BLOCKS[name]
        _check_equal(tile == size, qtype_field, name, f"it needs tile_size={size}, as in qwix")
        _check_equal(text == "absmax" and not scale, method_field, text, f"nearest is {block!r}")
        return block
    fmt, is_integer = CATALOGUE.get(name), _is_integer(name)
    known = is_integer or name == "nf4" or (fmt is not None and fmt.bits <= 8 and fmt.signed)
    _check_equal(known, qtype_field, name, "known are int2 to int8, nf4, floats of at most 8 bits, mxfp8, mxfp4, nvfp4")
    if method == "fixed" and len(numbers) in (1, 2):
        return _fixed_spec(method_field, text, name, numbers) + clipped
    options = f"group={'tensor' if whole else tile or 'all'}{f',scale={scale}' if scale else ''}"
    advice = f"nearest is '{name}({options},rule={'mse' if method == 'rms' else 'percentile(99.9)'})'"
    _check_equal(method in ("absmax", "minmax") and numbers in ([], [1.0]), method_field, text, advice)
    if method == "minmax":
        _check_equal(name in ("int4", "int8"), method_field, text, "qwix has it for int4 and int8 alone: use 'absmax'")
        return f"{name}({options},zero_point=integer)"
    return f"{name}({options}{',rule=half_range' if is_integer else ''})"


def _fixed_spec(field: str, text: str, name: str, numbers: Sequence[Any]) -> str:
    """The format of numbers under a fixed scale, which has to be a power of two."""
    fmt, bits = CATALOGUE.get(name), int(name[3:]) if _is_integer(name) else 0
    largest = 2.0 ** (bits - 1) - 0.5 if fmt is None else float(fmt.max)
    mantissa, exponent = math.frexp(numbers[-1] / largest)
    near = largest * 2.0 ** (exponent - 1)
    known = mantissa == 0.5 and name != "nf4" and (len(numbers) == 1 or numbers[0] == -numbers[1])
    _check_equal(known, field, text, f"scales that are fixed are powers of two: nearest is 'fixed,{-near},{near}'")
    shift = exponent - 1
    if fmt is None:
        return f"fixed{bits + shift}.{-shift}"
    return f"{name}{f'(bias={fmt.bias - shift})' if shift else ''}:saturate"


# == Hugging Face ======================================================================================================

#: Fields for the layout of files, the search for codes or the run of a program, and not for roundings.
_HF_OTHERS = (
    "quant_method", "version", "format", "fmt", "quantization_status", "global_compression_ratio", "producer",
    "checkpoint_format", "meta", "pack_dtype", "backend", "run_compressed", "damp_percent", "desc_act", "mse",
    "damp_auto_increment", "act_group_aware", "static_groups", "true_sequential", "dataset", "tokenizer",
    "model_seqlen", "model_name_or_path", "model_file_base_name", "block_name_to_quantize", "batch_size",
    "module_name_preceding_first_block", "pad_token_id", "use_cuda_fp16", "use_exllama", "disable_exllama",
    "exllama_config", "max_input_length", "cache_block_outputs", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "_load_in_4bit", "load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "untie_embedding_weights",
)  # fmt: skip
#: The operation of a linear layer: embeddings, convolutions and norms are none.
_LINEAR = "{dot_general,ragged_dot}"
#: The table of FP4 of bitsandbytes.
_FP4_LEVELS = [float(np.float32(level / 12)) for level in (0.0625, 2, 3, 4, 6, 8, 12)]
_FP4 = f"codebook({','.join(map(str, (*[-x for x in _FP4_LEVELS[::-1]], 0, *_FP4_LEVELS)))},group=64)"


def _take(config: Fields, name: str, default: Any = None) -> Any:
    """A field of a configuration, which is then read."""
    value = config.pop(name, None)
    return default if value is None else value


def fields_of_hf(config: Any) -> list[Fields]:
    """The fields of rules for a configuration of Hugging Face with few bits; the first that matches applies."""
    config = config.to_dict() if hasattr(config, "to_dict") else config
    check_instance("quantization_config", config, Mapping, "a dict, or have a method to_dict")
    if config.get("quantization_config") is not None:
        return fields_of_hf(config["quantization_config"])
    if isinstance(config.get("quantization"), Mapping):
        config = {"quant_method": "modelopt", **config["quantization"]}
    given = {name: value for name, value in config.items() if name not in _HF_OTHERS}
    is_bits = config.get("load_in_4bit") or config.get("load_in_8bit")
    method = config.get("quant_method") or ("bitsandbytes" if is_bits else None)
    method = getattr(method, "value", method)
    check(method in _HF_READERS, f"quant_method={method!r} is not read; known are {', '.join(_HF_READERS)}")
    cache = _take(given, "kv_cache_scheme") or _take(given, "kv_cache_quant_algo")
    advice = "take it out; nearest is Rule(cache='float8_e4m3fn(group=all)'), with scales of tokens and heads"
    _check_equal(not cache, "kv_cache_scheme", cache, advice)
    try:
        rules = _HF_READERS[str(method)](given)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the quantization_config of {method} is not understood: {error!r}") from None
    for name, value in given.items():
        _check_equal(not value, name, value, f"nothing reads it in a quantization_config of {method}: take it out")
    return rules


def _hf_terms(names: Iterable[Any]) -> list[str]:
    """The terms of patterns for modules of these names, or expressions with ``re:`` in front."""
    terms = []
    for name in map(str, names):
        regex = name.removeprefix("re:")
        pattern = pattern_of_regex(regex, prefix=True) if name != regex else name.replace(" ", "?")
        _check_equal(pattern, "the module", name, "write the Rule with a pattern, such as '*mlp*' or '!head'")
        terms += [re.sub(r"^/?(model[./])?", "", term) for term in str(pattern).split()]
    return terms


def _hf_path(names: Iterable[Any], others: Iterable[Any]) -> str:
    return " ".join(dict.fromkeys([*_hf_terms(names), *(f"!{term}" for term in _hf_terms(others))])) or "*"


def _linear_rule(path: str, weight: str | None, activation: str | None = None, static: bool = False) -> Fields:
    rule = {"path": path, "operation": _LINEAR, "weight": weight, "activation": activation}
    return {name: value for name, value in rule.items() if value} | ({"scale_from": MovingAverage()} if static else {})


def _group_text(size: Any) -> Any:
    return "all" if size in (None, -1) else size


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _arguments_spec(field: str, given: Any) -> str | None:
    """The spec of the arguments of a tensor in a configuration of compressed-tensors."""
    if not given:
        return None
    bits, kind, size = given.get("num_bits", 8), given.get("type", "int"), given.get("group_size")
    symmetric, strategy = given.get("symmetric", True), given.get("strategy")
    if kind == "float" and bits == 4 and size in (16, 32):
        return "nvfp4" if size == 16 else "mxfp4(rule=even)"
    if kind == "float" and "uint8" in str(given.get("scale_dtype")) and size == 32:
        return "mxfp8_e4m3"
    sizes = re.findall(r"\d+", str(given.get("block_structure")))
    by_strategy = {"tensor": "tensor", "channel": "all", "token": "all", "block": f"({','.join(sizes)})"}
    by_strategy |= dict.fromkeys((None, "group"), _group_text(size)) | ({} if size else {None: "tensor"})
    _check_equal(
        strategy in by_strategy, f"{field}.strategy", strategy, "known are tensor, channel, token, group, block"
    )
    known = (kind == "float" and bits == 8 and symmetric) or (kind == "int" and 2 <= bits <= 8)
    _check_equal(known, f"{field}.num_bits", bits, f"with type={kind!r}: nearest is 'float8_e4m3fn(group=all)'")
    if kind == "float":
        return f"float8_e4m3fn(group={by_strategy[strategy]})"
    return f"int{bits}(group={by_strategy[strategy]},{'rule=half_range' if symmetric else 'zero_point=integer'})"


def _rules_of_compressed_tensors(config: Fields) -> list[Fields]:
    ignore, rules = _take(config, "ignore", []), []
    for name in ("transform_config", "sparsity_config"):
        value = _take(config, name, {})
        dense = not value or value.get("format") == "dense"
        _check_equal(dense, name, value, "nearest are rotation=jc.Hadamard(...) and formats with sparse=2:4")
    for group in _take(config, "config_groups", {}).values():
        targets = group.get("targets") or ["Linear"]
        names = [name for name in targets if re.search("[.:_]", name) or name.islower()]
        classes = set(targets) - {*names, "Linear", "LinearBase"}
        _check_equal(not classes, "targets", sorted(classes), "nearest is Rule(layer=...), with the class in the model")
        tensors = ("weights", "input_activations", "output_activations")
        weight, spec, output = (_arguments_spec(name, group.get(name)) for name in tensors)
        activation = group.get("input_activations") or {}
        static = activation.get("dynamic", True) is False and activation.get("strategy") != "tensor_group"
        fixed = not static or str(spec).endswith(("(group=tensor)", "(group=tensor,rule=half_range)"))
        _check_equal(fixed, "input_activations.dynamic", False, f"with its strategy: nearest is activation={spec!r}")
        rule = _linear_rule(_hf_path(names, ignore), weight, spec, static) | ({"output": output} if output else {})
        rules.append((len(names) < len(targets), rule))
    return [rule for _, rule in sorted(rules, key=lambda pair: pair[0])]


# -- the other methods -------------------------------------------------------------------------------------------------


def _rules_of_gptq(config: Fields) -> list[Fields]:
    base = {name: _take(config, name, default) for name, default in (("bits", 4), ("group_size", 128), ("sym", True))}
    others, rules = [] if _take(config, "lm_head") else ["lm_head"], []
    blocks = _take(config, "modules_in_block_to_quantize", [])
    names = [name for block in blocks for name in as_iterable(block)]

    def weight(own: Mapping[str, Any]) -> str:
        numbers = "rule=half_range" if own["sym"] else "zero_point=integer"
        return f"int{own['bits']}(group={_group_text(own['group_size'])},scale=float16,{numbers})"

    for key, own in _take(config, "dynamic", {}).items():
        regex = f"re:{re.sub(r'^[+-]:', '', key)}"
        if key.startswith("-:"):
            others.append(regex)
        else:
            rules.append(_linear_rule(_hf_path([regex], []), weight({**base, **own})))
    return [*rules, _linear_rule(_hf_path(names, others), weight(base))]


def _not_converted(config: Fields, always: bool = False) -> str:
    """A pattern without the modules that a configuration leaves; ``lm_head`` is one by default, or always."""
    given = [names for field in _NOT_CONVERTED if (names := config.pop(field, None)) is not None]
    default = ["lm_head"] if always or not given else []
    return _hf_path([], [*(name for names in given for name in names), *default])


_NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "exclude_modules", "ignore")


def _rules_of_awq(config: Fields) -> list[Fields]:
    bits, size, zero = _take(config, "bits", 4), _take(config, "group_size", 128), _take(config, "zero_point", True)
    options = f"group={_group_text(size)},scale=float16{',zero_point=integer' * bool(zero)}"
    return [_linear_rule(_not_converted(config, always=True), f"int{bits}({options})")]


def _rules_of_fp8(config: Fields) -> list[Fields]:
    block, scheme = _take(config, "weight_block_size"), _take(config, "activation_scheme", "dynamic")
    scale = ",scale=float8_e8m0fnu,rule=rceil" * (_take(config, "scale_fmt") == "ue8m0")
    path, group = _not_converted(config), f"({block[0]},{block[1]})" if block else "tensor"
    static = scheme == "static"
    _check_equal(not (static and block), "activation_scheme", scheme, "with weight_block_size: nearest is 'dynamic'")
    activation = block[1] if block else "tensor" if static else "all"
    weight, spec = (f"float8_e4m3fn(group={each}{scale})" for each in (group, activation))
    return [_linear_rule(path, weight, spec, static)]


def _rules_of_bitsandbytes(config: Fields) -> list[Fields]:
    path = _not_converted(config)
    threshold = _take(config, "llm_int8_threshold", 6.0)
    if _take(config, "load_in_8bit", False):
        advice = "nearest is 0: Rule(weight='int8(group=all)', activation='int8(group=all)'), without outliers"
        _check_equal(not threshold, "llm_int8_threshold", threshold, advice)
        return [_linear_rule(path, "int8(group=all)", "int8(group=all)")]
    kind, double = _take(config, "bnb_4bit_quant_type", "fp4"), _take(config, "bnb_4bit_use_double_quant", False)
    _check_equal(kind in ("nf4", "fp4"), "bnb_4bit_quant_type", kind, "known are 'nf4' and 'fp4'")
    scale = ",scale=uint8(group=256,zero_point=float)" * double
    return [_linear_rule(path, f"{'nf4(group=64)' if kind == 'nf4' else _FP4}"[:-1] + f"{scale})")]


#: By the class of a configuration of torchao: weight, activation, and the size of groups that it has if it names none.
_TORCHAO_SPECS: Mapping[str, tuple[str, str | None, Any]] = {
    "Int4WeightOnly": ("int4(group={size},scale=bfloat16,zero_point=float)", None, 128),
    "Int8WeightOnly": ("int8(group={size},rule=half_range)", None, "all"),
    "Int8DynamicActivationInt8Weight": ("int8(group=all,rule=half_range)", "int8(group=all)", "all"),
    "Int8DynamicActivationInt4Weight": ("int4(group={size},rule=half_range)", "int8(group=all,zero_point=integer)", 32),
    "IntxWeightOnly": ("{dtype}(group={size},rule=half_range)", None, "all"),
    "Int8DynamicActivationIntxWeight": (
        "{dtype}(group={size},rule=half_range)", "int8(group=all,zero_point=integer)", 32),
    "Float8WeightOnly": ("{dtype}(group=all)", None, "all"),
    "Float8DynamicActivationFloat8Weight": ("{dtype}(group={size})", "float8_e4m3fn(group={size})", "tensor"),
    "NVFP4DynamicActivationNVFP4Weight": ("nvfp4", "nvfp4", 16),
}  # fmt: skip
#: Values that fields of torchao must have; values of other fields do not change the roundings.
_TORCHAO_VALUES = {"mapping_type": "SYMMETRIC", "weight_mapping_type": "SYMMETRIC", "act_mapping_type": "ASYMMETRIC"}


def _rules_of_torchao(config: Fields) -> list[Fields]:
    path = _not_converted(config)
    quant_type, options = _take(config, "quant_type"), _take(config, "quant_type_kwargs", {})
    if isinstance(quant_type, str):  # int4_weight_only, as older files have it
        quant_type = {"_type": "".join(word.capitalize() for word in quant_type.split("_")), "_data": options}
    quant_type = quant_type.get("default", quant_type)
    data = quant_type.get("_data", {})
    by_name = next((data[name] for name in ("fqn_to_config", "module_fqn_to_config") if name in data), None)
    if by_name is None:
        return [_torchao_rule(path, quant_type)]
    last = by_name.get("_default")
    names = {name: re.sub("^re:(.*)", r"re:(?:\1)$", name) for name in by_name if name != "_default"}
    rules = [_torchao_rule(_hf_path([whole], []), by_name[name]) for name, whole in names.items()]
    return [*rules, *([] if last is None else [_torchao_rule(path, last)])]


def _torchao_rule(path: str, given: Any) -> Fields:
    if given is None:
        return {"path": path}
    name, data = str(given.get("_type")).removesuffix("Config"), dict(given.get("_data", {}))
    advice = f"close: {', '.join(get_close_matches(name, _TORCHAO_SPECS, 2, 0.3) or list(_TORCHAO_SPECS)[:2])}"
    _check_equal(name in _TORCHAO_SPECS, "quant_type", name, advice)
    weight, activation, size = _TORCHAO_SPECS[name]
    own = data.pop("granularity", None) or data.pop("weight_granularity", None)
    own = own[0] if isinstance(own, list) else own
    if own:
        size = own.get("_data", {}).get("group_size") or ("tensor" if own["_type"] == "PerTensor" else "all")
    plain = {key: value.get("_data") if isinstance(value, Mapping) else value for key, value in data.items()}
    for key, expected in _TORCHAO_VALUES.items():
        _check_equal(plain.get(key) in (None, expected), key, plain.get(key), f"nearest is {expected!r}")
    size, dtype = _group_text(plain.get("group_size") or size), plain.get("weight_dtype")
    dtype = str(dtype or ("float8_e4m3fn" if name.startswith("Float8") else "int8")).removeprefix("torch.")
    texts = [None if text is None else text.format(size=size, dtype=dtype) for text in (weight, activation)]
    return _linear_rule(path, str(texts[0]), texts[1])


#: By the algorithm of modelopt: weight, activation, and whether the scale of the activation is kept.
_MODELOPT_SPECS: Mapping[str, tuple[str, str | None, bool]] = {
    "FP8": ("float8_e4m3fn(group=tensor)", "float8_e4m3fn(group=tensor)", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("float8_e4m3fn(group=all)", "float8_e4m3fn(group=all)", False),
    "FP8_PB_WO": ("float8_e4m3fn(group=(128,128))", None, False),
    "NVFP4": ("nvfp4", "nvfp4", False),
    "W4A16_NVFP4": ("nvfp4", None, False),
    "MXFP8": ("mxfp8_e4m3(rule=rceil)", "mxfp8_e4m3(rule=rceil)", False),
}


def _rules_of_modelopt(config: Fields) -> list[Fields]:
    path, algorithm, layers = _not_converted(config), _take(config, "quant_algo"), _take(config, "quantized_layers", {})
    for repeated in ("group_size", "config_groups"):
        _take(config, repeated)
    named: dict[str, list[str]] = {} if layers else {algorithm: []}
    for name, own in layers.items():
        named.setdefault(own["quant_algo"], []).append(name)
    for each in named:
        _check_equal(each in _MODELOPT_SPECS, "quant_algo", each, f"known are {', '.join(_MODELOPT_SPECS)}")
    return [
        _linear_rule(_hf_path(names, []) if names else path, *_MODELOPT_SPECS[each]) for each, names in named.items()
    ]


def _rules_of_mxfp4(config: Fields) -> list[Fields]:
    names = _take(config, "modules_to_not_convert")
    return [_linear_rule(_hf_path([], names) if names else "experts", "mxfp4")]


_HF_READERS: Mapping[str, Callable[[Fields], list[Fields]]] = {
    "compressed-tensors": _rules_of_compressed_tensors,
    "gptq": _rules_of_gptq,
    "awq": _rules_of_awq,
    "fp8": _rules_of_fp8,
    "bitsandbytes": _rules_of_bitsandbytes,
    "torchao": _rules_of_torchao,
    "modelopt": _rules_of_modelopt,
    "mxfp4": _rules_of_mxfp4,
}
