"""SimpleTransformer: embedding, post-norm encoder layers under a causal mask, linear output without bias.

It computes what ``nn.Embedding``, ``nn.TransformerEncoder`` (``norm_first=False``, ReLU) and ``nn.Linear(bias=False)``
compute. It has no positions: order is known from the causal mask alone. Its parameters carry the names of transformers'
OPT, which is the same network once OPT's position table is zero, so an export needs no remote code.

Shapes: B batch, S sequence, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayapp.models.loss import LossHead

MODEL_TYPE = "simple_transformer"
OPT_POSITION_OFFSET = 2  # OPT's table has two unused rows in front


@dataclass(frozen=True)
class SimpleTransformerConfig:
    """The size of a SimpleTransformer.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        num_attention_heads: heads of each layer; D is a multiple of it.
        num_hidden_layers: layers.
        intermediate_size: F; None: 4 D.
        dropout: after attention and feed-forward, in training.
        max_position_embeddings: the longest sequence that an export declares.
        initializer_range: standard deviation of fresh matrices.
    """

    vocab_size: int = 50_000
    hidden_size: int = 1024
    num_attention_heads: int = 16
    num_hidden_layers: int = 24
    intermediate_size: int | None = None
    dropout: float = 0.0
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number above 0")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}")

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, **asdict(self), "intermediate_size": self.feed_forward_size}

    def opt_config(self) -> dict[str, Any]:
        """The configuration under which transformers' OPT is this network."""
        return {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "word_embed_proj_dim": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "ffn_dim": self.feed_forward_size,
            "max_position_embeddings": self.max_position_embeddings,
            "activation_function": "relu",
            "do_layer_norm_before": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "dropout": self.dropout,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
            "init_std": self.initializer_range,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }

    def opt_positions(self, dtype: torch.dtype) -> tuple[str, Tensor]:
        """Name and content of the table that OPT adds: zeros."""
        rows = self.max_position_embeddings + OPT_POSITION_OFFSET
        return "model.decoder.embed_positions.weight", torch.zeros(rows, self.hidden_size, dtype=dtype)


class _Attention(nn.Module):
    def __init__(self, config: SimpleTransformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = hidden.shape

        def heads(projection: nn.Linear) -> Tensor:
            projected: Tensor = projection(hidden)
            return projected.view(batch, length, self.num_heads, -1).transpose(1, 2)

        mixed = nn.functional.scaled_dot_product_attention(
            heads(self.q_proj), heads(self.k_proj), heads(self.v_proj), attn_mask=mask, is_causal=mask is None
        )
        output: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class _Layer(nn.Module):
    def __init__(self, config: SimpleTransformerConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.feed_forward_size
        self.self_attn = _Attention(config)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.self_attn_layer_norm(hidden + self.dropout(self.self_attn(hidden, mask)))
        inner = self.fc2(nn.functional.relu(self.fc1(hidden)))
        output: Tensor = self.final_layer_norm(hidden + self.dropout(inner))
        return output


class _Decoder(nn.Module):
    def __init__(self, config: SimpleTransformerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))


class _Body(nn.Module):
    def __init__(self, config: SimpleTransformerConfig) -> None:
        super().__init__()
        self.decoder = _Decoder(config)
        self.activation_checkpointing = False

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Hidden states [B, S, D] of token ids [B, S]; with ``position_ids`` each document sees itself alone."""
        mask = None if position_ids is None else document_mask(position_ids)
        hidden: Tensor = self.decoder.embed_tokens(input_ids)
        for layer in self.decoder.layers:
            if self.activation_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        return hidden


class SimpleTransformer(nn.Module):
    """The built-in causal language model."""

    def __init__(self, config: SimpleTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = LossHead(nn.Parameter(torch.empty(config.vocab_size, config.hidden_size)))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of token ids [B, S]."""
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids))
        return logits

    @torch.no_grad()
    def init_module(self, module: nn.Module) -> None:
        """Fresh values for a module's own parameters: normal matrices, zero biases, norms of one."""
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding | LossHead):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def document_mask(position_ids: Tensor) -> Tensor:
    """[B, 1, S, S], True where position i may look at position j: not later, and in the same document.

    Args:
        position_ids: [B, S]; 0 begins a document.
    """
    document = (position_ids == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)
