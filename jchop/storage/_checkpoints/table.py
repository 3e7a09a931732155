"""`LAYOUTS`: the table of layouts. Each finds the weights among the tensors of files, and names what it writes."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np

from jchop.storage._checkpoints import bitsandbytes, compressed, deepseek, microscaling, torchao, transposed
from jchop.storage._checkpoints.row import Facts, Row, field
from jchop.storage._files.json import document, shown
from jchop.storage._files.safetensors import Entry
from jchop.storage._files.shards import Shards

#: The field of ``config.json``, and the ends of the names of weights.
CONFIG, WEIGHT = "quantization_config", "weight"
_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class Weight:
    """A quantized weight in files: its row, the names of its tensors by their ends, its facts, its shape."""

    row: Row
    names: dict[str, str]
    facts: ChainMap[str, Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Unread:
    """A weight in files that cannot be read: why, and the names of its tensors."""

    why: str
    tensors: Sequence[str]


@dataclass(frozen=True)
class Layout:
    """A layout of the tensors of a model.

    Args:
        name: as the callers write it.
        rows: the ways in which a weight may be stored; the first that fits applies.
        config: makes the ``quantization_config`` of what was written, from the facts of each module and the modules
            that were not quantized.
        records: whether facts are in the metadata of the files, and not in the configuration.
        appends: whether the ends of rows follow the name of a weight. Else they follow the name of its module, and the
            weight is called ``weight`` in it.
    """

    name: str
    rows: Sequence[Row]
    config: Callable[[Mapping[str, tuple[Row, Facts]], Sequence[str]], dict[str, Any]]
    records: bool = False
    appends: bool = False

    def stem(self, module: str) -> str:
        """The beginning of the names of the tensors of a module's weight, or of a weight, as the layout names them."""
        prefix = module if self.appends else f"{module}." if module else ""
        return f"{prefix}_{WEIGHT}_" if self.records else prefix

    def owner(self, weight: str) -> str:
        """The module of a weight, or the weight itself, as the layout names them."""
        return weight if self.appends else weight[: -len(WEIGHT)].removesuffix(".")

    def name_of(self, owner: str) -> str:
        """The name of the weight of a module; of a weight the same."""
        return owner if self.appends else f"{owner}.{WEIGHT}" if owner else WEIGHT

    def owners(self, entries: Mapping[str, Entry]) -> list[str]:
        """The modules or weights that have a tensor with the name of an anchor."""
        anchors = list(dict.fromkeys(row.anchor for row in self.rows))
        if self.appends:
            pairs = ((name, end) for name in entries for end in anchors if name.endswith(end))
            sure = (one for one in pairs if one[1].strip(".") in _OWNERS or entries[one[0]].dtype == _BYTE)
            owners = (name.removesuffix(end) for name, end in sure)
            return list(dict.fromkeys(owner for owner in owners if owner.strip(".")))
        matches = ((name, anchor) for name in entries for anchor in anchors if ends(name, self.stem(""), anchor))
        return list(dict.fromkeys(name[: -len(self.stem("") + anchor)].removesuffix(".") for name, anchor in matches))

    def has_pair(self, entries: Mapping[str, Entry]) -> bool:
        """Whether a weight has all the tensors of a row."""
        owners = self.owners(entries)
        return any(all(owner + part in entries for part in row.parts) for owner in owners for row in self.rows)

    def find(self, source: Shards) -> tuple[dict[str, Weight], dict[str, Unread]]:
        """The weights of a source by name; and those that would be misread, or fit no row of this layout.

        Raises:
            ValueError: for a configuration of weights that are not read.
        """
        entries, config = source.entries, quantization(source)
        names = sorted(entries)
        _check_config(self.name, config)
        weights: dict[str, Weight] = {}
        own = _own_facts(config)
        unread = self._others(entries, {(self.stem("") + row.anchor).strip(".") for row in self.rows})
        unread |= pairs_in(entries, self.name)
        for owner in self.owners(entries):
            name, stem = self.name_of(owner), self.stem(owner)
            try:
                facts = ChainMap(_record(source, owner)) if self.records else ChainMap(own(owner), config)
                weight = self._weight(owner, entries, names, facts)
                weights[name] = _with_shape(weight, source, entries)
            except ValueError as error:
                ends_of = {part for row in self.rows for part in (*row.parts, *row.optional)}
                unread.setdefault(name, Unread(str(error), [stem + end for end in ends_of if stem + end in entries]))
        used = {name for weight in weights.values() for name in weight.names.values()}
        used |= {name for weight in unread.values() for name in weight.tensors}
        for name in names:
            if self.records and name.endswith("_qdata") and name not in used:
                fault = f"tensor {shown(name)} is of no weight named '….weight'"
                why = f"{fault}, and {self.name} has only these; {_WAY_OUT}"
                stem = name.removesuffix("qdata")
                unread[name] = Unread(why, list(_starting(names, stem)))
        return weights, unread

    def _others(self, entries: Mapping[str, Entry], anchors: set[str]) -> dict[str, Unread]:
        """Weights of other layouts, which would be read as if they were not quantized."""
        others = {anchor: name for anchor, name in (_OWNERS | _FOREIGN).items() if anchor not in anchors}
        unread: dict[str, Unread] = {}
        names = sorted(entries)
        for name in names:
            anchor = next((anchor for anchor in others if ends(name, "", anchor)), None)
            if anchor is not None:
                why = f"tensor {shown(name)} is of the layout {others[anchor]}, not {self.name}; {_WAY_OUT}"
                owner, stem = name.removesuffix(anchor).removesuffix("."), name.removesuffix(anchor)
                own = [other for other in _starting(names, stem) if "." not in other[len(stem) :]]
                own = [other for other in [*own, name, owner] if other in entries and not ends(other, "", "bias")]
                unread.setdefault(owner if owner in entries else f"{stem}{WEIGHT}", Unread(why, own))
        return unread

    def _weight(
        self, module: str, entries: Mapping[str, Entry], names: Sequence[str], facts: ChainMap[str, Any]
    ) -> Weight:
        stem = self.stem(module)
        for row in self.rows:
            if self.records and row.name != facts.get("_type"):
                continue
            tensors = {part: stem + part for part in (*row.parts, *row.optional) if stem + part in entries}
            if not set(row.parts) <= set(tensors):
                continue
            shape = row.look({part: entries[name] for part, name in tensors.items()})
            if shape is not None:
                return Weight(row, tensors, ChainMap(facts["_data"]) if self.records else facts, shape)
        near = list(islice(_starting(names, stem), 5))
        texts = ", ".join(f"{name} {entries[name].dtype}{list(entries[name].shape)}" for name in near)
        raise ValueError(f"the tensors {texts} form no weight of the layout {self.name}; {_WAY_OUT}")


