"""Engines that start from a model folder start from exactly its weights, however they are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pretrained_work import plain_loss, start_from_folder
from support.ranks import run_ranks
from support.runs import FAMILIES, VOCAB
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig


@pytest.mark.parametrize("config_class", [LlamaConfig, MixtralConfig])
def test_starts_from_the_folders_weights(tmp_path: Path, config_class: type) -> None:
    torch.manual_seed(11)
    config = config_class(vocab_size=VOCAB, **FAMILIES[config_class.model_type])
    network = AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = dict(network.named_parameters())
    for results in run_ranks(start_from_folder, 2, str(tmp_path), ["ddp", "zero-2", "zero-3"]):
        for strategy, (loss, weights) in results.items():
            assert loss == pytest.approx(plain_loss(network), abs=1e-5), strategy
            assert set(weights) == set(expected)
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name].detach()), (strategy, name)
