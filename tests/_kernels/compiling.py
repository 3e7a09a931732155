"""Kernels compiled to machine code for TPUs and GPUs that are not there.

The compilers come as wheels (the `aot` extra), and need no chip. A fault in one of them can end the process, so it runs
in a process of its own:

    python tests/_kernels/compiling.py TARGET [FILE ...]

compiles what `cases(TARGET)` of each FILE yields (default: every `compile_*.py` beside this one). It prints JSON lines:
how many cases there are, then for each its name before it is compiled, and its `Result` after. `run` starts it,
and starts it again after a case that it died of.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
TIMEOUT = 900.0  # seconds for all cases of one target and file, on a machine that does other things too

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
#: GPUs are described by targets/NAME.txtpb.
GPUS = ("h200", "a100", "b200")
TARGETS = (*TPUS, *GPUS)
#: Whether Mosaic GPU compiles for Ampere GPUs, with this version of JAX; before, it ends the process.
AMPERE = tuple(map(int, metadata.version("jax").split(".")[:2])) >= (0, 12)
#: The machine itself, whose programs need no kernel.
CPU = "cpu"

# Read once, when JAX or a compiler is loaded. Several processes may load the TPU compiler at the same time.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "LLVM_DISABLE_SYMBOLIZATION": "1",  # a dump has XLA look up stack traces, which takes seconds
    "MOSAIC_GPU_DUMP_PTX": "1",  # into the folder of the others
}


@dataclass(frozen=True)
class Case:
    """One thing to compile.

    Args:
        name: what the report calls it.
        fun: the function, of arrays alone.
        avals: its arguments, as `jax.ShapeDtypeStruct`s, or pytrees of them.
        x64: whether it is traced with `jax_enable_x64`.
        checks: what must hold of the result, names of `CHECKS`.
        tile: the tile of XLA's matrix products on a GPU. XLA finds it by trying on the GPU; without a GPU it takes a
            small one, which not all units have.
    """

    name: str
    fun: Callable[..., Any]
    avals: tuple[Any, ...]
    x64: bool = False
    checks: tuple[str, ...] = ()
    tile: str | None = None


#: A tile of the units of Hopper and Blackwell GPUs.
LARGE_TILE = "block_m: 64 block_n: 128 block_k: 64 num_stages: 3 num_warps: 4 num_ctas: 1"


@dataclass(frozen=True)
class Result:
    """What became of a case: `fault` is None where it compiled and its checks hold."""

    name: str
    fault: str | None
    seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # bytes
    findings: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.seconds:.1f} s", *self.findings]
        parts += [", ".join(f"{name} {size}" for name, size in self.memory.items())] if self.memory else []
        return "; ".join(parts) + (f"\n  FAULT {self.fault}" if self.fault else "")


def is_tpu(target: str) -> bool:
    """Whether a target is a TPU; else it is a GPU."""
    return target in TPUS


def has_mosaic(target: str) -> bool:
    """Whether kernels of Mosaic GPU for all chips are compiled for a target; else the body runs there."""
    return target != "a100" or AMPERE


def checks_of(target: str) -> tuple[str, ...]:
    """What is checked of a kernel that wants nothing special. Older GPUs may spill."""
    return ("vmem",) if is_tpu(target) else ("ptx",) if target == "h200" else ()


# -- are the compilers there ------------------------------------------------------------------------------------------

_PACKAGES = {True: ("libtpu",), False: ("jax-cuda13-plugin", "jax-cuda13-pjrt")}  # by is_tpu


def available() -> dict[str, str | None]:
    """For each target None where its compiler is installed at a version that fits JAX, else what is wrong."""
    reasons = {tpu: "; ".join(filter(None, map(_unfit, names))) or None for tpu, names in _PACKAGES.items()}
    return {target: reasons[is_tpu(target)] for target in TARGETS}


def _unfit(package: str) -> str | None:
    from packaging.requirements import Requirement  # pytest needs it too

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f'{package} is not installed (pip install ".[aot]")'
    wanting = [text for source in ("jax", "jax-cuda13-plugin") for text in _requires(source)]
    for requirement in map(Requirement, wanting):
        fits = requirement.specifier.contains(version, prereleases=True)
        if requirement.name.replace("_", "-") == package and not fits:
            return f"{package} {version} is installed, but JAX {metadata.version('jax')} needs {requirement.specifier}"
    return None


def _requires(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


# -- checks on what was compiled --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What the checks look at: the lowered module's text, and the folder of the GPU compiler's dumps, if any."""

    lowered: str
    dumps: Path
    optimized: str = ""  # XLA's module
    given: int = 0  # bytes of all arguments

    @functools.cached_property
    def products(self) -> list[tuple[str, str, str]]:
        """The types of every product: of its operands and its result; in a kernel, of its sums."""
        types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", self.optimized))
        found = re.findall(r"= (\w+)\[[^=]*? (?:dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", self.optimized)
        products = [(types.get(left, "?"), types.get(right, "?"), out) for out, left, right in found]
        for left, right in re.findall(r" custom-call\(%([\w.-]+), %([\w.-]+)[^\n]*product_of_blocks", self.optimized):
            products.append((types[left], types[right], "s32" if types[left] == "s8" else "f32"))
        return products

    @functools.cached_property
    def multiplied(self) -> str:
        """What multiplies: the types of operands and result, each once; of a kernel of this package its name."""
        types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", self.optimized))
        found = {f"{_dtype(left)} × {_dtype(right)} → {_dtype(out)}" for left, right, out in self.products}
        for name, out, given, rest in re.findall(
            r"%([\w.-]+) = \(?(\w+)\[.*? custom-call\((.*?)\), (.*)", self.optimized
        ):
            of = [_dtype(types[operand]) for operand in re.findall(r"%([\w.-]+)", given) if operand in types]
            if "dequantize_matmul" in name + rest:
                found.add("`dequantize_matmul`")
            elif "$matmul" in rest:  # a library, which takes them first
                found.add(f"{of[0]} × {of[1]} → {_dtype(out)}")
            elif name.startswith("ragged-dot-none"):  # a kernel of XLA, which takes them last
                found.add(f"{of[-2]} × {of[-1]} → {_dtype(out)}")
        return "; ".join(sorted(found)) or "nothing"

    @functools.cached_property
    def moved(self) -> int:
        """Bytes that the program moves in memory: each operation reads its operands and writes its result once.

        Not counted are what the pieces of a kernel read again, which caches hold, and arrays in the memory of a chip,
        `S(1)`.
        """
        sizes: dict[str, int] = {}
        total = 0
        for name, kind, operation, rest in self._operations:
            given = [sizes[operand] for operand in re.findall(r"%([\w.-]+)", rest.split("), ")[0]) if operand in sizes]
            parts = [_bytes(*part) for part in re.findall(r"([a-z]\w*)\[([\d,]*)\](\S*)", kind)]
            if operation.endswith("-start"):  # the other parts are its operand, and a flag
                parts = parts[:1]
            sizes[name] = sum(given) if operation in _NOTHING_MOVED else sum(parts)
            total += 0 if operation in (*_NOTHING_MOVED, "parameter", "constant") else sum(given) + sizes[name]
        return total

    @functools.cached_property
    def kernels(self) -> int:
        """How many operations the program starts, one after the other."""
        nothing = (*_NOTHING_MOVED, "parameter", "constant")
        return sum(operation not in nothing for _, _, operation, _ in self._operations)

    @property
    def _operations(self) -> list[tuple[str, ...]]:
        """Of the program: their names, the types of their results, what they are, and their operands."""
        entry = self.optimized[self.optimized.index("\nENTRY") :].partition("\n}")[0]
        return re.findall(r"%([\w.-]+) = (\(?.*?) ([\w-]+)\((.*)", entry)

    @functools.cached_property
    def ptx(self) -> list[Path]:
        """The PTX files that hold kernels of Mosaic."""
        files = sorted(self.dumps.glob("*.ptx"))
        return [path for path in files if "mosaic_gpu" in " ".join(_ENTRY.findall(path.read_text()))]


