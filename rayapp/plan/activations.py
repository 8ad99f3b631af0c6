"""Memory of what the forward pass leaves for the backward pass, on one rank.

Shapes: B micro-batch, S sequence, T = B x S tokens, D model width, A width of all query heads, G width of all key heads,
H heads, F feed-forward width, V vocabulary, E experts, K experts of one token, L layers; e bytes of one element.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, written anew
for the tensors that torch saves today: no S x S matrix with fused attention, gates, grouped queries, norms in fp32, experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayapp.config.schema import Precision
from rayapp.models.spec import ModelSpec
from rayapp.plan.states import ELEMENT_BYTES, FP32_BYTES

Device = Literal["cuda", "cpu"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"]

TOKEN_ID_BYTES = 8
ROUTING_BYTES = 48
"""Of one token at one of its experts: indices of its expert and its place, kept as int64 about five times, and a weight."""

SAVED_BY_ACTIVATION = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 3, "relu": 0}
"""Tensors of width F that an ungated activation saves besides its output, which the next product saves. ``gelu_new`` is
written in single operations; a fused function saves its input (1), and ReLU its output only."""

SOFTMAX_WITHOUT_FP32 = frozenset({"gpt2"})
"""Architectures whose eager attention takes the softmax in the precision of the pass. Others keep it in fp32 as well."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of one rank.

    Attributes:
        micro_batch_size: B.
        sequence_length: S.
        precision: of activations.
        device: where it runs; dropout keeps other masks on CPUs.
        attention: the implementation; ``eager`` keeps S x S matrices.
    """

    micro_batch_size: int
    sequence_length: int
    precision: Precision
    device: Device
    attention: Attention = "sdpa"

    @property
    def num_tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def mask_bytes(self) -> int:
        """Of one element's dropout mask: CUDA keeps booleans, CPUs the scaled mask."""
        return 1 if self.device == "cuda" else self.element_bytes


def saved_bytes(spec: ModelSpec, work: Pass, *, checkpointing: bool) -> int:
    """What the forward pass leaves. With activation checkpointing each layer keeps its input alone."""
    layer = work.element_bytes * spec.hidden_size if checkpointing else _layer_bytes(spec, work)
    return work.num_tokens * (spec.num_layers * layer + _ends_bytes(spec, work))


def backward_bytes(spec: ModelSpec, work: Pass, *, checkpointing: bool) -> int:
    """What the backward pass adds while it is in one layer: gradients of its residual stream and of its feed-forward's
    branches, and with activation checkpointing what the layer's second forward pass saves."""
    branches = 3 if spec.gated_mlp else 2
    gradients = work.element_bytes * (2 * spec.hidden_size + branches * _feed_forward_size(spec))
    return work.num_tokens * (gradients + (_layer_bytes(spec, work) if checkpointing else 0))


def minimum_activation_bytes(spec: ModelSpec, work: Pass, *, checkpointing: bool) -> int:
    """The least that any kernels leave: what matrix products and fused attention read again.

    Norms, activation functions and rotations are taken to be computed again by fused kernels, as compilers do it.
    """
    element, width = work.element_bytes, spec.hidden_size
    feed_forward = (2 if spec.gated_mlp else 1) * _feed_forward_size(spec)
    layer = element * (2 * width + 2 * spec.attention_size + 2 * spec.key_value_size + feed_forward)
    kept = spec.num_layers * width * element + layer if checkpointing else spec.num_layers * layer
    return work.num_tokens * kept


def loss_bytes(spec: ModelSpec, work: Pass, *, chunk_tokens: int) -> int:
    """What the loss holds: C x V fp32 logits twice (their exponentials, then their gradient), C positions at a time, the
    head's gradient in fp32 with one addend or its scaled copy, and the gradient of the last hidden states."""
    chunk = min(chunk_tokens, work.num_tokens)
    head, element = spec.vocab_size * spec.hidden_size, work.element_bytes
    forward = 2 * FP32_BYTES * chunk * spec.vocab_size + (FP32_BYTES + element) * head
    backward = (2 * FP32_BYTES + element) * head
    return max(forward, backward) + element * work.num_tokens * spec.hidden_size


