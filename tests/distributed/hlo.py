"""Counts the bytes that one rank sends in the collectives of a compiled program, by dtype, from its HLO text."""

from __future__ import annotations

import collections
import re

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16,
         "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}  # fmt: skip
_KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERATION = re.compile(r"= (.*?) (" + "|".join(_KINDS) + r")(-start)?\(")


def _bytes(text: str) -> list[tuple[str, float]]:
    """(dtype, bytes) of every array in the text of a type."""
    found = []
    for dtype, lengths in _SHAPE.findall(text):
        count = 1
        for length in filter(None, lengths.split(",")):
            count *= int(length)
        bits = _BITS[dtype] if dtype in _BITS else 8 if dtype.startswith("f8") else None
        assert bits is not None, f"unknown dtype {dtype}"
        found.append((dtype, count * bits / 8))
    return found


def _sent(kind: str, asynchronous: bool, result: str, ranks: int) -> list[tuple[str, float]]:
    arrays = _bytes(result)
    if asynchronous and kind in ("all-gather", "collective-permute", "all-to-all"):  # (operands, results, contexts)
        arrays = [array for array in arrays if array[1] > 4]
        arrays = arrays[len(arrays) // 2 :]
    share = (ranks - 1) / ranks
    factor = {"all-reduce": 2 * share, "reduce-scatter": ranks - 1, "collective-permute": 1}.get(kind, share)
    return [(dtype, size * factor) for dtype, size in arrays]


def wire_bytes(text: str, ranks: int) -> dict[str, float]:
    """The bytes that a rank sends, by dtype; the collectives of a loop count once for each turn."""
    bodies: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            assert name is not None
            current = name[1]
            bodies[current] = []
        else:
            bodies.setdefault(current, []).append(line)
    turns = collections.defaultdict(lambda: 1)
    for line in text.splitlines():
        if (body := re.search(r" while\(.*body=%?([\w.\-]+)", line)) is not None:
            known = re.search(r'known_trip_count"?:?\s*\{"?n"?:\s*"?(\d+)', line)
            turns[body[1]] = int(known[1]) if known else -1
    total: dict[str, float] = collections.defaultdict(float)
    for name, lines in bodies.items():
        for line in lines:
            operation = _OPERATION.search(line)
            if operation is None:
                continue
            assert turns[name] > 0, f"the number of turns of {name} is not known"
            for dtype, size in _sent(operation[2], operation[3] is not None, operation[1], ranks):
                total[dtype] += size * turns[name]
    return dict(total)
