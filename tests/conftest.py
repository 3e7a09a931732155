"""What every test starts from: the CPU with eight devices, and random numbers that are the same in every run."""

import os
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterator
from typing import Any

DEVICES = 8
COMPILED = pathlib.Path(__file__).parents[1] / ".cache" / "compiled"
DURATIONS = pathlib.Path(__file__).parent / "durations.md"


def _prepare_environment() -> None:
    """Sets what JAX and the thread pools read once, when they are imported; a value that is already set stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={DEVICES}"
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: one thread each is enough
        if "xla_cpu_multi_thread_eigen" not in flags:
            flags += " --xla_cpu_multi_thread_eigen=false"
        if "xla_cpu_parallel_codegen_split_count" not in flags:
            flags += " --xla_cpu_parallel_codegen_split_count=1"  # the same code, compiled in a tenth less time
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    os.environ["XLA_FLAGS"] = flags.strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "Agg")
    os.environ["COLUMNS"] = "100"  # of tables on the command line, whatever the terminal
    # Most of the time of a first run is XLA's. Later runs read what it compiled, by the program, the flags and the
    # version of jaxlib, and so do the processes that tests start.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


_prepare_environment()

import collections  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import itertools  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

pytest_plugins = ["selection"]

#: `JAX_PLATFORMS=cuda,cpu pytest ...` runs tests on a GPU; products that they compare with are of float32, not of tf32.
ON_GPU = "cuda" in os.environ["JAX_PLATFORMS"]
if ON_GPU:
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compilers",
        action="store_true",
        help="fail, instead of skipping, where a compiler for an absent chip is missing (the extra `aot`)",
    )
    parser.addoption(
        "--unoptimized",
        action="store_true",
        help="let XLA compile without optimizing: less CPU time, but other code than users run",
    )
    parser.addoption("--durations-file", metavar="PATH", help="write the CPU seconds of files and of the slowest tests")


_MOST_COMPILED = 2**30  # bytes: about ten trees
_MOST_TESTS = 200  # of one module before its compiled functions go: thousands of specs would hold gigabytes


@pytest.fixture(scope="module")
def _tests_of_module() -> Iterator[Iterator[int]]:
    """Counts the tests of a module. Its compiled functions serve its own tests, and are dropped with it."""
    yield itertools.count(1)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _compiled_code_dropped(_tests_of_module: Iterator[int]) -> Iterator[None]:
    yield
    if next(_tests_of_module) % _MOST_TESTS == 0:
        jax.clear_caches()


#: Files whose default tests compile as users do, beside a tenth of all files; so do all slow tests.
_AS_USERS = (
    "tests/_core/arithmetic/",
    "tests/_core/elementary/",
    "tests/_core/xla/test_cpu.py",
    "tests/_kernels/test_compile.py",
    "tests/_kernels/test_partitioned.py",
    "tests/math/test_contract.py",
    "tests/test_compile_cost.py",
    "tests/test_hosts.py",
    "tests/_round/test_round_values.py",
)


def _compiles_as_users(item: pytest.Item) -> bool:
    """Of a file all default tests or none: what one test has compiled serves the next."""
    from selection import part_of  # which pytest has to load first

    file = item.nodeid.split("::")[0]
    return "slow" in item.keywords or file.startswith(_AS_USERS) or part_of(file, 10) == 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nine tenths of the default tests compile with few of LLVM's optimizations and without XLA's fusion emitters.

    That takes half the time of most of them. From JAX 0.12 on, such code flushes subnormal bfloat16 numbers, so all
    tests compile as users do there.
    """
    few = jax.__version_info__ < (0, 12) and not ON_GPU and not _compiles_as_users(item)
    jax.config.update("jax_disable_most_optimizations", few)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(few))  # of processes that the test starts


EMITTERS_CAN_BE_LEFT = jax.__version_info__ < (0, 11)


def _without_fusion_emitters(options_of: Callable[..., Any]) -> Callable[..., Any]:
    """XLA's options for a program; JAX has no configuration of this one, and XLA has it below JAX 0.11."""

    def options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        few = {"xla_cpu_use_fusion_emitters": False} if jax.config.read("jax_disable_most_optimizations") else {}
        return options_of(*args, env_options_overrides=few | (env_options_overrides or {}), **more)

    return options


#: JAX makes an MLIR context for each program and loads all dialects into it, which takes longer than most lowerings.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)


if EMITTERS_CAN_BE_LEFT:
    compiler.get_compile_options = _without_fusion_emitters(compiler.get_compile_options)


@pytest.fixture(autouse=True)
def _seeded_numpy() -> None:
    """NumPy's global generator starts every test from the same state, whatever ran before on this worker."""
    np.random.seed(20240229)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of its own for one test, the same in every run."""
    return np.random.default_rng(20240229)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit mode of JAX."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def neighbours_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exact result is rounded under many modes, for which its neighbours are the same."""
    monkeypatch.setattr(oracle, "neighbours", functools.lru_cache(maxsize=1 << 14)(oracle.neighbours))


class _Durations:
    """Counts the CPU seconds of the tests, those of the processes that they start included; a busy machine adds few.

    The first test that uses a compiled function or a fixture of its file pays for it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.seconds = path, collections.Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, bool, bool]:
        self.before = sum(os.times()[:4])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report, now = (yield), sum(os.times()[:4])
        report.user_properties.append(("cpu_seconds", now - self.before))  # which a worker of xdist sends along
        self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += dict(report.user_properties)["cpu_seconds"]  # type: ignore[operator]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # the process that started the workers has the reports of all of them
        number, files = collections.Counter[str](), collections.Counter[str]()
        for test, seconds in self.seconds.items():
            file = test.split("::")[0]
            number[file] += 1
            files[file] += seconds
        lines = ["# CPU seconds of the tests", ""]
        lines += [f"{number.total()} tests took {files.total():.0f} s. Written by `pytest --durations-file`.", ""]
        lines += ["| file | tests | seconds |", "|---|--:|--:|"]
        lines += [f"| {file} | {number[file]} | {seconds:.1f} |" for file, seconds in files.most_common()]
        lines += ["", "| test | seconds |", "|---|--:|"]
        lines += [f"| `{test}` | {seconds:.1f} |" for test, seconds in self.seconds.most_common(30)]
        self.path.write_text("\n".join(lines) + "\n", "utf-8")


def pytest_collection_finish() -> None:
    """Thousands of collected tests live as long as the run: the garbage collector need not visit them again.

    Tracing makes many objects that live long, so it visits them rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiled functions of old trees go."""
    first = not hasattr(session.config, "workerinput")
    if first and COMPILED.is_dir() and sum(file.stat().st_size for file in COMPILED.iterdir()) > _MOST_COMPILED:
        shutil.rmtree(COMPILED)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--unoptimized"):  # XLA reads its flags when it compiles for the first time
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false" * EMITTERS_CAN_BE_LEFT
    config.option.loadscopereorder = False  # of xdist: the order is that of `_longest_first`
    if path := config.getoption("--durations-file"):
        config.pluginmanager.register(_Durations(config.invocation_params.dir / path))


def _longest_first(items: list[pytest.Item]) -> None:
    """Files go to the workers in this order: with short ones at the end, all workers end together."""
    rows = (line.split("|") for line in DURATIONS.read_text("utf-8").splitlines() if line.startswith("| tests/"))
    seconds = {row[1].strip(): float(row[3]) for row in rows}
    items.sort(key=lambda item: -seconds.get(item.nodeid.split("::")[0], 0.0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        _longest_first(items)
