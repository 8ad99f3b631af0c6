"""Documents that share a row give the losses that each gives on its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.runs import FAMILIES, SEQUENCE, VOCAB, resolved

from rayapp.errors import ModelError
from rayapp.models.build import fresh_model
from rayapp.models.language_model import LanguageModel

BORDERS = [[0, 7, 11, 20, SEQUENCE], [0, 1, 2, 16, SEQUENCE]]
CPU = torch.device("cpu")


def model_of(family: str, attention: str = "sdpa", config: dict[str, Any] | None = None) -> LanguageModel:
    """A model with weights large enough that what attention sees matters, after an engine's probes."""
    run = resolved(family, model={"attention": attention, "config": config or FAMILIES[family]})
    model = fresh_model(run.transformers_config, run.file.model, seed=1, dtype=torch.float32, device=CPU, chunk_tokens=16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    model.resets_attention = True
    model.choose_loss(model, CPU)
    model.choose_mask(model, CPU)
    return model.eval()


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and the positions of the documents between ``BORDERS``."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQUENCE), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(end - start) for start, end in pairwise(borders)]) for borders in BORDERS])
    return tokens, labels, positions


@pytest.mark.parametrize(("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager"), ("opt", "eager")])
def test_losses_are_those_of_each_document_alone(family: str, attention: str) -> None:
    model = model_of(family, attention)
    tokens, labels, positions = rows()
    with torch.no_grad():
        for row, borders in enumerate(BORDERS):
            for start, end in pairwise(borders):
                only = torch.full_like(labels, -100)
                only[row, start:end] = labels[row, start:end]
                alone = model(tokens[row : row + 1, start:end], labels[row : row + 1, start:end])
                torch.testing.assert_close(model(tokens, only, positions), alone, rtol=1e-5, atol=1e-4)
        assert not torch.isclose(model(tokens, labels, positions), model(tokens, labels), rtol=1e-4), "the borders change nothing here"


def test_only_a_network_that_needs_it_is_given_the_mask() -> None:
    assert {family for family in FAMILIES if model_of(family).passes_mask} == {"opt"}


def test_a_network_that_carries_a_state_along_the_row_is_refused() -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    with pytest.raises(ModelError, match=r"data\.reset_attention=True is not something that recurrent_gemma can do: .*; set data\."):
        model_of("recurrent_gemma", "eager", config)