def _layer_bytes(spec: ModelSpec, work: Pass) -> int:
    """Saved by one layer for one token, on average over dense layers and layers with experts."""
    feed_forward = _dense_bytes(spec, work) * (spec.num_layers - spec.num_moe_layers) + _experts_bytes(spec, work) * spec.num_moe_layers
    dropout = 2 * work.mask_bytes * spec.hidden_size if spec.hidden_dropout else 0
    norms = spec.norms_per_layer * _norm_bytes(spec.hidden_size, spec, work)
    inputs_of_products = 2 * work.element_bytes * spec.hidden_size
    return norms + inputs_of_products + _attention_bytes(spec, work) + dropout + feed_forward // spec.num_layers


def _norm_bytes(width: int, spec: ModelSpec, work: Pass) -> int:
    """An RMS norm saves its fp32 input and the scaled result before its weight; a layer norm its input, mean and deviation."""
    if spec.norm == "rms":
        return (FP32_BYTES + work.element_bytes) * width + FP32_BYTES
    return work.element_bytes * width + 2 * FP32_BYTES


def _attention_bytes(spec: ModelSpec, work: Pass) -> int:
    """Queries, keys, values, the output, and what the implementation keeps besides."""
    element, size = work.element_bytes, spec.attention_size
    head_norms = 0
    if spec.qk_norm:
        num_heads = spec.num_attention_heads + spec.num_key_value_heads
        head_norms = num_heads * _norm_bytes(spec.head_dim, spec, work)
    scores = work.sequence_length * spec.num_attention_heads
    if work.attention == "eager":
        softmax = element if element == FP32_BYTES or spec.model_type in SOFTMAX_WITHOUT_FP32 else FP32_BYTES + element
        dropped = work.mask_bytes + element if spec.attention_dropout else 0
        return head_norms + 4 * element * size + scores * (softmax + dropped)
    if not _is_fused(spec, work):
        mask = 1 if work.device == "cuda" else FP32_BYTES
        dropped = mask + FP32_BYTES if spec.attention_dropout else 0
        return head_norms + (3 * FP32_BYTES + element) * size + scores * (FP32_BYTES + dropped)
    log_sum = FP32_BYTES * spec.num_attention_heads
    return head_norms + 2 * element * (size + spec.key_value_size) + log_sum


def _is_fused(spec: ModelSpec, work: Pass) -> bool:
    """Whether torch's scaled_dot_product_attention has a kernel without the S x S matrix. Where it has none it works in fp32.

    CPUs have none with dropout; CUDA has none for grouped queries in fp32 (torch 2.11 and 2.13).
    """
    if work.attention != "sdpa":
        return True
    if work.device == "cpu":
        return not spec.attention_dropout
    return work.precision != "fp32" or spec.num_key_value_heads == spec.num_attention_heads


def _dense_bytes(spec: ModelSpec, work: Pass) -> int:
    return work.element_bytes * _saved_widths(spec) * spec.intermediate_size


def _experts_bytes(spec: ModelSpec, work: Pass) -> int:
    """Each of K experts keeps its copy of the token, its feed-forward and its output; the shared ones a feed-forward."""
    element, routed = work.element_bytes, spec.experts_per_token
    expert = element * (_saved_widths(spec) * spec.expert_intermediate_size + 2 * spec.hidden_size) + ROUTING_BYTES
    shared = element * _saved_widths(spec) * spec.shared_expert_intermediate_size
    return routed * expert + shared + FP32_BYTES * spec.num_experts


def _saved_widths(spec: ModelSpec) -> int:
    """Tensors of the feed-forward's width: with a gate its input, its output, the other branch and their product."""
    return 4 if spec.gated_mlp else 1 + SAVED_BY_ACTIVATION.get(spec.activation, 1)


def _feed_forward_size(spec: ModelSpec) -> int:
    """F that one token passes in one layer: on average over the layers, its experts together."""
    dense = spec.intermediate_size * (spec.num_layers - spec.num_moe_layers)
    sparse = (spec.experts_per_token * spec.expert_intermediate_size + spec.shared_expert_intermediate_size) * spec.num_moe_layers
    return (dense + sparse) // spec.num_layers


def _ends_bytes(spec: ModelSpec, work: Pass) -> int:
    """Before the first and after the last layer, for one token: its id, the last norm and the loss's input."""
    return TOKEN_ID_BYTES + _norm_bytes(spec.hidden_size, spec, work) + work.element_bytes * spec.hidden_size