_NOTHING_MOVED = ("bitcast", "tuple", "get-tuple-element", "copy-done")


def _bytes(kind: str, shape: str, layout: str) -> int:
    """Of an array in memory."""
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return 0 if "S(1)" in layout else math.prod(map(int, filter(None, shape.split(",")))) * bits // 8


_DTYPES = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat"}


def _dtype(kind: str) -> str:
    """The name of JAX for a type of XLA."""
    letters, bits, rest = re.fullmatch(r"([a-z]+)(\d+)(.*)", kind).groups()  # type: ignore[union-attr]
    return f"{_DTYPES[letters]}{bits}{rest and '_'}{rest}"


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\(")
_DUMP = {"xla_dump_emitter_re": ".*"}  # compiler options beside the folder
_Findings = tuple[list[str], list[str]]  # what was found, what is wrong


def _check_ptx(compiled: Compiled) -> _Findings:
    """Vector loads, whether to registers or straight to shared memory; and what `_check_spills` checks."""
    findings, faults = _check_spills(compiled)
    for path in compiled.ptx:
        text = path.read_text()
        loads = re.findall(r"\bld\.(?!param|shared|local)[\w.:]*", text)
        vectors = len([load for load in loads if re.search(r"\.v[248]\.", load)])
        copied = re.findall(
            r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?\],\s*\[[^\]]*\],\s*(?:0x)?([0-9a-fA-F]+)", text
        )
        wide = sum(bytes_ in ("8", "16", "10") for bytes_ in copied)  # 10: hexadecimal
        name = ", ".join(_ENTRY.findall(text))
        findings.append(f"{name}: {vectors} of {len(loads)} loads are of vectors, {wide} of {len(copied)} copies")
        if not vectors + wide:
            faults.append(f"{name}: no vector load among {len(loads)} loads and {len(copied)} copies")
    return findings, faults


