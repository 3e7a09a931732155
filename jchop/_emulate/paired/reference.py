"""The reference of an emulated program: the same program in the carrier, or in float64 and rounded to another spec."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.value_facts import CARRIER_DTYPES, is_complex_value, is_number
from jchop._program.control import where_active
from jchop._program.shards import ShardAxes, bind_shards
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat
from jchop.formats._catalogue import binary64


class CarrierReference:
    """Every operation in the carrier."""

    #: Its name in a report.
    text = "carrier"
    #: Primitives whose result came from the carrier.
    narrow: frozenset[str] = frozenset()

    def as_reference(self, x: Any) -> Any:
        """An argument or a constant."""
        return x

    def bind(self, step: EmulatedStep, args: Sequence[Any], axes: ShardAxes = (), *, rounds: bool = True) -> list[Any]:
        """The results of an equation, of operands that have these axes of a mesh first."""
        del rounds
        return bind_shards(axes, step.eqn.primitive, step.eqn.params, args)

    def select(self, active: Any, new: Any, old: Any) -> Any:
        """The new values of the loops of a batch that still run, and the old values of others."""
        return where_active(active, new, old)


class Float64Reference(CarrierReference):
    """Every operation in float64, then rounded to a spec; its numbers are NumPy's.

    An equation without a float64 form, or with random draws, gives the carrier's result.

    Args:
        spec: the rounding of float64 results.
    """

    def __init__(self, spec: Spec) -> None:
        self.text, self.spec = str(spec), None if spec.format == binary64 else spec
        self.narrow = frozenset()

    def as_reference(self, x: Any) -> Any:
        """Numbers in float64; other values unchanged."""
        if not hasattr(x, "dtype") or not is_number(x):
            return np.asarray(x, np.float64) if isinstance(x, float) else x
        return np.asarray(x).astype(np.complex128 if is_complex_value(x) else np.float64)

    def bind(self, step: EmulatedStep, args: Sequence[Any], axes: ShardAxes = (), *, rounds: bool = True) -> list[Any]:
        """The results of an equation, of operands in any dtype."""
        bind_primitive = partial(bind_shards, axes, step.eqn.primitive)
        out = None
        args = [_in_program_dtype(x, v.aval) for x, v in zip(args, step.eqn.invars, strict=True)]
        if not any(is_number(v.aval) for v in (*step.eqn.invars, *step.eqn.outvars)):
            return bind_primitive(step.eqn.params, args)
        if not step.inner and step.kind not in ("draw", "own", "result") and step.draw is None:
            with jax.enable_x64(True):
                float64_args = [self.as_reference(x) for x in args]
                try:
                    out = [
                        self.as_reference(x) for x in bind_primitive(_params_in_float64(step.eqn.params), float64_args)
                    ]
                except Exception:  # any error of a primitive without a float64 form
                    self.narrow |= {step.name}
        elif step.inner:
            self.narrow |= {step.name}
        if out is None:
            carrier_args = [_in_carrier_dtype(x, v.aval) for x, v in zip(args, step.eqn.invars, strict=True)]
            return [self.as_reference(x) for x in bind_primitive(step.eqn.params, carrier_args)]
        return [self._round(x) for x in out] if rounds and step.kind not in _MOVE_KINDS else out

    def select(self, active: Any, new: Any, old: Any) -> Any:
        """The new values of the loops of a batch that still run, and the old values of others."""
        if not isinstance(new, np.ndarray):
            return where_active(active, new, old)
        active = np.asarray(active)
        return np.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)

    def _round(self, x: Any) -> Any:
        if self.spec is None or not isinstance(x, np.ndarray):
            return x
        return round_to_format(x, self.spec)


Reference = CarrierReference
#: The kinds of equations that only move values.
_MOVE_KINDS = ("structural", "extremum", "compared")


def _params_in_float64(params: dict[str, Any]) -> dict[str, Any]:
    return {name: _wide_dtype(value) for name, value in params.items()}


def _wide_dtype(value: Any) -> Any:
    if not isinstance(value, np.dtype) and not (isinstance(value, type) and issubclass(value, np.generic)):
        return value
    name = np.dtype(value).name
    if name in CARRIER_DTYPES:
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if name == "complex64" else value


def _in_program_dtype(x: Any, aval: Any) -> Any:
    """A Python number in its dtype in the program, which could differ under ``jax_enable_x64``."""
    return np.asarray(x, aval.dtype) if isinstance(x, bool | int | float | complex) else x


def _in_carrier_dtype(x: Any, aval: Any) -> Any:
    return jnp.asarray(x, aval.dtype) if isinstance(x, np.ndarray) and is_number(aval) else x


def make_reference(reference: Spec | ElementFormat | str | None) -> CarrierReference:
    """The reference of a report.

    Raises:
        ValueError: for a spec that draws.
    """
    if reference is None:
        return CarrierReference()
    spec = as_spec(reference, "reference")
    if spec.rounding.stochastic:
        raise ValueError(f"reference={str(spec)!r} rounds stochastically; a reference must be deterministic")
    return Float64Reference(spec)
