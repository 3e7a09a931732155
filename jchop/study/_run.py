"""Running a study: check, train, round, evaluate."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import as_iterable, check, check_bool, check_choice, check_int
from jchop._common.files import require_extra
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.formats.rounding import Rounding, as_rounding
from jchop.study._result import Row, StudyResult

Array = jax.Array
#: A function of (stage, done, total, note), called during a study.
StudyProgress = Callable[[str, int, int, str], None]

#: The data sets, with the default number of epochs.
DATASETS = {"digits": 30, "breast-cancer": 60, "wine": 100}

#: Table 8 of arXiv 2504.07835 (q43 q52 e5m5 e5m7 e8m4 half bfloat16 tf32 fp32), OCP's formats, and scaled ones.
FORMATS = (
    "float4_e2m1fn", "mxfp4", "nvfp4", "nf4(group=64)", "int4(group=32,scale=bfloat16)", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e4m3fn", "q43", "q52", "e5m5", "e5m7", "e8m4", "half", "bfloat16", "tf32", "fp32",
)  # fmt: skip

#: The six modes of Table 8.
MODES = ("nearest_even", "up", "down", "toward_zero", "stochastic", "stochastic_equal")

_PACKAGES = ("flax", "optax", "sklearn")
_VERSIONS = ("jchop", "jax", "jaxlib", "numpy", "flax", "optax", "scikit-learn", "matplotlib")


def run(
    dataset: str = "digits",
    *,
    formats: Iterable[str | ElementFormat | ScaledFormat | Spec] | ElementFormat | ScaledFormat | Spec = FORMATS,
    modes: Iterable[str | Rounding] | Rounding = MODES,
    seeds: int = 10,
    epochs: int | None = None,
    activations: bool = False,
    seed: int = 0,
    progress: StudyProgress | None = None,
) -> StudyResult:
    """Trains a classifier, then evaluates it rounded to each format in each rounding mode.

    The network is trained once, in binary32. Its parameters are rounded as one vector, and the test set is evaluated in
    binary32 arithmetic: the study is about storage in a format, not about arithmetic. In that vector the weights of one
    output are consecutive, so the groups of a scaled format lie along the inputs of a layer. With `activations` the
    inputs and each layer's outputs are rounded too. All formats and modes use the same rounding keys, so their draws
    are comparable.

    Args:
        dataset: ``"digits"`` (a convolutional network), ``"breast-cancer"`` or ``"wine"`` (a multilayer perceptron).
        formats: formats, Specs or texts, or one of them. Overflow rule, flush and random bits of a Spec are kept;
            `modes` define the rounding. A scaled format has groups of one length, or one scale for all. Results come in
            the order of bits; names of one format share a row.
        modes: rounding modes or their texts, or one of them.
        seeds: number of rounding seeds over which a stochastic mode is averaged; a deterministic mode is evaluated
            once.
        epochs: passes over the training data; default by data set, see `jchop.study.DATASETS`.
        activations: whether to round the activations, too.
        seed: seed of the split of the data, the initial parameters, the order of training and the rounding keys.
        progress: function of (stage, done, total, note), called during the study.

    Raises:
        ModuleNotFoundError: if Flax, Optax or scikit-learn is missing.
        TypeError, ValueError: for an argument out of range, a format that binary32 cannot hold, a spec with a rounding,
            or a scaled format with channels or several axes.

    Example:
        >>> from jchop import study
        >>> result = study.run("wine", formats=["fp32", "e2m1fn"], modes=["down"], epochs=5)
        >>> result.cell("fp32", "down").accuracy == result.accuracy
        True
    """
    check_choice("dataset", dataset, tuple(DATASETS))
    check_int("seeds", seeds, 1)
    check_int("seed", seed, 0, 2**31 - 1)
    check_bool("activations", activations)
    epochs = DATASETS[dataset] if epochs is None else check_int("epochs", epochs, 1)
    specs = study_specs(formats, modes)
    _trace_roundings(specs)
    require_extra("the study", "study", _PACKAGES)
    from jchop.study._network import Evaluator, load_dataset, make_model, train

    report = progress or (lambda stage, count, total, note: None)
    start = time.perf_counter()
    data = load_dataset(dataset, seed)
    graph, params = make_model(data, seed)
    losses: list[float] = []

    def record_loss(epoch: int, loss: float) -> None:
        losses.append(loss)
        report("training", epoch, epochs, f"loss {loss:.4f}")

    params = train(graph, params, data, epochs=epochs, seed=seed, report=record_loss)
    evaluator = Evaluator(graph, params, data)
    accuracy, entropy = evaluator.evaluate(evaluator.flat)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), seeds)
    rows = []
    for index, (names, spec) in enumerate(specs, start=1):
        rows.append(_study_row(names, spec, evaluator.cell(spec, keys, activations)))
        report("rounding", index, len(specs), f"{names[0]} {spec.rounding.value}")
    settings = {
        "dataset": dataset,
        "formats": list(dict.fromkeys(name for names, _ in specs for name in names)),
        "modes": list(dict.fromkeys(spec.rounding.value for _, spec in specs)),
        "seeds": seeds,
        "epochs": epochs,
        "activations": activations,
        "seed": seed,
    }
    return StudyResult(
        rows=tuple(rows),
        settings=settings,
        accuracy=accuracy,
        cross_entropy=entropy,
        losses=tuple(losses),
        parameters=int(evaluator.flat.size),
        train_samples=len(data.train_y),
        test_samples=len(data.test_y),
        seconds=time.perf_counter() - start,
        versions=package_versions(),
    )


def study_specs(formats: Any, modes: Any) -> list[tuple[tuple[str, ...], Spec]]:
    """(names, Spec) of every cell, formats outermost and narrow ones first, names of one format together."""
    roundings = list(dict.fromkeys(as_rounding(mode) for mode in as_iterable(modes)))
    names: dict[Spec, list[str]] = {}
    for value in as_iterable(formats):
        spec = as_spec(value, "formats", scaled=True)
        if spec.rounding is not Rounding.NEAREST_EVEN and not spec.random_bits:
            raise ValueError(f"formats: {value} names a rounding; use modes= (--modes) instead")
        if spec.scaled is not None and (spec.scaled.channel is not None or isinstance(spec.scaled.group, tuple)):
            raise ValueError(
                f"formats: {value} has channels or tiles, but the parameters are rounded as one vector; allowed are "
                "scaled formats with group=N, or with one scale for all"
            )
        labels = names.setdefault(spec, [])
        label = value if isinstance(value, str) else str(value)
        if label not in labels:
            labels.append(label)
    check(names and roundings, "formats and modes must each name at least one")
    by_bits = sorted(names.items(), key=lambda item: _bits_per_number(item[0]))
    return [(tuple(format_names), _with_rounding(spec, mode)) for spec, format_names in by_bits for mode in roundings]


def _trace_roundings(specs: Iterable[tuple[tuple[str, ...], Spec]]) -> None:
    """Traces the rounding of binary32 numbers under each spec, so that errors are raised before training."""
    scalar, key = jax.ShapeDtypeStruct((1,), jnp.float32), jax.random.key(0)
    for _, spec in specs:
        jax.eval_shape(lambda x, spec=spec: round_to_format(x, spec, key if spec.rounding.stochastic else None), scalar)


def _bits_per_number(spec: Spec) -> float:
    """Bits for each number, including its share of the scales."""
    return spec.format.bits if spec.scaled is None else spec.scaled.bits_per_element()


def _with_rounding(spec: Spec, mode: Rounding) -> Spec:
    takes_bits = mode.stochastic and mode is not Rounding.STOCHASTIC_EQUAL
    return dataclasses.replace(spec, rounding=mode, random_bits=spec.random_bits if takes_bits else None)


def _study_row(names: tuple[str, ...], spec: Spec, runs: np.ndarray) -> Row:
    with np.errstate(invalid="ignore"):
        # Relative to the first run, so that equal runs have a deviation of exactly 0.
        (accuracy, entropy), (accuracy_std, entropy_std) = runs.mean(axis=1), (runs - runs[:, :1]).std(axis=1)
    return Row(
        format=names[0],
        rounding=spec.rounding.value,
        spec=str(spec),
        bits=_bits_per_number(spec),
        runs=runs.shape[1],
        accuracy=float(accuracy),
        accuracy_std=float(accuracy_std),
        cross_entropy=float(entropy),
        cross_entropy_std=float(entropy_std),
        also=names[1:],
    )


def package_versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
