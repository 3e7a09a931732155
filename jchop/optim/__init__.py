"""Low-precision training as Optax transformations: rounding in a chain, packed state, packed parameters.

Each transformation is a `GradientTransformationExtraArgs` that chains with Optax's own; the other functions read
states. Keys are part of states, and are split each step. Needs Optax (`pip install ".[optax]"`).
"""

from jchop._common.files import require_extra

require_extra("jchop.optim", "optax", ("optax",))

from jchop.optim._chain import (  # noqa: E402  # noqa: E402  # noqa: E402
    AverageState,
    CompensationState,
    ErrorFeedbackState,
    LossScaleState,
    LowPrecisionState,
    RoundState,
    SkipState,
    SparseState,
    apply_updates,
    average_params,
    averaged_params,
    compensate,
    dynamic_loss_scale,
    error_feedback,
    loss_scale,
    low_precision,
    round_gradients,
    round_params,
    round_updates,
    scale_gradients,
    skip_nonfinite,
    sparse_params,
)
from jchop.optim._optimizers import adam8bit, adamw4bit, adamw8bit, adamw_fp8, lion8bit, sgd8bit  # noqa: E402
from jchop.optim._pack import PackedRows, QuantizedState, StateReport, StateRow, state_report  # noqa: E402
from jchop.optim._state import offload_state, quantize_state, state_shardings  # noqa: E402

__all__ = [
    "AverageState",
    "CompensationState",
    "ErrorFeedbackState",
    "LossScaleState",
    "LowPrecisionState",
    "PackedRows",
    "QuantizedState",
    "RoundState",
    "SkipState",
    "SparseState",
    "StateReport",
    "StateRow",
    "adam8bit",
    "adamw4bit",
    "adamw8bit",
    "adamw_fp8",
    "apply_updates",
    "average_params",
    "averaged_params",
    "compensate",
    "dynamic_loss_scale",
    "error_feedback",
    "lion8bit",
    "loss_scale",
    "low_precision",
    "offload_state",
    "quantize_state",
    "round_gradients",
    "round_params",
    "round_updates",
    "scale_gradients",
    "sgd8bit",
    "skip_nonfinite",
    "sparse_params",
    "state_report",
    "state_shardings",
]
