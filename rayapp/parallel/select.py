"""From a resolved run to the engine that trains it."""

from __future__ import annotations

import gc
import os

import torch

from rayapp.config.resolved import ResolvedRun
from rayapp.engine import TrainEngine
from rayapp.models.build import DTYPES, enable_activation_checkpointing, fresh_model, pretrained_model
from rayapp.models.cpu_products import speed_up_bf16_products
from rayapp.models.language_model import LanguageModel

ZERO_STAGES = {"zero-1": 1, "zero-2": 2, "zero-3": 3}
AVAILABLE = ("ddp", *ZERO_STAGES)


def build_engine(run: ResolvedRun, device: torch.device) -> TrainEngine:
    """Build the model and its engine on this rank. The process group is up, and every rank calls it.

    Raises:
        ModelError: the weights cannot be loaded.
    """
    if device.type == "cpu" and run.file.train.precision == "bf16":
        speed_up_bf16_products()
    if run.strategy == "ddp":
        return _ddp(run, device)
    return _zero(run, device, ZERO_STAGES[run.strategy])


def _ddp(run: ResolvedRun, device: torch.device) -> TrainEngine:
    from rayapp.parallel.native.ddp import DdpEngine

    model = _whole_model(run, device)
    file = run.file
    return DdpEngine(model, optim=file.optim, precision=file.train.precision, device=device, bucket_bytes=file.parallel.bucket_bytes)


def _zero(run: ResolvedRun, device: torch.device, stage: int) -> TrainEngine:
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read when DeepSpeed is imported
    from rayapp.parallel.deepspeed.ds_config import ds_config
    from rayapp.parallel.deepspeed.zero import ZeroEngine

    config = ds_config(
        stage=stage,
        micro_batch_size=run.layout.micro_batch_size,
        gradient_accumulation_steps=run.layout.gradient_accumulation_steps,
        precision=run.file.train.precision,
        device_type=device.type,
        optim=run.file.optim,
        parallel=run.file.parallel,
        num_parameters=run.num_parameters,
    )
    model = _sharded_model(run, device, config) if stage == 3 else _whole_model(run, device)
    return ZeroEngine(model, config=config, optim=run.file.optim, device=device)


def _whole_model(run: ResolvedRun, device: torch.device) -> LanguageModel:
    section, train = run.file.model, run.file.train
    dtype = DTYPES[train.precision]
    if section.path is not None and not section.random_weights:
        model = pretrained_model(run.transformers_config, section, dtype=dtype, device=device, chunk_tokens=train.loss_chunk_tokens)
    else:
        model = fresh_model(
            run.transformers_config, section, seed=train.seed, dtype=dtype, device=device, chunk_tokens=train.loss_chunk_tokens
        )
    return _finished(model, run)


def _sharded_model(run: ResolvedRun, device: torch.device, config: dict[str, object]) -> LanguageModel:
    from transformers.integrations import HfDeepSpeedConfig

    from rayapp.parallel.deepspeed.zero import join_process_group, shard_parameters

    section, train = run.file.model, run.file.train
    dtype = DTYPES[train.precision]
    join_process_group()
    if section.path is None or section.random_weights:
        model = fresh_model(
            run.transformers_config,
            section,
            seed=train.seed,
            dtype=dtype,
            device=device,
            chunk_tokens=train.loss_chunk_tokens,
            partition=lambda parameters: shard_parameters(parameters, config),
        )
    else:
        sharding = HfDeepSpeedConfig(config)  # while it lives, transformers loads weights straight into shards
        model = pretrained_model(run.transformers_config, section, dtype=dtype, device=device, chunk_tokens=train.loss_chunk_tokens)
        del sharding
        gc.collect()
    return _finished(model, run)


def _finished(model: LanguageModel, run: ResolvedRun) -> LanguageModel:
    model.resets_attention = run.file.data.reset_attention
    if run.file.train.activation_checkpointing:
        enable_activation_checkpointing(model.network)
    return model