#: The longest tensor that is read for a shape, in bytes.
_SHORT = 1 << 12


def _with_shape(weight: Weight, source: Shards, entries: Mapping[str, Entry]) -> Weight:
    """A weight with the shape that one of its tensors holds, if its row has such a tensor."""
    if weight.row.peek is None:
        return weight
    part, shape_in = weight.row.peek
    name = weight.names[part]
    if entries[name].nbytes > _SHORT:
        raise ValueError(f"tensor {shown(name)} has more than {_SHORT} bytes")
    try:
        return replace(weight, shape=shape_in(source.read(name)))
    except ValueError as error:
        raise ValueError(f"tensor {shown(name)}: {error}") from None


def _starting(names: Sequence[str], stem: str) -> Iterator[str]:
    """The names that start with a stem, of sorted names."""
    later = range(bisect_left(names, stem), len(names))
    return takewhile(lambda name: name.startswith(stem), map(names.__getitem__, later))


def ends(name: str, stem: str, anchor: str) -> bool:
    """Whether a tensor has the name of an anchor in some module."""
    end = stem + anchor
    return name == end or name.endswith(f".{end}")


def quantization(source: Shards) -> dict[str, Any]:
    """The ``quantization_config`` of a model; empty if there is none."""
    return field(source.config, CONFIG, dict, {})


