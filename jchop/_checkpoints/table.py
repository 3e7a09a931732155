"""`LAYOUTS`: the table of layouts. A layout finds weights among the tensors of files, and names tensors to write."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from jchop._checkpoints import compressed_tensors as ct
from jchop._checkpoints import layouts
from jchop._checkpoints.row import (
    BYTE,
    FIELDS_OF_MODULE,
    LayoutFacts,
    LayoutRow,
    TensorSource,
    config_groups,
    fact_field,
    only_read,
)
from jchop._common.checks import check, place_in_errors
from jchop._common.files import json_object, short_text
from jchop._storage._files.safetensors import TensorEntry

#: The field of ``config.json``, and the ends of the names of weights.
CONFIG_FIELD, WEIGHT_NAME = "quantization_config", "weight"
#: The fields that say how inputs of a group of weights, or keys and values of a cache, are rounded.
INPUT_ACTIVATIONS, CACHE_SCHEME = "input_activations", "kv_cache_scheme"


class LayoutWeight(NamedTuple):
    """A quantized weight in files: its row, the names of its tensors by their ends, its facts, its shape."""

    row: LayoutRow
    names: dict[str, str]
    facts: ChainMap[str, Any]
    shape: tuple[int, ...]


class UnreadWeight(NamedTuple):
    """A weight in files that cannot be read: why, and the names of its tensors."""

    why: str
    tensors: Sequence[str]


@dataclass(frozen=True)
class CheckpointLayout:
    """A layout of the tensors of a model.

    Args:
        name: as the callers write it.
        rows: the ways in which a weight may be stored; the first that fits applies.
        config: makes the ``quantization_config`` of a written model, from the facts of each module and the modules
            that were not quantized.
        records: whether facts are in the metadata of the files, and not in the configuration.
        activations: whether the configuration says how inputs and caches are rounded.
        appends: whether the ends of rows follow the name of a weight. Else they follow the name of its module, and the
            weight is called ``weight`` in it.
    """

    name: str
    rows: Sequence[LayoutRow]
    config: Callable[[Mapping[str, tuple[LayoutRow, LayoutFacts]], Sequence[str]], dict[str, Any]]
    records: bool = False
    appends: bool = False
    activations: bool = False

    def stem(self, module: str) -> str:
        """The beginning of the names of the tensors of a module's weight, or of a weight, as the layout names them."""
        prefix = module if self.appends else f"{module}." if module else ""
        return f"{prefix}_{WEIGHT_NAME}_" if self.records else prefix

    def owner(self, weight: str) -> str:
        """The module of a weight, or the weight itself, as the layout names them."""
        return weight if self.appends else weight[: -len(WEIGHT_NAME)].removesuffix(".")

    def name_of(self, owner: str) -> str:
        """The name of the weight of a module; of a weight the same."""
        return owner if self.appends else f"{owner}.{WEIGHT_NAME}" if owner else WEIGHT_NAME

    def owners(self, entries: Mapping[str, TensorEntry]) -> list[str]:
        """The modules or weights that have a tensor with the name of an anchor."""
        anchors = list(dict.fromkeys(row.anchor for row in self.rows))
        if self.appends:
            sure = {end for end in anchors if end.strip(".") in _ANCHOR_LAYOUTS}
            pairs = ((name, end) for name in entries for end in anchors if name.endswith(end))
            owners = (name.removesuffix(end) for name, end in pairs if end in sure or entries[name].dtype == BYTE)
            return list(dict.fromkeys(owner for owner in owners if owner.strip(".")))
        stem = self.stem("")
        matches = ((name, anchor) for name in entries for anchor in anchors if has_anchor(name, stem, anchor))
        matches = (
            (name, anchor)
            for name, anchor in matches
            if anchor not in _COMMON_ANCHORS or name.removesuffix(anchor) + WEIGHT_NAME in entries
        )
        return list(dict.fromkeys(name[: -len(stem + anchor)].removesuffix(".") for name, anchor in matches))

    def has_pair(self, entries: Mapping[str, TensorEntry]) -> bool:
        """Whether a weight has all the tensors of a row."""
        owners = self.owners(entries)
        return any(all(owner + part in entries for part in row.parts) for owner in owners for row in self.rows)

    def find(self, source: TensorSource) -> tuple[dict[str, LayoutWeight], dict[str, UnreadWeight]]:
        """The weights of a source by name; and the weights that would be misread, or fit no row of this layout.

        Raises:
            ValueError: for a configuration of weights that are not read.
        """
        entries, config, names = source.entries, quantization_config(source), sorted(source.entries)
        _check_layout_config(self.name, config)
        weights: dict[str, LayoutWeight] = {}
        own = _module_facts(config)
        unread = self._others(entries, {(self.stem("") + row.anchor).strip(".") for row in self.rows})
        unread |= code_scale_pairs(entries, self.name)
        for owner in self.owners(entries):
            name, stem = self.name_of(owner), self.stem(owner)
            try:
                facts = ChainMap(_metadata_record(source, owner)) if self.records else ChainMap(own(owner), config)
                weights[name] = self._weight(owner, source, names, facts)
            except ValueError as error:
                parts = {stem + part for row in self.rows for part in (*row.parts, *row.optional)}
                unread.setdefault(name, UnreadWeight(str(error), [part for part in parts if part in entries]))
        used = {name for weight in weights.values() for name in weight.names.values()}
        used |= {name for weight in unread.values() for name in weight.tensors}
        for name in names:
            if self.records and name.endswith("_qdata") and name not in used:
                fault = f"tensor {short_text(name)} is of no weight named '….weight'"
                why = f"{fault}, and {self.name} has only these; {_AS_PLAIN}"
                stem = name.removesuffix("qdata")
                unread[name] = UnreadWeight(why, list(_names_starting(names, stem)))
        return weights, unread

    def _others(self, entries: Mapping[str, TensorEntry], anchors: set[str]) -> dict[str, UnreadWeight]:
        """Weights of other layouts, which would be read as if they were not quantized."""
        known, names = _ANCHOR_LAYOUTS | _FOREIGN_ANCHORS, sorted(entries)
        others = {anchor: name for anchor, name in known.items() if anchor not in anchors}
        unread: dict[str, UnreadWeight] = {}
        for name in names:
            anchor = next((anchor for anchor in others if has_anchor(name, "", anchor)), None)
            if anchor is not None:
                why = f"tensor {short_text(name)} is of the layout {others[anchor]}, not {self.name}; {_AS_PLAIN}"
                owner, stem = name.removesuffix(anchor).removesuffix("."), name.removesuffix(anchor)
                own = [other for other in _names_starting(names, stem) if "." not in other[len(stem) :]]
                own = [other for other in [*own, name, owner] if other in entries and not has_anchor(other, "", "bias")]
                unread.setdefault(owner if owner in entries else f"{stem}{WEIGHT_NAME}", UnreadWeight(why, own))
        return unread

    def _weight(
        self, module: str, source: TensorSource, names: Sequence[str], facts: ChainMap[str, Any]
    ) -> LayoutWeight:
        """The weight that the tensors of a module form: the first row that they fit."""
        stem, entries = self.stem(module), source.entries
        for row in self.rows:
            if self.records and row.name != facts.get("_type"):
                continue
            tensors = {part: stem + part for part in (*row.parts, *row.optional) if stem + part in entries}
            if not set(row.parts) <= set(tensors):
                continue
            shape = row.look({part: entries[name] for part, name in tensors.items()})
            if shape is not None:
                if row.peek is not None:
                    shape = _shape_in(source, tensors[row.peek[0]], row.peek[1])
                return LayoutWeight(row, tensors, ChainMap(facts["_data"]) if self.records else facts, shape)
        near = list(islice(_names_starting(names, stem), 5))
        texts = ", ".join(f"{name} {entries[name].dtype}{list(entries[name].shape)}" for name in near)
        raise ValueError(f"the tensors {texts} form no weight of the layout {self.name}; {_AS_PLAIN}")


