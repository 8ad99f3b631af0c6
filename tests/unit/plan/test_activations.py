from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rayapp.models.spec import ModelSpec, spec_from_config
from rayapp.plan.activations import Pass, backward_bytes, loss_bytes, minimum_activation_bytes, saved_bytes

V, D, F, L, HEADS, KV_HEADS, HEAD_DIM = 1000, 64, 160, 3, 8, 2, 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": V,
    "n_embd": D,
    "n_inner": F,
    "n_layer": L,
    "n_head": HEADS,
    "n_positions": 256,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    spec = spec_from_config(config)
    assert spec is not None
    return spec


def test_a_llama_layer_in_bf16_tensor_by_tensor() -> None:
    tokens = 2 * 128
    norm = 4 * D + 2 * D + 4  # fp32 input, scaled bf16 result, reciprocal root
    attention = 2 * HEADS * HEAD_DIM * 2 + 2 * KV_HEADS * HEAD_DIM * 2 + 4 * HEADS  # queries, output; keys, values; log-sum
    layer = 2 * norm + 2 * (2 * D) + attention + 4 * (2 * F)
    ends = 8 + norm + 2 * D
    work = Pass(2, 128, "bf16", "cuda")
    assert saved_bytes(spec_of(LLAMA), work, checkpointing=False) == tokens * (L * layer + ends)
    assert saved_bytes(spec_of(LLAMA), work, checkpointing=True) == tokens * (L * 2 * D + ends)
    gradients = 2 * (2 * D + 3 * F)
    assert backward_bytes(spec_of(LLAMA), work, checkpointing=False) == tokens * gradients
    assert backward_bytes(spec_of(LLAMA), work, checkpointing=True) == tokens * (gradients + layer)


def test_eager_attention_keeps_scores_and_fused_attention_does_not() -> None:
    def per_token(attention: str, sequence_length: int) -> float:
        work = Pass(1, sequence_length, "bf16", "cuda", attention)  # type: ignore[arg-type]
        return saved_bytes(spec_of(LLAMA), work, checkpointing=False) / sequence_length

    assert per_token("sdpa", 2048) == per_token("sdpa", 128)
    assert per_token("eager", 2048) - per_token("eager", 128) == L * HEADS * (2048 - 128) * (4 + 2)


def test_where_torch_has_no_fused_kernel_scores_are_kept() -> None:
    def grows(config: dict[str, Any], precision: str, device: str) -> bool:
        short, long = (
            saved_bytes(spec_of(config), Pass(1, size, precision, device), checkpointing=False) / size  # type: ignore[arg-type]
            for size in (128, 256)
        )
        return long > short

    dropout = {**GPT2, "attn_pdrop": 0.1}
    assert grows(dropout, "bf16", "cpu")
    assert not grows(dropout, "bf16", "cuda")
    assert not grows(GPT2, "fp32", "cpu")
    assert grows(LLAMA, "fp32", "cuda")  # grouped queries
    assert not grows({**LLAMA, "num_key_value_heads": HEADS}, "fp32", "cuda")


def test_dropout_masks_of_cuda_are_bytes() -> None:
    work = Pass(1, 100, "bf16", "cuda")
    without, with_dropout = (saved_bytes(spec_of({**GPT2, "resid_pdrop": p}), work, checkpointing=False) for p in (0.0, 0.1))
    assert with_dropout - without == 100 * D * 2 * L


def test_experts_count_as_often_as_a_token_meets_them() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    work = Pass(1, 100, "bf16", "cuda")
    one, two = (saved_bytes(spec_of({**config, "num_experts_per_tok": k}), work, checkpointing=False) for k in (1, 2))
    assert two - one == 100 * L * (2 * (4 * F + 2 * D) + 48)


def test_the_loss_holds_one_chunk_of_logits_and_the_heads_gradient() -> None:
    spec, work = spec_of(LLAMA), Pass(4, 512, "bf16", "cuda")
    assert loss_bytes(spec, work, chunk_tokens=256) == 2 * 4 * 256 * V + (4 + 2) * V * D + 2 * 2048 * D
    assert loss_bytes(spec, work, chunk_tokens=1) == (4 + 4 + 2) * V * D + 2 * 2048 * D
    assert loss_bytes(spec, work, chunk_tokens=10**9) == loss_bytes(spec, work, chunk_tokens=2048)


@given(
    micro_batch_size=st.integers(1, 512),
    sequence_length=st.integers(1, 100_000),
    precision=st.sampled_from(["fp32", "bf16"]),
    device=st.sampled_from(["cuda", "cpu"]),
    attention=st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
    config=st.sampled_from([LLAMA, GPT2, {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}]),
    checkpointing=st.booleans(),
)
def test_order(
    micro_batch_size: int,
    sequence_length: int,
    precision: str,
    device: str,
    attention: str,
    config: dict[str, Any],
    checkpointing: bool,
) -> None:
    spec = spec_of(config)
    work = Pass(micro_batch_size, sequence_length, precision, device, attention)  # type: ignore[arg-type]
    saved = saved_bytes(spec, work, checkpointing=checkpointing)
    assert minimum_activation_bytes(spec, work, checkpointing=checkpointing) <= saved + backward_bytes(
        spec, work, checkpointing=checkpointing
    )
    assert saved_bytes(spec, work, checkpointing=True) < saved_bytes(spec, work, checkpointing=False)
    assert saved_bytes(spec, replace(work, micro_batch_size=2 * micro_batch_size), checkpointing=checkpointing) == 2 * saved
    assert saved_bytes(spec, replace(work, sequence_length=2 * sequence_length), checkpointing=checkpointing) >= 2 * saved
