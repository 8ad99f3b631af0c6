"""The oracle: one process, plain torch and transformers, none of rayapp's engines, losses or optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rayapp.models.build import fresh_model, transformers_config
from support.runs import global_batch, resolved


def train_plainly(
    network: Any, *, num_steps: int, rows: int, micro_rows: int, learning_rate: float, precision: str = "fp32", optim: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final fp32 weights of a plain loop.

    ``network`` is a transformers model in fp32. In bf16 the forward and backward pass run on a bf16 copy and AdamW works on
    fp32 weights.
    """
    low = precision != "fp32"
    worker = copy.deepcopy(network).to(torch.bfloat16) if low else network
    restore_buffers(worker, network)
    masters = {n: (nn.Parameter(p.detach().float()) if low else p) for n, p in worker.named_parameters()}
    decay = [p for p in masters.values() if p.dim() >= 2]
    rest = [p for p in masters.values() if p.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=learning_rate, betas=optim.betas, eps=optim.eps, foreach=False, fused=False,
    )  # fmt: skip
    worker.train()
    losses, norms = [], []
    for step in range(num_steps):
        inputs, labels = global_batch(step, rows)
        valid = int((labels >= 0).sum())
        total = 0.0
        for start in range(0, rows, micro_rows):
            logits = worker(input_ids=inputs[start : start + micro_rows], use_cache=False).logits.float()
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[start : start + micro_rows].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / valid).backward()
            total += float(loss.detach())
        for name, parameter in worker.named_parameters():
            if low:
                masters[name].grad = parameter.grad.float()
                parameter.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(list(masters.values()), optim.max_grad_norm or 1e9)))
        adam.step()
        adam.zero_grad()
        if low:
            with torch.no_grad():
                for name, parameter in worker.named_parameters():
                    parameter.copy_(masters[name])
        losses.append(total / valid)
    return losses, norms, {n: p.detach().clone() for n, p in masters.items()}


def restore_buffers(worker: nn.Module, network: nn.Module) -> None:
    """Rotary tables stay in fp32, as transformers loads them."""
    for name, buffer in network.named_buffers():
        worker.get_buffer(name).data = buffer.clone()


def plain_network(family: str) -> Any:
    """A transformers model with the weights that rayapp draws, its output layer transformers' own."""
    from transformers import AutoModelForCausalLM

    run = resolved(family)
    drawn = fresh_model(
        run.transformers_config, run.file.model, seed=run.file.train.seed, dtype=torch.float32, device=torch.device("cpu"), chunk_tokens=16
    )
    network = AutoModelForCausalLM.from_config(transformers_config(run.transformers_config), attn_implementation="sdpa")
    loading = network.load_state_dict(drawn.network.state_dict(), strict=False)
    assert not loading.unexpected_keys
    assert set(loading.missing_keys) <= {"model.decoder.embed_positions.weight"}
    if loading.missing_keys:  # SimpleTransformer is OPT without positions
        network.model.decoder.embed_positions.weight.data.zero_()
        network.model.decoder.embed_positions.weight.requires_grad_(False)
        freeze_positions(network)
    return network


def freeze_positions(network: Any) -> None:
    positions = network.model.decoder.embed_positions
    frozen = positions.weight.detach()
    del positions.weight
    positions.register_buffer("weight", frozen)