def _check_spills(compiled: Compiled) -> _Findings:
    """Nothing spilled to local memory; by the assembler's own count where it is at hand."""
    findings, faults = [], []
    for path in compiled.ptx:
        text = path.read_text()
        local = len(re.findall(r"\b(?:ld|st)\.local\b|^\s*\.local\b", text, re.MULTILINE))
        if local:
            faults.append(f"{', '.join(_ENTRY.findall(text))}: {local} uses of local memory")
        assembled = _assemble(path, re.findall(r"^\.target\s+(\w+)", text, re.MULTILINE)[0])
        findings += assembled
        faults += [line for line in assembled if re.search(r"[1-9]\d* bytes spill", line)]
    return findings, faults or ([] if compiled.ptx else ["no PTX of a kernel was found"])


def _assemble(path: Path, chip: str, code: str = os.devnull) -> list[str]:
    """What `ptxas -v` says of spills and registers; nothing where there is no ptxas, or one older than the PTX."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return []
    command = [ptxas, "-v", f"-arch={chip}", str(path), "-o", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        return [f"ptxas cannot assemble it: {said.strip().splitlines()[0]}"]
    return re.findall(r"\d+ bytes stack frame.*|Used \d+ registers", said)


def _check_vmem(compiled: Compiled) -> _Findings:
    """A TPU kernel that compiled fits into VMEM's default share, unless it asked for more than that."""
    configs = re.findall(r'"scoped_memory_configs": (\[.*?\])', compiled.lowered.replace("\\22", '"'))
    limits = [share["size"] for text in configs for share in json.loads(text) if share["memory_space"] == _VMEM]
    return [], [f"asks for {limit} bytes of VMEM" for limit in limits]


def _check_units(kinds: tuple[str, ...], compiled: Compiled) -> _Findings:
    """Every product takes operands of these types, so that no operand was converted before it."""
    findings = [f"{left} x {right} -> {out}" for left, right, out in compiled.products]
    wrong = [f for f, (*given, _) in zip(findings, compiled.products, strict=True) if not set(given) <= set(kinds)]
    return findings, wrong or ([] if findings else ["no product was found"])


def _check_machine_code(kinds: tuple[str, ...], compiled: Compiled) -> _Findings:
    """The PTX has products of the units, all of operands of these types."""
    text = "\n".join(path.read_text() for path in sorted(compiled.dumps.glob("*.ptx")))
    found = sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", text)))
    wrong = [name for name in found if not set(kinds) & set(name.split("."))]
    return found, wrong or ([] if found else ["no product of a unit was found in the PTX"])


def _check_separate(compiled: Compiled) -> _Findings:
    """Products are rounded before they are added: no kernel contracts them."""
    faults = [f"{path.name} has fused multiply-adds" for path in compiled.ptx if "fma.rn" in path.read_text()]
    return [], faults or ([] if compiled.ptx else ["no PTX of a kernel was found"])


def _check_body(compiled: Compiled) -> _Findings:
    """The program has no kernel of Mosaic GPU: "auto" chose the body for this chip."""
    return [], ["it has a kernel"] if "mosaic_gpu" in compiled.lowered + compiled.optimized else []