#: The end of errors about tensors that are not understood.
_WAY_OUT = "layout='plain' reads every tensor as it is"
#: The values of fields of the configuration that say how tensors are laid out; others are laid out in another way.
_KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "gptq_v2": {"checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "awq": {"version": ("gemm",)},
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn")},
    "bitsandbytes": {"load_in_8bit": ("false",), "bnb_4bit_quant_type": ("nf4",)},
}
#: Ends of names of tensors in layouts that are not read, and a name for these.
_FOREIGN = {
    "SCB": "LLM.int8 of bitsandbytes",
    "quant_state.bitsandbytes__fp4": "FP4 of bitsandbytes",
    "weight.bitmask": "sparse compressed-tensors",
    "weight_scale_2": "modelopt's NVFP4",
    "W_q": "HQQ",
    "q_weight": "ExLlamaV2",
    "_weight_qdata": "torchao, without its records in the metadata",
}
#: Ends of the names of two tensors, of which the first has codes: a layout, or a name for those that are not read.
_PAIRS = {
    ("_blocks", "_scales"): "mxfp4",
    (".blocks", ".scales"): "mxfp4",
    (".weight", ".scales"): "MLX, HIGGS or gpt-fast",
    (".weight", ".scales_and_zeros"): "gpt-fast",
    (".weight", ".scale"): "DeepSeek's inference",
    (".weight", ".scale_weight"): "ComfyUI",
    (".weight", ".qscale_weight"): "Mistral",
    (".weight", ".weights_scaling_factor"): "TensorRT-LLM",
    (".qvalue", ".scale"): "jchop, without their record in the metadata",
    ("._data", "._scale"): "quanto",
    ("._data._data", "._scale"): "quanto",
    (".codes", ".codebooks"): "AQLM",
    (".indices", ".centroids.weight"): "VPTQ",
    (".Qidxs", ".SU"): "QuIP#",
    (".trellis", ".suh"): "ExLlamaV3",
    (".dense_weights", ".row_offsets"): "SpQR",
    (".encoded_exponent", ".sign_mantissa"): "DFloat11",
    (".B", ".s"): "Marlin",
    ("_packed", "_scale"): "compressed-tensors under another name than weight",
    ("", "_scales"): "EETQ or a layout like it",
    ("", "_weight_scale"): "modelopt or a layout like it",
    ("", "_scale"): "FBGEMM or a layout like it",
    ("", "_scale_inv"): "DeepSeek or a layout like it",
}


def pairs_in(entries: Mapping[str, Entry], layout: str) -> dict[str, Unread]:
    """Codes that are known by the tensor beside them: by themselves they are integers like any others."""
    unread: dict[str, Unread] = {}
    for name, entry in entries.items():
        path = f".{name}"
        for codes, scales in _PAIRS if _may_be_codes(entry.dtype) else ():
            beside = (path.removesuffix(codes) + scales).removeprefix(".")
            other = _PAIRS[codes, scales]
            if not path.endswith(codes) or beside not in entries or other == layout:
                continue
            if not any(ends(beside, "", anchor) for anchor in _OWNERS):
                why = f"of the layout {other}, not {layout}" if other in LAYOUTS else f"of {other}, which is not read"
                why = f"the tensors {shown(name)} and {shown(beside)} are {why}; {_WAY_OUT}"
                unread.setdefault(name, Unread(why, [name, beside]))
    return unread


def _may_be_codes(dtype: np.dtype) -> bool:
    return dtype != np.bool_ and (dtype.itemsize == 1 or np.issubdtype(dtype, np.integer))


#: Formats of compressed-tensors whose weights are not those of the table.
_REFUSED = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask", "mxfp6-pack-quantized")


def _check_config(layout: str, config: Facts) -> None:
    groups = field(config, "config_groups", dict, {}).values()
    sparsity = field(config, "sparsity_config", dict, {}).get("format")
    formats = [config.get("format"), sparsity, *(group.get("format") for group in groups if isinstance(group, dict))]
    wrong = [name for name in formats if name in _REFUSED]
    if wrong:
        raise ValueError(
            f"{CONFIG} has the format {wrong[0]!r}, which is not read; convert the model to another one first"
        )
    for name, values in _KNOWN.get(layout, {}).items():
        value = config.get(name)
        if value is not None and str(value).lower() not in values:
            meaning = f" ({_FOREIGN['SCB']})" if name == "load_in_8bit" else ""
            raise ValueError(
                f"{CONFIG} has {name}={shown(value)}{meaning}, and read are {', '.join(values)}; {_WAY_OUT}"
            )