#: The longest tensor that is read for a shape, in bytes.
_LONGEST_SHAPE_BYTES = 1 << 12


def _shape_in(source: TensorSource, name: str, shape_in: Callable[[np.ndarray], tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a weight that one of its tensors holds."""
    with place_in_errors(f"tensor {short_text(name)}"):
        check(source.entries[name].nbytes <= _LONGEST_SHAPE_BYTES, f"it has more than {_LONGEST_SHAPE_BYTES} bytes")
        return shape_in(source.read(name))


def _names_starting(names: Sequence[str], stem: str) -> Iterator[str]:
    """The names that start with a stem, of sorted names."""
    later = range(bisect_left(names, stem), len(names))
    return takewhile(lambda name: name.startswith(stem), map(names.__getitem__, later))


#: Anchors that arrays of other kinds have, too: the scale of a norm, the arrays of GPTQ.
_COMMON_ANCHORS = {"scale", "scales"}


def has_anchor(name: str, stem: str, anchor: str) -> bool:
    """Whether a tensor has the name of an anchor in some module."""
    end = stem + anchor
    return name == end or name.endswith(f".{end}")


def quantization_config(source: TensorSource) -> dict[str, Any]:
    """The ``quantization_config`` of a model; empty if there is none."""
    return fact_field(source.config, CONFIG_FIELD, dict, {})


#: The end of errors about tensors that are not understood.
_AS_PLAIN = "layout='plain' reads every tensor as it is"
#: The values of fields of the configuration that say how tensors are laid out; others are laid out in another way.
_CONFIG_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "gptq_v2": {"checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "awq": {"version": ("gemm",)},
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn")},
    "modelopt": {"quant_algo": ("nvfp4", "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mxfp8", "mixed_precision")},
    "bitsandbytes": {"load_in_8bit": ("false",), "bnb_4bit_quant_type": ("nf4",)},
}
#: Ends of names of tensors in layouts that are not read, and a name for these.
_FOREIGN_ANCHORS = {
    "quant_state.bitsandbytes__fp4": "FP4 of bitsandbytes",
    "weight.bitmask": "sparse compressed-tensors", "pre_quant_scale": "modelopt's AWQ",
    "q_weight": "ExLlamaV2", "_weight_qdata": "torchao, without its records in the metadata",
}  # fmt: skip
#: Ends of the names of two tensors, of which the first has codes: a layout, or a name for those that are not read.
_CODE_SCALE_PAIRS = {
    ("_blocks", "_scales"): "mxfp4", (".blocks", ".scales"): "mxfp4",
    (".weight", ".scales"): "MLX, HIGGS or gpt-fast", (".weight", ".scales_and_zeros"): "gpt-fast",
    (".weight", ".scale"): "fp8", (".weight", ".scale_weight"): "ComfyUI",
    (".weight", ".qscale_weight"): "Mistral", (".weight", ".weights_scaling_factor"): "TensorRT-LLM",
    (".qvalue", ".scale"): "jchop, without their record in the metadata", ("._data", "._scale"): "quanto",
    ("._data._data", "._scale"): "quanto", (".codes", ".codebooks"): "AQLM",
    (".indices", ".centroids.weight"): "VPTQ", (".Qidxs", ".SU"): "QuIP#", (".trellis", ".suh"): "ExLlamaV3",
    (".dense_weights", ".row_offsets"): "SpQR", (".encoded_exponent", ".sign_mantissa"): "DFloat11",
    (".B", ".s"): "Marlin", ("_packed", "_scale"): "compressed-tensors under another name than weight",
    ("", "_scales"): "EETQ or a layout like it", ("", "_weight_scale"): "modelopt or a layout like it",
    ("", "_scale"): "FBGEMM or a layout like it", ("", "_scale_inv"): "DeepSeek or a layout like it",
}  # fmt: skip


def code_scale_pairs(entries: Mapping[str, TensorEntry], layout: str) -> dict[str, UnreadWeight]:
    """Codes that are known by the tensor beside them: by themselves they are integers like any others."""
    unread: dict[str, UnreadWeight] = {}
    for name, entry in entries.items():
        path = f".{name}"
        dtype = entry.dtype
        may_be_codes = dtype != np.bool_ and (dtype.itemsize == 1 or np.issubdtype(dtype, np.integer))
        for codes, scales in _CODE_SCALE_PAIRS if may_be_codes else ():
            beside = (path.removesuffix(codes) + scales).removeprefix(".")
            other = _CODE_SCALE_PAIRS[codes, scales]
            if not path.endswith(codes) or beside not in entries or other == layout:
                continue
            if layout == "mlx" and scales == ".scales":
                continue
            if not any(has_anchor(beside, "", anchor) for anchor in _ANCHOR_LAYOUTS):
                why = f"of the layout {other}, not {layout}" if other in LAYOUTS else f"of {other}, which is not read"
                why = f"the tensors {short_text(name)} and {short_text(beside)} are {why}; {_AS_PLAIN}"
                unread.setdefault(name, UnreadWeight(why, [name, beside]))
    return unread


#: Formats of compressed-tensors whose weights are not in the table.
_UNREADABLE_FORMATS = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask", "mxfp6-pack-quantized")


def _check_layout_config(layout: str, config: LayoutFacts) -> None:
    sparsity = fact_field(config, "sparsity_config", dict, {}).get("format")
    formats = [config.get("format"), sparsity, *(group.get("format") for group in config_groups(config).values())]
    wrong = next((name for name in formats if name in _UNREADABLE_FORMATS), None)
    remedy = "convert the model to another one first"
    check(wrong is None, f"{CONFIG_FIELD} has the format {wrong!r}, which is not read; {remedy}")
    for name, values in _CONFIG_VALUES.get(layout, {}).items():
        value = config.get(name)
        if value is not None and str(value).lower() not in values:
            meaning = " (the layout llm_int8)" if name == "load_in_8bit" else ""
            raise ValueError(
                f"{CONFIG_FIELD} has {name}={short_text(value)}{meaning}, and read are {', '.join(values)}; {_AS_PLAIN}"
            )


#: What no name of a module has.
_EXPRESSION = re.compile(r"[^\w.\-]")
#: The most different groups of weights whose modules no group names.
_MOST_GROUPS = 256


def _module_facts(config: LayoutFacts) -> Callable[[str], dict[str, Any]]:
    """Gives the name of a module and its groups: those that name it in their targets, else one of each kind.

    Then the share of each module in a configuration does not grow with the configuration.
    """
    by_module: dict[str, dict[str, Any]] = {}
    kinds: dict[str, Any] = {}
    for key, group in config_groups(config).items():
        weights = {"weights": group.get("weights")}
        kinds.setdefault(json.dumps(weights), weights)
        for name in fact_field(group, "targets", list, []):
            by_module.setdefault(str(name), {})[key] = {"targets": [name]} | weights
    # By modules of AutoRound; by expressions of AutoRound and GPTQModel, which are not run.
    fields = fact_field(config, "extra_config", dict, {}) | fact_field(config, "dynamic", dict, {})
    patterns: dict[str, Any] = {}
    for name, one in fields.items():
        if _EXPRESSION.search(name) and isinstance(one, dict):
            numbers = {part: one[part] for part in ("bits", "group_size") if part in one}
            patterns.setdefault(json.dumps(numbers), numbers)

    def own(module: str) -> dict[str, Any]:
        named = isinstance(fields.get(module), dict)
        count = max(len(kinds) * (module not in by_module), len(patterns) * (not named))
        why = f"has {count} different groups, and none of them names {short_text(module)}"
        check(count <= _MOST_GROUPS, f"{CONFIG_FIELD} {why}")
        candidates = [fields[module]] if named else [{}, *patterns.values()]
        return {"module": module, "config_groups": by_module.get(module, kinds), FIELDS_OF_MODULE: candidates}

    return own


def inputs_by_weight(config: LayoutFacts) -> Callable[[str], dict[str, Any] | None]:
    """Gives the arguments of the inputs of a weight by its name: those of its module, or those that all groups have."""
    by_module, kinds = dict[str, Any](), dict[str, Any]()
    for group in config_groups(fact_field(config, CONFIG_FIELD, dict, {})).values():
        inputs = fact_field(group, INPUT_ACTIVATIONS, dict)
        kinds[json.dumps(inputs)] = inputs
        by_module |= {str(name): inputs for name in fact_field(group, "targets", list, [])}
    of_all = next(iter(kinds.values())) if len(kinds) == 1 else None
    return lambda name: by_module.get(name.removesuffix(f".{WEIGHT_NAME}"), of_all)


def fields_beside_weights(config: LayoutFacts) -> list[str]:
    """The fields of a configuration that say more than how weights are stored."""
    fields = fact_field(config, CONFIG_FIELD, dict, {})
    groups = config_groups(fields).values()
    facts = {
        INPUT_ACTIVATIONS: any(group.get(INPUT_ACTIVATIONS) for group in groups)
        or fields.get("activation_scheme") == "static",
        "output_activations": any(group.get("output_activations") for group in groups),
        CACHE_SCHEME: fields.get(CACHE_SCHEME) or fields.get("kv_cache_quant_algo"),
        "transform_config": fields.get("transform_config"),
    }
    return [name for name, value in facts.items() if value]


def _metadata_record(source: TensorSource, module: str) -> dict[str, Any]:
    """The record of a weight in the metadata of a file, which torchao writes as JSON."""
    name = f"{module}.{WEIGHT_NAME}" if module else WEIGHT_NAME
    text = source.metadata.get(name)
    if text is None or len(text) > 1 << 14:
        raise ValueError(f"the metadata have no record of {short_text(name)}, or one that is too long")
    with place_in_errors(f"the record of {short_text(name)} in the metadata is not JSON"):
        record = json_object(text)
    if str(record.get("_type")) not in layouts.TORCHAO_ROWS:
        raise ValueError(
            f"{short_text(name)} is a {short_text(record.get('_type'))}; read are {', '.join(layouts.TORCHAO_ROWS)}"
        )
    return record | {"_data": fact_field(record, "_data", dict, {})}


# -- configurations that are written -----------------------------------------------------------------------------------

RowsByModule = Mapping[str, tuple[LayoutRow, LayoutFacts]]


def _compressed_tensors_config(rows: RowsByModule, others: Sequence[str]) -> dict[str, Any]:
    """The quantization config of written rows, modules with equal facts in one group."""
    kinds: dict[str, list[str]] = {}
    for module, (row, facts) in rows.items():
        kinds.setdefault(json.dumps([row.name, facts]), []).append(module)
    groups: dict[str, Any] = {}
    formats = set()
    for number, (text, modules) in enumerate(kinds.items()):
        name, facts = json.loads(text)
        inputs = facts.pop(INPUT_ACTIVATIONS, None)
        formats.add(name)
        targets = ["Linear"] if len(kinds) == 1 else modules
        groups[f"group_{number}"] = {"targets": targets, "weights": facts, INPUT_ACTIVATIONS: inputs, "format": name}
    config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    config["version"] = ".".join(map(str, (*ct.DENSE_VERSION, 0)))
    return config | {"format": formats.pop() if len(formats) == 1 else "mixed-precision", "ignore": list(others)}


def _config_of_one_form(
    method: str, others_name: str = "modules_to_not_convert", **more: Any
) -> Callable[[RowsByModule, Sequence[str]], dict[str, Any]]:
    """The configuration of a layout whose modules all have the same facts, and its name for the other modules."""

    def config(rows: RowsByModule, others: Sequence[str]) -> dict[str, Any]:
        kinds = {json.dumps(facts, sort_keys=True): module for module, (_, facts) in rows.items()}
        if len(kinds) > 1:
            texts = "; ".join(f"{module} {text}" for text, module in kinds.items())
            raise ValueError(f"quantized weights of this layout have one form, and these differ: {texts}")
        facts = next(iter(rows.values()))[1] if rows else {}
        return {"quant_method": method} | dict(facts) | more | {others_name: list(others) or None}

    return config


def _gptq_config(version: str) -> Callable[[RowsByModule, Sequence[str]], dict[str, Any]]:
    """The configuration of GPTQ: one group of all inputs is -1, unless other weights have groups of as many."""
    same = _config_of_one_form("gptq", checkpoint_format=version)

    def config(rows: RowsByModule, others: Sequence[str]) -> dict[str, Any]:
        sizes = {facts["group_size"] for _, facts in rows.values() if not facts["whole"]}
        by_module = {}
        for module, (row, module_facts) in rows.items():
            facts = dict(module_facts)
            if facts.pop("whole") and sizes != {facts["group_size"]}:
                facts["group_size"] = -1
            by_module[module] = row, facts
        return same(by_module, others)

    return config


def _torchao_config(rows: RowsByModule, others: Sequence[str]) -> dict[str, Any]:
    """The configuration of torchao: one for all weights, or one for each module."""
    by_module = {module: facts[layouts.TORCHAO_CONFIG] for module, (_, facts) in rows.items()}
    kind, *more = {json.dumps(config): config for config in by_module.values()}.values()
    if more:
        kind = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": by_module}}
    return {
        "quant_method": "torchao", "quant_type": {"default": kind}, "modules_to_not_convert": list(others) or None,
        "include_input_output_embeddings": False, "untie_embedding_weights": False,
    }  # fmt: skip


_NF4_CONFIG = _config_of_one_form("bitsandbytes", "llm_int8_skip_modules")
_COMPRESSED_ROWS = (ct.NVFP4_ROW, ct.PACK_ROW, ct.MXFP4_ROW, ct.MXFP8_ROW, ct.FLOAT_ROW, ct.INTEGER_ROW)
#: The layouts by name.
_FP8_CONFIG = _config_of_one_form("fp8", fmt="e4m3", activation_scheme="dynamic")
_GPT_OSS_ROWS, _TORCHAO_ROWS = (ct.GPT_OSS_ROW, ct.GPT_OSS_POINT_ROW), tuple(layouts.TORCHAO_ROWS.values())
_LAYOUT_LIST = (
    CheckpointLayout("compressed-tensors", _COMPRESSED_ROWS, _compressed_tensors_config, activations=True),
    CheckpointLayout("gptq", (layouts.GPTQ,), _gptq_config("gptq")),
    CheckpointLayout("gptq_v2", (layouts.GPTQ_V2,), _gptq_config("gptq_v2")),
    CheckpointLayout("awq", (layouts.AWQ,), _config_of_one_form("awq")),
    CheckpointLayout("fp8", (ct.FP8_TILES, ct.FP8_ONE_SCALE, *ct.DEEPSEEK_V4_ROWS), _FP8_CONFIG),
    CheckpointLayout("bitsandbytes", (layouts.NF4_ROW,), _NF4_CONFIG, appends=True),
    CheckpointLayout("torchao", _TORCHAO_ROWS, _torchao_config, records=True),
    CheckpointLayout("modelopt", (replace(ct.MXFP8_ROW, write=only_read), *ct.MODELOPT_ROWS), lambda *_: {}),
    CheckpointLayout("mlx", (layouts.MLX_ROW, layouts.MLX_MODE_ROW), lambda *_: {}),
    CheckpointLayout("hqq", (layouts.HQQ_ROW,), lambda *_: {}),
    CheckpointLayout("llm_int8", (layouts.LLM_INT8_ROW,), lambda *_: {}),
    CheckpointLayout("mxfp4", _GPT_OSS_ROWS, _config_of_one_form("mxfp4"), appends=True),
)
LAYOUTS = {layout.name: layout for layout in _LAYOUT_LIST}
#: The first layout with each anchor; of layouts that append to any name, an anchor that belongs to no other tensor.
_ANCHOR_LAYOUTS: dict[str, str] = {layouts.NF4_ROW.anchor.strip("."): "bitsandbytes"}
for _layout in LAYOUTS.values():
    for _row in () if _layout.records or _layout.appends else _layout.rows:
        if _row.anchor not in _COMMON_ANCHORS:
            _ANCHOR_LAYOUTS.setdefault(_row.anchor, _layout.name)


#: The layouts of AutoRound's formats. Definition: https://github.com/intel/auto-round, `inference/backend.py`.
_AUTO_ROUND_LAYOUTS = {
    "auto_gptq": "gptq", "gptq": "gptq", "gptqmodel": "gptq_v2", "exllamav2": "gptq_v2", "auto_awq": "awq",
    "awq": "awq", "llm_compressor": "compressed-tensors", "fp8": "fp8", "fp8_static": "fp8", "mlx": "mlx",
}  # fmt: skip


def detect_layout(source: TensorSource) -> str | None:
    """The layout of a source: of its configuration, or else of the names of its tensors; None if nothing is quantized.

    Raises:
        ValueError: for a method that is not known, or tensors of several layouts.
    """
    config = quantization_config(source)
    method = config.get("quant_method")
    if method is None and fact_field(config, "load_in_4bit", bool, False):
        method = "bitsandbytes"
    if method is None and any(has_anchor(name, "", layouts.MLX_ROW.anchor) for name in source.entries):
        method = "mlx"  # which writes no method
    if method is None and config.get("mode") in tuple(layouts.MLX_MODES):
        method = "mlx"
    if method is not None:
        name = method
        if method == "gptq" and "gptq_v2" in (config.get("checkpoint_format"), config.get("format")):
            name = "gptq_v2"
        if method == "bitsandbytes" and fact_field(config, "load_in_8bit", bool, False):
            name = "llm_int8"
        if method == "auto-round":
            _, *form = str(config.get("packing_format", config.get("backend", "auto_round:auto_gptq"))).split(":")
            name = _AUTO_ROUND_LAYOUTS.get(form[0]) if form else "gptq_v2"
        if not isinstance(name, str) or name not in LAYOUTS:
            raise ValueError(
                f"{CONFIG_FIELD} has quant_method={short_text(method)}; known are {', '.join(LAYOUTS)}; {_AS_PLAIN}"
            )
        return name
    if "tensor_names" in source.metadata:
        return "torchao"
    return _layout_by_names(source.entries)


def _layout_by_names(entries: Mapping[str, TensorEntry]) -> str | None:
    """The layout whose anchors are among the names of tensors."""
    owners = _ANCHOR_LAYOUTS | _FOREIGN_ANCHORS
    layouts = {owners[anchor] for name in entries for anchor in owners if has_anchor(name, "", anchor)}
    layouts |= {layout.name for layout in LAYOUTS.values() if layout.appends and layout.has_pair(entries)}
    if "modelopt" in layouts:  # which has names of compressed-tensors, too
        layouts.discard("compressed-tensors")
    if foreign := layouts & set(_FOREIGN_ANCHORS.values()):
        raise ValueError(f"the tensors are of {min(foreign)}, which is not read; {_AS_PLAIN}")
    if layouts == {"gptq"}:
        raise ValueError(
            "tensors named qweight are of AutoGPTQ or AutoAWQ, which no configuration tells apart here: pass "
            "layout='gptq', 'gptq_v2' or 'awq'"
        )
    check(len(layouts) <= 1, f"the tensors are of several layouts: {', '.join(sorted(layouts))}; {_AS_PLAIN}")
    return layouts.pop() if layouts else None