def _check_no_loop(compiled: Compiled) -> _Findings:
    """The program has no loop, which would write sums to memory in each turn."""
    loops = re.findall(r"%([\w.-]+) = [^\n]* while\(", compiled.optimized)
    return [], [f"loop {name}" for name in loops]


def _check_moved(compiled: Compiled) -> _Findings:
    """The program moves hardly more than its arguments."""
    ratio = compiled.moved / compiled.given
    finding = f"moves {ratio:.3f} of its arguments"
    return [finding], [finding] if ratio > _MOST_MOVED else []


_MOST_MOVED = 1.15


def _check_kernels(most: int, compiled: Compiled) -> _Findings:
    """The program is cut into few pieces."""
    finding = f"{compiled.kernels} kernels"
    return [finding], [f"{finding}, more than {most}"] if compiled.kernels > most else []


def _tell_products(compiled: Compiled) -> _Findings:
    """The cell of the table of products."""
    return [f"{TOLD}{compiled.multiplied}"], []


def _tell_code(compiled: Compiled) -> _Findings:
    """The cells of the table of machine code, as JSON: registers, bytes spilled, what multiplies, and instructions."""
    path = compiled.ptx[0]
    text = path.read_text()
    code = path.with_suffix(".cubin")
    said = " ".join(_assemble(path, re.findall(r"^\.target\s+(\w+)", text, re.MULTILINE)[0], str(code)))
    assert "Used" in said, "ptxas is not at hand"
    registers, spilled = (sum(map(int, re.findall(p, said))) for p in (r"Used (\d+)", r"(\d+) bytes spill stores"))
    names = sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.]*", text)))
    return [CODE + json.dumps([registers, spilled, names, *_instructions(code)])], []


def _instructions(code: Path) -> tuple[int, list[int]]:
    """How many instructions machine code has, and each of its innermost loops."""
    shown = subprocess.run(
        ["nvdisasm", "-c", str(code)], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    labels: dict[str, int] = {}
    loops, count = [], 0
    for line in shown.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(\w+)(.*)", line):
            count += found[1] != "NOP"
            target = re.search(r"\.L_x_\d+", found[2])
            if found[1] == "BRA" and target and labels.get(target[0], count) < count - 1:
                begin = labels[target[0]]
                if not any(begin <= other for other, _ in loops):
                    loops.append((begin, count))
    return count, [end - begin for begin, end in loops]


TOLD, CODE = "multiplies: ", "code: "
_VMEM = 1  # the number of this memory space in Mosaic's configuration

CHECKS: dict[str, Callable[[Compiled], _Findings]] = {
    "ptx": _check_ptx,
    "spills": _check_spills,
    "vmem": _check_vmem,
    "integer machine code": functools.partial(_check_machine_code, ("s8", "u8", "kind::i8")),
    "integer units": functools.partial(_check_units, ("s8", "u8")),
    "layer of a TPU": functools.partial(_check_kernels, 17),
    "layer of an old GPU": functools.partial(_check_kernels, 10),
    "layer of a GPU": functools.partial(_check_kernels, 7),
    "moved": _check_moved,
    "body": _check_body,
    "no loop": _check_no_loop,
    "separate": _check_separate,
    "told": _tell_products,
    "code": _tell_code,
    "float8 machine code": functools.partial(_check_machine_code, ("e4m3", "e5m2", "kind::f8f6f4")),
    "float8 units": functools.partial(_check_units, ("f8e4m3fn", "f8e5m2")),
}


# -- the process that compiles ----------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Compiles the cases of one target; see the module's docstring."""
    parser = argparse.ArgumentParser(description="compile kernels for a chip that is not there")
    parser.add_argument("target", choices=(*TARGETS, CPU))
    parser.add_argument("files", nargs="*", type=Path, help="files that define cases(target)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first case to compile")
    options = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # What the compilers print goes to stderr: stdout carries the protocol alone.
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        _compile_all(options.target, options.files or families(), options.start, out)


def _compile_all(target: str, files: Iterable[Path], start: int, out: TextIO) -> None:
    every = [case for file in files for case in _cases(file, target)]
    print(json.dumps({"cases": [case.name for case in every]}), file=out)
    chip = _chip(target)
    for case in every[start:]:
        print(json.dumps({"begins": case.name}), file=out)
        print(json.dumps({"result": asdict(_compile(case, chip, target in GPUS))}), file=out)


def _cases(file: Path, target: str) -> Iterator[Case]:
    description = importlib.util.spec_from_file_location(file.stem, file)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[file.stem] = module  # dataclasses look their module up
    description.loader.exec_module(module)
    yield from module.cases(target)


def _chip(target: str) -> Any:
    """A device of the target chip that compiles, and does nothing else."""
    import jax
    from jax.experimental import topologies

    if target == CPU:
        return jax.devices(CPU)[0]
    if is_tpu(target):
        return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target]).devices[0]
    config = (HERE / "targets" / f"{target}.txtpb").read_text()
    described = topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x1")
    return described.devices[0]