#: The most different groups of weights whose modules no group names.
_MOST_GROUPS = 256


def _own_facts(config: Facts) -> Callable[[str], dict[str, Any]]:
    """Gives the name of a module and its groups: those that name it in their targets, else one of each kind.

    What each module takes from a configuration then does not grow with the configuration.
    """
    by_module: dict[str, dict[str, Any]] = {}
    kinds: dict[str, Any] = {}
    for key, group in field(config, "config_groups", dict, {}).items():
        if isinstance(group, dict):
            weights = {"weights": group.get("weights")}
            kinds.setdefault(json.dumps(weights), weights)
            for name in field(group, "targets", list, []):
                by_module.setdefault(str(name), {})[key] = {"targets": [name]} | weights

    def own(module: str) -> dict[str, Any]:
        if module not in by_module and len(kinds) > _MOST_GROUPS:
            raise ValueError(f"{CONFIG} has {len(kinds)} different groups, and none of them names {shown(module)}")
        return {"module": module, "config_groups": by_module.get(module, kinds)}

    return own


def beside_weights(config: Facts) -> list[str]:
    """The fields of a configuration that say more than how weights are stored, and that no layout writes."""
    quantization_config = field(config, CONFIG, dict, {})
    groups = [
        group for group in field(quantization_config, "config_groups", dict, {}).values() if isinstance(group, dict)
    ]
    names = [name for name in ("input_activations", "output_activations") if any(group.get(name) for group in groups)]
    names += [name for name in ("kv_cache_scheme", "transform_config") if quantization_config.get(name)]
    return names + (["activation_scheme"] if quantization_config.get("activation_scheme") == "static" else [])


def _record(source: Shards, module: str) -> dict[str, Any]:
    name = f"{module}.{WEIGHT}" if module else WEIGHT
    text = source.metadata.get(name)
    if text is None or len(text) > 1 << 14:
        raise ValueError(f"the metadata have no record of {shown(name)}, or one that is too long")
    try:
        record = document(text)
    except ValueError as error:
        raise ValueError(f"the record of {shown(name)} in the metadata is not JSON: {error}") from None
    if str(record.get("_type")) not in torchao.ROWS:
        raise ValueError(f"{shown(name)} is a {shown(record.get('_type'))}; read are {', '.join(torchao.ROWS)}")
    return record | {"_data": field(record, "_data", dict, {})}


# -- configurations that are written -----------------------------------------------------------------------------------

Written = Mapping[str, tuple[Row, Facts]]


def _compressed(rows: Written, others: Sequence[str]) -> dict[str, Any]:
    kinds: dict[str, list[str]] = {}
    for module, (row, facts) in rows.items():
        kinds.setdefault(json.dumps([row.name, facts]), []).append(module)
    groups: dict[str, Any] = {}
    formats = set()
    for number, (text, modules) in enumerate(kinds.items()):
        name, facts = json.loads(text)
        formats.add(name)
        targets = ["Linear"] if len(kinds) == 1 else modules
        groups[f"group_{number}"] = {"targets": targets, "weights": facts, "input_activations": None, "format": name}
    config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    config["version"] = ".".join(map(str, (*compressed.DENSE, 0)))
    return config | {"format": formats.pop() if len(formats) == 1 else "mixed-precision", "ignore": list(others)}


def _same(method: str, **more: Any) -> Callable[[Written, Sequence[str]], dict[str, Any]]:
    """The configuration of a layout whose modules all have the same facts."""

    def config(rows: Written, others: Sequence[str]) -> dict[str, Any]:
        kinds = {json.dumps(facts, sort_keys=True): module for module, (_, facts) in rows.items()}
        if len(kinds) > 1:
            texts = "; ".join(f"{module} {text}" for text, module in kinds.items())
            raise ValueError(f"quantized weights of this layout have one form, and these differ: {texts}")
        facts = next(iter(rows.values()))[1] if rows else {}
        return {"quant_method": method} | dict(facts) | more | {"modules_to_not_convert": list(others) or None}

    return config


