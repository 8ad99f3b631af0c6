"""The planner's activations are the tensors that torch saves for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rayapp.models.spec import spec_from_config
from rayapp.models.transformer import SimpleTransformer, SimpleTransformerConfig
from rayapp.plan.activations import Pass, saved_bytes

BATCH, SEQUENCE, V = 2, 128, 160
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {"vocab_size": V, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 160, "num_hidden_layers": 6, **TOKENS}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": V, "n_embd": 64, "n_head": 8, "n_inner": 160, "n_layer": 6, "n_positions": SEQUENCE, **TOKENS}
OPT = {"vocab_size": V, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 160, "num_hidden_layers": 6, **TOKENS}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96}


def bytes_saved_by(body: nn.Module, **inputs: Any) -> int:
    """Bytes of all storages that the forward pass saves, without those of parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*body.parameters(), *body.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = body(**inputs)
    hidden = output if isinstance(output, Tensor) else output.last_hidden_state
    storages[hidden.untyped_storage().data_ptr()] = hidden.untyped_storage()  # the loss's input
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "overrides", "tolerance"),
    [
        ("llama", SMALL, 0.01),
        ("llama", GROUPED, 0.01),
        ("qwen3", {**GROUPED, "head_dim": 16}, 0.01),
        ("gemma", {**GROUPED, "head_dim": 8}, 0.1),  # its norms scale in fp32
        ("gpt2", {**GPT2, **NO_DROPOUT}, 0.01),
        ("gpt2", GPT2, 0.02),  # it drops out of its embedding too
        ("opt", {**OPT, "num_attention_heads": 8, "max_position_embeddings": SEQUENCE}, 0.01),
        ("gpt_neox", SMALL, 0.15),  # its queries, keys and values lie in one tensor, which their rotated copies do not free
        ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, 0.01),
        ("qwen2_moe", {**GROUPED, **EXPERTS}, 0.05),
    ],
)
def test_a_forward_pass_saves_what_is_planned(
    model_type: str, overrides: dict[str, Any], tolerance: float, attention: str, precision: str
) -> None:
    config = AutoConfig.for_model(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(DTYPES[precision]).train()
    saved = bytes_saved_by(model.base_model, input_ids=torch.randint(V, (BATCH, SEQUENCE)), use_cache=False)
    spec = spec_from_config(config.to_dict())
    assert spec is not None
    planned = saved_bytes(spec, Pass(BATCH, SEQUENCE, precision, "cpu", attention), checkpointing=False)  # type: ignore[arg-type]
    assert planned == pytest.approx(saved, rel=tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_built_in_model_saves_what_is_planned(precision: str, dropout: float) -> None:
    config = SimpleTransformerConfig(vocab_size=V, hidden_size=64, num_attention_heads=8, num_hidden_layers=6, dropout=dropout)
    model = SimpleTransformer(config)
    for module in model.modules():
        model.init_module(module)
    model.to(DTYPES[precision]).train()
    saved = bytes_saved_by(model.model, input_ids=torch.randint(V, (BATCH, SEQUENCE)))
    spec = spec_from_config(config.to_dict())
    assert spec is not None
    planned = saved_bytes(spec, Pass(BATCH, SEQUENCE, precision, "cpu"), checkpointing=False)  # type: ignore[arg-type]
    assert planned == pytest.approx(saved, rel=0.03)
