"""Fresh weights come block by block: what is whole at one time is a block, not the model."""

from __future__ import annotations

import torch
from support.runs import resolved

from rayapp.models.build import DTYPES, fresh_model


def test_no_more_than_a_block_is_whole_at_one_time() -> None:
    run = resolved(
        "llama", model={"config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4}}
    )
    sizes: list[int] = []
    whole_at_once: list[int] = []

    def shard(parameters: list[torch.nn.Parameter]) -> None:
        sizes.append(sum(p.numel() for p in parameters))
        whole_at_once.append(sizes[-1] + sum(p.numel() for p in seen))
        seen.extend(parameters)
        for parameter in parameters:
            parameter.data = torch.empty(0)

    seen: list[torch.nn.Parameter] = []
    model = fresh_model(
        run.transformers_config, run.file.model, seed=0, dtype=DTYPES["fp32"], device=torch.device("cpu"), chunk_tokens=16, partition=shard
    )
    assert sum(sizes) == run.num_parameters
    assert len(sizes) == 13  # twelve layers, and the embedding, the head and the last norm together
    assert max(whole_at_once) == max(sizes) < run.num_parameters / 2
    assert all(p.numel() == 0 for p in model.parameters())
