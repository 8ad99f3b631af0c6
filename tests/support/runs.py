"""Small resolved runs, models and batches for tests."""

from __future__ import annotations

from typing import Any

import torch

from rayapp.config.resolved import ResolvedData, ResolvedDevice, ResolvedLayout, ResolvedRun
from rayapp.config.schema import RunFile
from rayapp.engine import Batch
from rayapp.models.build import model_config, model_spec

VOCAB = 96
SEQUENCE = 24

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen2": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    "mixtral": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
    "simple_transformer": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}  # fmt: skip


def resolved(
    family: str = "llama",
    *,
    strategy: str = "zero-2",
    world_size: int = 2,
    micro_batch_size: int = 2,
    accumulation: int = 2,
    **sections: dict[str, Any],
) -> ResolvedRun:
    """A resolved run of a tiny model; ``sections`` override the run file's."""
    train = {"precision": "fp32", "num_steps": 20, "seed": 7, "loss_chunk_tokens": 16, **sections.pop("train", {})}
    optim = {"learning_rate": 3e-3, "weight_decay": 0.1, "eps": 1e-6, **sections.pop("optim", {})}
    model = {"kind": family, "config": FAMILIES.get(family, {}), **sections.pop("model", {})}
    file = RunFile.model_validate(
        {
            "name": "test",
            "model": model,
            "data": {"sequence_length": SEQUENCE, **sections.pop("data", {})},
            "batch": {
                "global_batch_size": micro_batch_size * accumulation * world_size,
                "micro_batch_size": micro_batch_size,
                "gradient_accumulation_steps": accumulation,
            },
            "train": train,
            "optim": optim,
            **sections,
        }
    )
    config = model_config(file.model, VOCAB, {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None})
    spec = model_spec(config)
    return ResolvedRun(
        run_id="r0",
        created_at=0.0,
        run_dir="/nowhere",
        file=file,
        strategy=strategy,  # type: ignore[arg-type]
        strategy_reason="a test",
        layout=ResolvedLayout(
            world_size=world_size, dp_size=world_size, pp_size=1, tp_size=1,
            micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation,
        ),
        device=ResolvedDevice(kind="cpu", name="cpu", memory_bytes=None, peak_flops=None, peak_flops_source="none"),
        data=ResolvedData(folder="/nowhere", fingerprint="0", vocab_size=VOCAB, num_train_rows=1, num_validation_rows=0),
        transformers_config=config,
        num_parameters=spec.num_parameters,
        flops_per_token=spec.flops_per_token(SEQUENCE),
        flops_per_token_causal=spec.flops_per_token_causal(SEQUENCE),
        storage_marker="",
    )  # fmt: skip


def global_batch(step: int, rows: int, *, ignore: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [rows, SEQUENCE] of a step; some labels are ignored, unevenly over the rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, VOCAB, (rows, 1), generator=generator)
    strides = torch.randint(1, 4, (rows, 1), generator=generator)
    tokens = (starts + strides * torch.arange(SEQUENCE + 1)) % VOCAB  # something that can be learnt
    labels = tokens[:, 1:].clone()
    if ignore:
        for row in range(rows):
            labels[row, : (row * 5 + step) % (SEQUENCE - 2)] = -100
    return tokens[:, :-1], labels


def rank_batches(step: int, rank: int, world_size: int, micro: int, accumulation: int) -> list[Batch]:
    """This rank's accumulation list of the step's global batch."""
    inputs, labels = global_batch(step, micro * accumulation * world_size)
    batches = []
    for index in range(accumulation):
        start = (index * world_size + rank) * micro
        batches.append(Batch(inputs[start : start + micro], labels[start : start + micro]))
    return batches
