"""DeepSpeed's configuration, written from rayapp's. DeepSpeed ignores keys that it does not know, so they are spelt here only."""

from __future__ import annotations

from typing import Any

from rayapp.config.schema import OptimSection, ParallelSection, Precision
from rayapp.parallel.adam import LOSS_SCALE_WINDOW

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
NEVER = 2**31 - 1


def ds_config(
    *,
    stage: int,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    precision: Precision,
    device_type: str,
    optim: OptimSection,
    parallel: ParallelSection,
    num_parameters: int,
) -> dict[str, Any]:
    """The whole configuration of one ZeRO engine.

    ``train_batch_size`` is left out on purpose: DeepSpeed checks it before it knows the world size.
    """
    on_gpu = device_type != "cpu"
    overlap = on_gpu if parallel.overlap_communication is None else parallel.overlap_communication
    elements = max(1, min(parallel.bucket_bytes // ELEMENT_BYTES[precision], num_parameters))  # buckets are allocated whole
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": overlap,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    if parallel.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": parallel.offload_optimizer, "pin_memory": on_gpu}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": elements // 2, "stage3_gather_16bit_weights_on_model_save": False}
        if parallel.offload_weights != "none":
            zero["offload_param"] = {"device": parallel.offload_weights, "pin_memory": on_gpu}
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": optim.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        **_precision(precision),
    }


def _precision(precision: Precision) -> dict[str, Any]:
    if precision == "bf16":
        return {"bf16": {"enabled": True, "check_grad_overflow": True}}
    if precision == "fp16":
        return {
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": LOSS_SCALE_WINDOW, "hysteresis": 1}
        }
    return {}