def _compile(case: Case, chip: Any, gpu: bool) -> Result:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if case.checks and gpu:
            options = {"xla_dump_to": folder, **_DUMP}
            os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        if case.tile and gpu:
            options["xla_gpu_override_gemm_autotuner"] = case.tile
        try:
            lowered, optimized, memory = _lower_and_compile(case, chip, options)
            given = sum(leaf.size * leaf.dtype.itemsize for leaf in _leaves(case.avals))
            compiled = Compiled(lowered, Path(folder), optimized, given)
            checked = [CHECKS[check](compiled) for check in case.checks]
        except Exception as error:  # whatever it is, it is what the report is about
            lines = f"{type(error).__name__}: {error}".splitlines()
            return Result(case.name, "\n".join(lines[:12])[:2000], time.perf_counter() - begun)
    findings = tuple(finding for found, _ in checked for finding in found)
    faults = [fault for _, found in checked for fault in found]
    return Result(case.name, "; ".join(faults) or None, time.perf_counter() - begun, memory, findings)


def _leaves(avals: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(avals)


def _lower_and_compile(case: Case, chip: Any, options: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(chip)
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), case.avals)
    # The default device tells Pallas the chip; an abstract mesh would not.
    with jax.enable_x64(case.x64), jax.default_device(chip):
        lowered = jax.jit(case.fun).lower(*avals)
        compiled = lowered.compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    sizes = {
        name: getattr(analysis, f"{name}_size_in_bytes", 0) for name in ("argument", "output", "temp", "generated_code")
    }
    return lowered.as_text(), compiled.as_text() or "", {name: size for name, size in sizes.items() if size}


# -- the process that asks --------------------------------------------------------------------------------------------


def families() -> list[Path]:
    """The files that define the cases of a family of kernels."""
    return sorted(HERE.glob("compile_*.py"))


def run(target: str, file: Path, timeout: float = TIMEOUT) -> list[Result]:
    """Compiles the cases of one file in a process of its own, a new one after each case that ends it.

    Returns:
        A result for each case. A process that dies before its first case is the one result "(start)".
    """
    deadline = time.monotonic() + timeout
    results: list[Result] = []
    while True:
        said, ending = _one_process(target, file, len(results), deadline - time.monotonic())
        messages = [json.loads(line) for line in said.splitlines() if line.endswith("}")]
        results += [Result(**message["result"]) for message in messages if "result" in message]
        names = [name for message in messages for name in message.get("cases", ())]
        begun = [message["begins"] for message in messages if "begins" in message]
        if ending is None and len(results) == len(names):
            return results
        results.append(Result(begun[-1] if begun else "(start)", ending or "the process ended early"))
        if not begun or len(results) == len(names):
            return results
        if time.monotonic() >= deadline:
            return results + [Result(name, "not reached in time") for name in names[len(results) :]]


def _one_process(target: str, file: Path, start: int, timeout: float) -> tuple[str, str | None]:
    """What one process said, and how it ended where it did not end well."""
    package = importlib.util.find_spec("jchop")
    assert package is not None and package.origin is not None
    paths = [str(Path(package.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, __file__, target, str(file), "--start", str(start)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            said, _ = process.communicate(timeout=max(timeout, 0))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0], f"still running after {timeout:.0f} s"
        if process.returncode == 0:
            return said, None
        errors.seek(0)
        last = "\n".join(errors.read().splitlines()[-12:])
        return said, f"the process ended with {process.returncode}\n{last}"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    from _kernels.compiling import main as run_main  # the module that the case files import, not a second copy of it

    run_main(sys.argv[1:])
