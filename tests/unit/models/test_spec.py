from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rayapp.errors import ModelError
from rayapp.models.spec import ModelSpec, spec_from_config, spec_from_counts

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72, **TOKENS}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, **TOKENS}
OPT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 72,
    "max_position_embeddings": 48,
    "word_embed_proj_dim": 32,
    **TOKENS,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", {**GROUPED, "tie_word_embeddings": True}),
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", GROUPED),
    ("mistral", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    ("qwen2", GROUPED),
    ("qwen2", {**GROUPED, "tie_word_embeddings": True, "num_hidden_layers": 3}),
    ("qwen3", {**GROUPED, "head_dim": 16}),
    ("qwen3", {**GROUPED, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("phi3", GROUPED),
    ("gemma", {**GROUPED, "head_dim": 16}),
    ("gemma", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    ("gemma2", {**GROUPED, "head_dim": 16}),
    ("gemma3_text", {**GROUPED, "head_dim": 16, "tie_word_embeddings": False}),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 56, "tie_word_embeddings": False}),
    ("gpt_neox", SMALL),
    ("gpt_neox", {**SMALL, "attention_bias": False, "tie_word_embeddings": True}),
    ("opt", OPT),
    ("opt", {**OPT, "word_embed_proj_dim": 16}),
    ("opt", {**OPT, "do_layer_norm_before": False, "tie_word_embeddings": False}),
    ("opt", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("mixtral", {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("mixtral", {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 40}),
    (
        "qwen2_moe",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 40, "num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    ("qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 16}),
    ("qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 16, "num_hidden_layers": 4, "mlp_only_layers": [0, 2], "attention_bias": True}),
]
MOE_SHAPES = [shape for shape in SHAPES if shape[0] in {"mixtral", "qwen2_moe", "qwen3_moe"}]
IDS = [f"{model_type}-{number}" for number, (model_type, _) in enumerate(SHAPES)]


def meta_model(model_type: str, overrides: dict[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(model_type, **overrides)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def spec_of(model: nn.Module) -> ModelSpec:
    spec = spec_from_config(model.config.to_dict())  # type: ignore[union-attr, operator]
    assert spec is not None
    return spec


@pytest.mark.parametrize(("model_type", "overrides"), SHAPES, ids=IDS)
def test_parameters_are_those_of_the_model(model_type: str, overrides: dict[str, Any]) -> None:
    model = meta_model(model_type, overrides)
    assert spec_of(model).num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "overrides"), SHAPES, ids=IDS)
def test_flop_parameters_are_the_active_matrices(model_type: str, overrides: dict[str, Any]) -> None:
    """Counted from the modules: every matrix but looked-up tables, experts by the share of them that a token meets."""
    model = meta_model(model_type, overrides)
    spec = spec_of(model)
    head = model.get_output_embeddings().weight  # type: ignore[operator, union-attr]
    expected, idle = 0, 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding) and parameter is not head:
                continue
            share = spec.experts_per_token / spec.num_experts if type(module).__name__.endswith("Experts") else 1
            idle += round((1 - share) * parameter.numel())
            # a tied head is met twice, as the embedding and as the head
            if parameter.ndim >= 2 and not (isinstance(module, nn.Embedding) and parameter is head):
                expected += round(share * parameter.numel())
    assert spec.num_flop_parameters == expected
    assert spec.num_active_parameters == spec.num_parameters - idle


@pytest.mark.parametrize(("model_type", "overrides"), MOE_SHAPES)
def test_experts_are_in_the_named_layers(model_type: str, overrides: dict[str, Any]) -> None:
    model = meta_model(model_type, overrides)
    assert spec_of(model).num_moe_layers == sum(type(module).__name__.endswith("Experts") for module in model.modules())


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [("llama", GROUPED), ("llama", {**GROUPED, "tie_word_embeddings": True}), ("gpt2", GPT2), ("qwen3", {**GROUPED, "head_dim": 16})],
)
def test_flops_are_those_that_torch_counts(model_type: str, overrides: dict[str, Any]) -> None:
    batch_size, sequence_length = 2, 24
    config = AutoConfig.for_model(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    token_ids = torch.randint(config.vocab_size, (batch_size, sequence_length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=token_ids).logits.sum().backward()
    per_token = counter.get_total_flops() / (batch_size * sequence_length)
    assert spec_of(model).flops_per_token(sequence_length) == pytest.approx(per_token, rel=0.01)


def test_causal_flops_count_half_of_attention() -> None:
    spec = spec_of(meta_model("qwen3", {**GROUPED, "head_dim": 16}))
    full, causal, without = spec.flops_per_token(512), spec.flops_per_token_causal(512), 6 * spec.num_flop_parameters
    assert full - without == 2 * (causal - without) == 12 * 2 * (4 * 16) * 512


def test_llama_1b_by_hand() -> None:
    """Llama 3.2 1B: 1,235,814,400 parameters are published, 128256 x 2048 of them in the tied embedding."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    spec = spec_from_config(config.to_dict())
    assert spec is not None
    assert spec.num_parameters == 1_235_814_400
    assert spec.num_parameters - spec.num_flop_parameters == 33 * 2048  # the norms


def test_simple_transformer_is_an_encoder_between_two_tables() -> None:
    vocab_size, width, inner, num_layers = 160, 32, 72, 3
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(width, 4, inner, batch_first=True)
        parts = [
            nn.Embedding(vocab_size, width),
            nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False),
            nn.Linear(width, vocab_size, bias=False),
        ]
    sizes = [parameter.numel() for part in parts for parameter in part.parameters()]
    config = {"vocab_size": vocab_size, "hidden_size": width, "num_attention_heads": 4, "num_hidden_layers": num_layers}
    spec = spec_from_config({"model_type": "simple_transformer", **config, "intermediate_size": inner})
    assert spec is not None
    assert spec.num_parameters == sum(sizes)
    assert not spec.tied


def test_simple_transformer_by_default() -> None:
    spec = spec_from_config({"model_type": "simple_transformer", "intermediate_size": None})
    assert spec is not None
    width, inner, vocab_size, num_layers = 1024, 4096, 50_000, 24
    layer = 4 * width**2 + 4 * width + 2 * width * inner + inner + width + 4 * width
    assert spec.num_parameters == 2 * vocab_size * width + num_layers * layer


def test_unknown_architectures_have_no_closed_form() -> None:
    assert spec_from_config({"model_type": "mamba"}) is None
    assert spec_from_config({}) is None


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 48}),
        ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 48}),
        ("olmo2", SMALL),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 160, "max_seq_len": 48}),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 160}),
    ],
)
def test_any_architecture_can_be_described_by_its_counts(model_type: str, overrides: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **overrides).to_dict()
    spec = spec_from_counts(config, num_parameters=1000, num_active_parameters=1000, num_flop_parameters=900)
    assert (spec.hidden_size, spec.num_layers, spec.num_attention_heads, spec.head_dim, spec.vocab_size) == (32, 2, 4, 8, 160)
    assert spec.flops_per_token(10) == 6 * 900 + 12 * 2 * 32 * 10


def test_a_closed_form_and_counts_give_the_same_spec() -> None:
    config = AutoConfig.for_model("qwen3_moe", **GROUPED, **EXPERTS, head_dim=16).to_dict()
    spec = spec_from_config(config)
    assert spec is not None
    assert spec == spec_from_counts(
        config,
        num_parameters=spec.num_parameters,
        num_active_parameters=spec.num_active_parameters,
        num_flop_parameters=spec.num_flop_parameters,
    )


def test_a_missing_width_is_named() -> None:
    with pytest.raises(ModelError, match=r"lacks hidden_size or n_embd or d_model; set model\.config\.hidden_size"):
        spec_from_config({"model_type": "llama", "attention_bias": False, "mlp_bias": False})


def test_dropout_is_seen() -> None:
    spec = spec_of(meta_model("gpt2", GPT2))
    assert spec.dropout
    assert spec.hidden_dropout
    assert spec.attention_dropout
    assert not spec_of(meta_model("llama", SMALL)).dropout
