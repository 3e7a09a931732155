"""Low-precision training as Optax transformations: rounding in a chain, packed state, packed parameters.

Each transformation is a `GradientTransformationExtraArgs` that chains with Optax's own; the other functions read
states. Keys are part of states, and are split each step. Needs Optax (`pip install ".[optax]"`).
"""

from jchop._common.files import require_extra
from jchop._common.on_demand import on_demand

require_extra("jchop.optim", "optax", ("optax",))

from jchop.optim._chain import (  # noqa: E402
    apply_updates,
    average_params,
    averaged_params,
    compensate,
    dynamic_loss_scale,
    error_feedback,
    loss_scale,
    low_precision,
    round_params,
    round_updates,
    skip_nonfinite,
    sparse_params,
)
from jchop.optim._optimizers import adam8bit, adamw4bit, adamw8bit, adamw_fp8, adamw_split, lion8bit, muon8bit, sgd8bit  # noqa: E402
from jchop.optim._pack import StateReport, state_report  # noqa: E402
from jchop.optim._state import offload_state, quantize_state, state_shardings  # noqa: E402

__all__ = [
    "StateReport",
    "adam8bit",
    "adamw4bit",
    "adamw8bit",
    "adamw_fp8",
    "adamw_split",
    "apply_updates",
    "average_params",
    "averaged_params",
    "compensate",
    "dynamic_loss_scale",
    "error_feedback",
    "lion8bit",
    "loss_scale",
    "low_precision",
    "muon8bit",
    "offload_state",
    "quantize_state",
    "round_params",
    "round_updates",
    "sgd8bit",
    "skip_nonfinite",
    "sparse_params",
    "state_report",
    "state_shardings",
]

__getattr__, __dir__ = on_demand(
    "jchop.optim",
    elsewhere={
        "round_gradients": "round_updates(spec, key, scale=...) as the first link of the chain",
        "scale_gradients": "optax.scale(factor), or optax.scale_by_schedule(schedule)",
        "OptimLP": "low_precision(tx, weight=..., gradient=..., momentum=..., accumulator=...)",
        "AdamW8bit": "adamw8bit(learning_rate)",
        "Adam8bit": "adam8bit(learning_rate)",
        "AdamW4bit": "adamw4bit(learning_rate)",
        "Muon8bit": "muon8bit(learning_rate)",
        "FlashAdamW": "adamw_split(learning_rate)",
        "AdamWFp8": "adamw_fp8(learning_rate)",
    },
)