def _gptq(version: str) -> Callable[[Written, Sequence[str]], dict[str, Any]]:
    """The configuration of GPTQ: one group of all inputs is -1, unless other weights have groups of as many."""
    same = _same("gptq", checkpoint_format=version)

    def config(rows: Written, others: Sequence[str]) -> dict[str, Any]:
        sizes = {facts["group_size"] for _, facts in rows.values() if not facts["whole"]}
        by_module = {}
        for module, (row, module_facts) in rows.items():
            facts = dict(module_facts)
            if facts.pop("whole") and sizes != {facts["group_size"]}:
                facts["group_size"] = -1
            by_module[module] = row, facts
        return same(by_module, others)

    return config


def _recorded(rows: Written, others: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "torchao"}


def _bitsandbytes(rows: Written, others: Sequence[str]) -> dict[str, Any]:
    facts = next(iter(rows.values()))[1] if rows else {}
    return {"quant_method": "bitsandbytes"} | dict(facts) | {"llm_int8_skip_modules": list(others) or None}


_COMPRESSED = (
    microscaling.NVFP4,
    compressed.PACKED,
    microscaling.MXFP4,
    microscaling.MXFP8,
    compressed.FLOAT,
    compressed.INTEGER,
)
#: The layouts by name.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("compressed-tensors", _COMPRESSED, _compressed),
        Layout("gptq", (transposed.GPTQ,), _gptq("gptq")),
        Layout("gptq_v2", (transposed.GPTQ_V2,), _gptq("gptq_v2")),
        Layout("awq", (transposed.AWQ,), _same("awq")),
        Layout("fp8", (deepseek.ROW, deepseek.WHOLE), _same("fp8", fmt="e4m3", activation_scheme="dynamic")),
        Layout("bitsandbytes", (bitsandbytes.ROW,), _bitsandbytes, appends=True),
        Layout("torchao", tuple(torchao.ROWS.values()), _recorded, records=True),
        Layout("mxfp4", (microscaling.BLOCKS, microscaling.DOTTED), _same("mxfp4"), appends=True),
    )
}
#: The first layout with each anchor; of layouts that append to any name, an anchor that belongs to no other tensor.
_OWNERS: dict[str, str] = {bitsandbytes.ROW.anchor.strip("."): "bitsandbytes"}
for _layout in LAYOUTS.values():
    for _row in () if _layout.records or _layout.appends else _layout.rows:
        _OWNERS.setdefault(_row.anchor, _layout.name)


def named_in(source: Shards) -> str | None:
    """The layout of a source: of its configuration, or else of the names of its tensors; None if nothing is quantized.

    Raises:
        ValueError: for a method that is not known, or tensors of several layouts.
    """
    config = quantization(source)
    method = config.get("quant_method")
    if method is None and field(config, "load_in_4bit", bool, False):
        method = "bitsandbytes"
    if method is not None:
        name = method
        if method == "gptq" and "gptq_v2" in (config.get("checkpoint_format"), config.get("format")):
            name = "gptq_v2"
        if not isinstance(name, str) or name not in LAYOUTS:
            raise ValueError(f"{CONFIG} has quant_method={shown(method)}; known are {', '.join(LAYOUTS)}; {_WAY_OUT}")
        return name
    if "tensor_names" in source.metadata:
        return "torchao"
    return _by_names(source.entries)


def _by_names(entries: Mapping[str, Entry]) -> str | None:
    """The layout whose anchors are among the names of tensors."""
    owners = _OWNERS | _FOREIGN
    layouts = {owners[anchor] for name in entries for anchor in owners if ends(name, "", anchor)}
    layouts |= {layout.name for layout in LAYOUTS.values() if layout.appends and layout.has_pair(entries)}
    if foreign := layouts & set(_FOREIGN.values()):
        raise ValueError(f"the tensors are of {min(foreign)}, which is not read; {_WAY_OUT}")
    if layouts == {"gptq"}:
        raise ValueError(
            "tensors named qweight are of AutoGPTQ or AutoAWQ, which no configuration tells apart here: pass "
            "layout='gptq', 'gptq_v2' or 'awq'"
        )
    if len(layouts) > 1:
        raise ValueError(f"the tensors are of several layouts: {', '.join(sorted(layouts))}; {_WAY_OUT}")
    return layouts.pop() if layouts else None
