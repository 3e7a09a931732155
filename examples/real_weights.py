"""A trained network from a package, with weights in few bits: which type has a file?

    pip install --no-deps magika==1.0.3 && pip install onnx
    python examples/real_weights.py [--small] [--files FOLDER] [--steps]

The wheel of magika (Apache-2.0) holds a network of 3 MB that was trained on files of 214 types. It sees the first and
the last 1,024 bytes of a file. The program writes the network in JAX, and reads the suffixes of files on this machine
as labels. It prints the share of right types, and the Kullback-Leibler divergence from the float32 network in nats.
`--steps` rounds the convolution with data. Every second file is data, the others are in the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMATS = (
    "int8(group=all)",
    "float8_e4m3fn(group=all)",
    "mxfp8_e4m3",
    "nf4(group=32)",
    "nvfp4",
    "mxfp4",
    "int4(group=32)",
    "int4(group=128)",
    "int3(group=32)",
)
STEPS: dict[str, list[Any]] = {
    "nearest": [],
    "clip": [jc.ptq.clip()],
    "gptq": [jc.ptq.gptq()],
    "clip, gptq": [jc.ptq.clip(), jc.ptq.gptq()],
    "clip, results": [jc.ptq.clip(), jc.ptq.sign_round(60, loss="results")],
}
#: Types by suffix. Files of one type have several suffixes, and are one label.
LABELS = {
    **{
        f".{name}": name
        for name in ("c", "html", "css", "json", "csv", "svg", "png", "npy", "npz", "rst", "yaml", "toml")
    },
    **{".py": "python", ".pyi": "python", ".h": "c", ".js": "javascript", ".md": "markdown", ".txt": "txt"},
    **{
        ".so": "elf",
        ".gz": "gzip",
        ".xml": "xml",
        ".sh": "shell",
        ".pl": "perl",
        ".pm": "perl",
        ".pyc": "pythonbytecode",
    },
    **{".cpp": "cpp", ".hpp": "cpp", ".ttf": "ttf", ".java": "java", ".rb": "ruby", ".ini": "ini", ".bat": "batch"},
}
ENDS, MOST, NOTHING = 1024, 4096, 256  # numbers of each end, bytes that are read, the number of no byte


def network(p: dict[str, Any], x: Any) -> Any:
    """Logits of files: ``x`` has 2,048 bytes each, as numbers to 256."""
    h = jax.nn.gelu(p["bytes"][x] + p["bytes_bias"]).reshape(len(x), 512, 256)
    h = norm(h, p["first_scale"], p["first_bias"], axis=1)
    h = jax.lax.conv_general_dilated(h, p["conv"], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))
    h = jax.nn.gelu(h + p["conv_bias"]).max(1)
    return norm(h, p["second_scale"], p["second_bias"], axis=-1) @ p["types"] + p["types_bias"]


def norm(x: Any, scale: Any, bias: Any, axis: int) -> Any:
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale + bias


def weights() -> tuple[dict[str, Any], list[str]]:
    """The parameters in the wheel, and the names of the types."""
    spec = importlib.util.find_spec("magika")
    if spec is None or spec.origin is None or importlib.util.find_spec("onnx") is None:
        raise SystemExit("needs two packages: pip install --no-deps magika==1.0.3 && pip install onnx")
    import onnx

    folder = Path(spec.origin).parent / "models" / "standard_v3_3"
    found = {
        each.name.split("get_logits_/")[-1]: onnx.numpy_helper.to_array(each)
        for each in onnx.load(str(folder / "model.onnx")).graph.initializer
    }
    net = "MagikaV2/"
    p = {
        "bytes": found["Const:0"],
        "bytes_bias": found[net + "Dense_0/Reshape:0"].reshape(-1),
        "first_scale": found[net + "LayerNorm_0/Reshape_2:0"],
        "first_bias": found[net + "LayerNorm_0/Reshape_3:0"],
        "conv": found[net + "Conv_0/transpose_3:0"][..., 0].transpose(2, 1, 0),
        "conv_bias": found["const_fold_opt__209"].reshape(-1),  # the bias, folded by the exporter
        "second_scale": found[net + "LayerNorm_1/Reshape_2:0"],
        "second_bias": found[net + "LayerNorm_1/Reshape_3:0"],
        "types": found["Const_24:0"],
        "types_bias": found[net + "Dense_1/Reshape:0"],
    }
    types = json.loads((folder / "config.min.json").read_text(encoding="utf-8"))["target_labels_space"]
    return {name: jnp.asarray(a) for name, a in p.items()}, types


def ends_of(path: Path) -> np.ndarray:
    """The numbers of a file, as magika reads them: both ends without white space, and 256 where bytes are missing."""
    with path.open("rb") as file:
        first = file.read(MOST)
        file.seek(max(0, path.stat().st_size - MOST))
        last = file.read(MOST)
    whole = path.stat().st_size <= MOST
    first, last = (first.strip(), last.strip()) if whole else (first.lstrip(), last.rstrip())
    x = np.full(2 * ENDS, NOTHING, np.int32)
    first, last = first[:ENDS], last[-ENDS:]
    x[: len(first)] = list(first)
    x[2 * ENDS - len(last) :] = list(last)
    return x


def files(folder: Path, most: int, types: list[str]) -> tuple[Any, Any]:
    """The numbers and labels of at most ``most`` files of each type, spread over the folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in LABELS and path.is_file() and path.stat().st_size > 64:
            found.setdefault(LABELS[path.suffix], []).append(path)
    some = [(label, path) for label, paths in found.items() for path in paths[:: -(-len(paths) // most)]]
    return jnp.asarray(np.stack([ends_of(p) for _, p in some])), jnp.asarray([types.index(label) for label, _ in some])


def in_batches(fun: Any, x: Any, size: int = 64) -> Any:
    return jnp.concatenate([fun(x[i : i + size]) for i in range(0, len(x), size)])


def divergence(p: Any, q: Any) -> float:
    """The mean of Σ p log(p / q) over files, for the logits of p and q."""
    p, q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, default=Path(sys.prefix), help="a folder of files")
    parser.add_argument("--small", action="store_true", help="10 files of each type in place of 40")
    parser.add_argument("--steps", action="store_true", help="add the rounding with data")
    options = parser.parse_args(argv)
    p, types = weights()
    x, labels = files(options.files, 10 if options.small else 40, types)
    seen, x, labels = x[::2], x[1::2], labels[1::2]
    print(f"reading {len(x)} files", file=sys.stderr)
    exact = in_batches(partial(jax.jit(network), p), x)
    right = lambda logits: float((logits.argmax(-1) == labels).mean())  # noqa: E731
    print(f"{len(x)} files of {len({*labels.tolist()})} types; float32: {right(exact):.4f} right")
    print(f"{'weights':28} {'right':>6} {'divergence':>10}")
    for text in FORMATS:
        low = jc.quantize_fn(network, {"bytes conv types": text})
        logits = in_batches(partial(jax.jit(low), low.pack(p, seen)), x)
        print(f"{text:28} {right(logits):6.4f} {divergence(exact, logits):10.5f}")
    for text in (*FORMATS[4::4], "int2(group=32,rule=half_range)") if options.steps else ():
        low = jc.quantize_fn(network, {"conv": text})
        for name, steps in STEPS.items():
            batches = [seen[i : i + 64] for i in range(0, len(seen), 64)]
            data: dict[str, Any] = {"batches": batches, "steps": steps} if steps else {}
            logits = in_batches(partial(jax.jit(low), low.pack(p, seen[:64], **data)), x)
            print(f"convolution, {text + ', ' + name:24} {divergence(exact, logits):8.5f}")


if __name__ == "__main__":
    main()
