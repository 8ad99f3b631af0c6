"""Parameters and FLOPs of a causal language model, from its configuration alone. No torch.

Shapes: D model width, F feed-forward width, L layers, S sequence, V vocabulary, E experts, K experts of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rayapp.errors import ModelError, Problem

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelSpec:
    """What planning needs to know about a model.

    Attributes:
        model_type: transformers' name of the architecture, or ``simple_transformer``.
        num_parameters: weights; tied ones count once.
        num_active_parameters: weights that one token uses: all but the experts that it is not sent to.
        num_flop_parameters: N, the entries of matrices that one token is multiplied with. An embedding counts as the
            head that it is tied to; a table that is only looked up, biases and norms do not count.
        num_layers: L.
        hidden_size: D.
        num_attention_heads: heads of the queries.
        num_key_value_heads: heads of the keys and values.
        head_dim: width of one head.
        intermediate_size: F of the dense layers.
        gated_mlp: two projections into F, multiplied with each other.
        activation: transformers' name of the activation function.
        vocab_size: V.
        max_positions: the longest sequence; None where nothing bounds it.
        tied: the head is the embedding.
        norm: the kind of norm.
        norms_per_layer: norms of width D in one layer.
        qk_norm: queries and keys are normalised.
        num_moe_layers: layers with experts.
        num_experts: E of those; 0 in a dense model.
        experts_per_token: K.
        expert_intermediate_size: F of one expert.
        shared_expert_intermediate_size: F of the experts that every token passes, together.
        hidden_dropout: dropout on what attention and feed-forward add.
        attention_dropout: dropout on attention weights.
    """

    model_type: str
    num_parameters: int
    num_active_parameters: int
    num_flop_parameters: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    gated_mlp: bool
    activation: str
    vocab_size: int
    max_positions: int | None
    tied: bool
    norm: Literal["rms", "layer"]
    norms_per_layer: int
    qk_norm: bool
    num_moe_layers: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_expert_intermediate_size: int
    hidden_dropout: bool
    attention_dropout: bool

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def dropout(self) -> bool:
        return self.hidden_dropout or self.attention_dropout

    @property
    def num_embedding_parameters(self) -> int:
        """Entries of the embedding, and of the head where it is not the same."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def num_layer_parameters(self) -> int:
        """Weights of one layer, on average."""
        return max(0, self.num_parameters - self.num_embedding_parameters) // self.num_layers

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of the forward and backward pass for one token: 6 N + 12 L D S, D the width of all heads.

        A matrix entry costs one multiplication and one addition forward and twice that backward; attention's two
        products with S positions cost 4 D S forward and twice that backward, in each layer.

        Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1; Chowdhery et al. 2022, "PaLM",
        appendix B.
        """
        return 6.0 * self.num_flop_parameters + 12.0 * self.num_layers * self.attention_size * sequence_length

    def flops_per_token_causal(self, sequence_length: int) -> float:
        """The same with only those half of attention's products that a causal mask leaves: 6 N + 6 L D S."""
        return 6.0 * self.num_flop_parameters + 6.0 * self.num_layers * self.attention_size * sequence_length


def spec_from_config(config: Config) -> ModelSpec | None:
    """The spec of a model whose parameters are known in closed form.

    Args:
        config: the complete configuration, as ``PretrainedConfig.to_dict()`` gives it, or the built-in model's.

    Returns:
        None for a model type without a closed form here: count its parameters and use ``spec_from_counts``.

    Raises:
        ModelError: the configuration lacks a key.
    """
    if config.get("model_type") == "simple_transformer":
        config = {**SIMPLE_TRANSFORMER, **{key: value for key, value in config.items() if value is not None}}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or config.get("add_cross_attention"):
        return None
    return family.spec(config)


def spec_from_counts(config: Config, *, num_parameters: int, num_active_parameters: int, num_flop_parameters: int) -> ModelSpec:
    """The spec of any causal language model of transformers, from exact counts and its configuration.

    The configuration is read under the names that transformers' architectures use for the same thing. What it does not
    say is taken from the usual: F = 4 D, as many key heads as query heads, a gate where the activation is SiLU.

    Raises:
        ModelError: the configuration lacks the width, the layers, the heads or the vocabulary.
    """
    config = {**config, **(config.get("text_config") or {})}
    hidden_size = int(_required(config, "hidden_size", "n_embd", "d_model"))
    num_heads = int(_required(config, "num_attention_heads", "n_head", "n_heads", "num_heads"))
    num_layers = int(_required(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    activation = str(_first(config, "hidden_act", "hidden_activation", "activation_function", default="gelu"))
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    intermediate_size = int(_first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", default=4 * hidden_size))
    num_experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0))
    expert_size = int(_first(config, "moe_intermediate_size", default=intermediate_size))
    max_positions = _first(config, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", default=None)
    return ModelSpec(
        model_type=model_type,
        num_parameters=num_parameters,
        num_active_parameters=num_active_parameters,
        num_flop_parameters=num_flop_parameters,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=int(
            _first(config, "num_key_value_heads", "num_kv_heads", default=1 if config.get("multi_query") else num_heads)
        ),
        head_dim=int(_first(config, "head_dim", default=hidden_size // num_heads)),
        intermediate_size=intermediate_size,
        gated_mlp=family.gated if family else activation in GATED_ACTIVATIONS,
        activation=activation,
        vocab_size=int(_required(config, "vocab_size")),
        max_positions=None if max_positions is None else int(max_positions),
        tied=bool(config.get("tie_word_embeddings", True)),
        norm="rms" if "rms_norm_eps" in config else "layer",
        norms_per_layer=family.norms_per_layer if family else 2,
        qk_norm=family.qk_norm if family else False,
        num_moe_layers=_num_moe_layers(config, num_layers) if num_experts else 0,
        num_experts=num_experts,
        experts_per_token=int(_first(config, "num_experts_per_tok", "moe_top_k", default=1)) if num_experts else 0,
        expert_intermediate_size=expert_size if num_experts else 0,
        shared_expert_intermediate_size=_shared_expert_size(config, expert_size) if num_experts else 0,
        hidden_dropout=any(config.get(key) for key in HIDDEN_DROPOUT_KEYS),
        attention_dropout=any(config.get(key) for key in ATTENTION_DROPOUT_KEYS),
    )


SIMPLE_TRANSFORMER: Config = {
    "vocab_size": 50_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "hidden_act": "relu",
    "tie_word_embeddings": False,
}
"""What a ``simple_transformer`` is where its configuration does not say otherwise."""

GATED_ACTIVATIONS = ("silu", "swish")
HIDDEN_DROPOUT_KEYS = ("hidden_dropout", "resid_pdrop", "dropout", "hidden_dropout_prob", "resid_dropout")
ATTENTION_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def _first(config: Config, *keys: str, default: Any) -> Any:
    """The value of the first key that the configuration sets."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _required(config: Config, *keys: str) -> Any:
    value = _first(config, *keys, default=None)
    if value is None:
        raise ModelError(
            Problem(f"model.config of model_type={config.get('model_type')!r}", f"lacks {' or '.join(keys)}", f"set model.config.{keys[0]}")
        )
    return value


def _num_moe_layers(config: Config, num_layers: int) -> int:
    """Layers with experts: all but the dense ones that the configuration names."""
    step = int(_first(config, "decoder_sparse_step", "moe_layer_freq", default=1))
    dense = set(config.get("mlp_only_layers") or ()) | set(range(int(_first(config, "first_k_dense_replace", default=0))))
    return sum(1 for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _shared_expert_size(config: Config, expert_size: int) -> int:
    return int(_first(config, "shared_expert_intermediate_size", default=int(_first(config, "n_shared_experts", default=0)) * expert_size))


@dataclass(frozen=True)
class _Count:
    """Weights of a part of a model: entries of matrices that tokens are multiplied with, and all others."""

    matrices: int = 0
    others: int = 0

    def __add__(self, other: _Count) -> _Count:
        return _Count(self.matrices + other.matrices, self.others + other.others)

    def __mul__(self, times: int) -> _Count:
        return _Count(self.matrices * times, self.others * times)

    @property
    def total(self) -> int:
        return self.matrices + self.others


def _linear(size_in: int, size_out: int, bias: bool) -> _Count:
    return _Count(size_in * size_out, size_out if bias else 0)


def _always(_: Config) -> bool:
    return True


def _never(_: Config) -> bool:
    return False


def _key(name: str) -> Callable[[Config], bool]:
    return lambda config: bool(_required(config, name))


@dataclass(frozen=True)
class _Family:
    """The closed form of an architecture: which of its parts exist.

    Attributes:
        gated: the feed-forward has a gate.
        qkv_bias: the projections to queries, keys and values have biases.
        output_bias: attention's output projection has one.
        mlp_bias: the feed-forward's projections have them.
        norm_bias: norms have a bias besides their weight.
        has_norm_weights: norms have weights at all.
        norms_per_layer: norms of width D in one layer.
        final_norm: a norm follows the last layer.
        qk_norm: queries and keys are normalised head by head.
        extra_positions: rows that the learned position table has more than positions; None without a table.
        shared_expert_gate: the shared expert is weighted by a gate.
    """

    gated: bool = True
    qkv_bias: Callable[[Config], bool] = _never
    output_bias: Callable[[Config], bool] = _never
    mlp_bias: Callable[[Config], bool] = _never
    norm_bias: bool = False
    has_norm_weights: Callable[[Config], bool] = _always
    norms_per_layer: int = 2
    final_norm: Callable[[Config], bool] = _always
    qk_norm: bool = False
    extra_positions: int | None = None
    shared_expert_gate: bool = False

    def spec(self, config: Config) -> ModelSpec:
        """The spec with exact counts."""
        shape = spec_from_counts(config, num_parameters=0, num_active_parameters=0, num_flop_parameters=0)
        embedding_size = int(_first(config, "word_embed_proj_dim", default=shape.hidden_size))
        table = shape.vocab_size * embedding_size
        positions = 0
        if self.extra_positions is not None and shape.max_positions is not None:
            positions = (shape.max_positions + self.extra_positions) * shape.hidden_size
        idle = self._expert(shape).total * (shape.num_experts - shape.experts_per_token) * shape.num_moe_layers
        body = self._body(config, shape) + _projections(shape.hidden_size, embedding_size)
        num_parameters = body.total + positions + table * (1 if shape.tied else 2)
        return replace(
            shape,
            num_parameters=num_parameters,
            num_active_parameters=num_parameters - idle,
            num_flop_parameters=body.matrices - idle + table,
        )

    def _body(self, config: Config, shape: ModelSpec) -> _Count:
        """Everything between the embedding and the head."""
        norm = self._norm(config, shape.hidden_size)
        dense_layers = shape.num_layers - shape.num_moe_layers
        layers = (self._attention(config, shape) + norm * self.norms_per_layer) * shape.num_layers
        dense = self._mlp(shape.hidden_size, shape.intermediate_size, self.mlp_bias(config)) * dense_layers
        sparse = self._experts(shape) * shape.num_moe_layers
        return layers + dense + sparse + norm * int(self.final_norm(config))

    def _attention(self, config: Config, shape: ModelSpec) -> _Count:
        width, bias = shape.hidden_size, self.qkv_bias(config)
        queries = _linear(width, shape.attention_size, bias)
        keys_and_values = _linear(width, shape.key_value_size, bias) * 2
        output = _linear(shape.attention_size, width, self.output_bias(config))
        head_norms = self._norm(config, shape.head_dim) * (2 if self.qk_norm else 0)
        return queries + keys_and_values + output + head_norms

    def _mlp(self, width: int, inner: int, bias: bool) -> _Count:
        return _linear(width, inner, bias) * (2 if self.gated else 1) + _linear(inner, width, bias)

    def _expert(self, shape: ModelSpec) -> _Count:
        return self._mlp(shape.hidden_size, shape.expert_intermediate_size, bias=False)

    def _experts(self, shape: ModelSpec) -> _Count:
        """A router and all experts of one layer, the shared one included."""
        router = _linear(shape.hidden_size, shape.num_experts, bias=False)
        shared = self._mlp(shape.hidden_size, shape.shared_expert_intermediate_size, bias=False)
        gate = _linear(shape.hidden_size, int(self.shared_expert_gate), bias=False)
        return router + self._expert(shape) * shape.num_experts + shared + gate

    def _norm(self, config: Config, size: int) -> _Count:
        return _Count(0, size * (1 + int(self.norm_bias)) if self.has_norm_weights(config) else 0)


def _projections(hidden_size: int, embedding_size: int) -> _Count:
    """From the embedding's width to the model's and back, where the two differ."""
    return _Count() if embedding_size == hidden_size else _linear(embedding_size, hidden_size, bias=False) * 2


def _opt_final_norm(config: Config) -> bool:
    return bool(config.get("do_layer_norm_before", True)) and not config.get("_remove_final_layer_norm", False)


_attention_bias = _key("attention_bias")

FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias, mlp_bias=_key("mlp_bias")),
    "mistral": _Family(),
    "mixtral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=_always),
    "qwen2_moe": _Family(qkv_bias=_key("qkv_bias"), shared_expert_gate=True),
    "qwen3": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias, qk_norm=True),
    "qwen3_moe": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias, qk_norm=True),
    "gemma": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias),
    "gemma2": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias, norms_per_layer=4),
    "gemma3_text": _Family(qkv_bias=_attention_bias, output_bias=_attention_bias, norms_per_layer=4, qk_norm=True),
    "gpt2": _Family(gated=False, qkv_bias=_always, output_bias=_always, mlp_bias=_always, norm_bias=True, extra_positions=0),
    "gpt_neox": _Family(gated=False, qkv_bias=_attention_bias, output_bias=_attention_bias, mlp_bias=_always, norm_bias=True),
    "opt": _Family(
        gated=False,
        qkv_bias=_key("enable_bias"),
        output_bias=_key("enable_bias"),
        mlp_bias=_key("enable_bias"),
        norm_bias=True,
        has_norm_weights=_key("layer_norm_elementwise_affine"),
        final_norm=_opt_final_norm,
        extra_positions=2,
    ),
    "simple_transformer": _Family(gated=False, qkv_bias=_always, output_bias=_always, mlp_bias=_always, norm_bias=True, final_norm=_never),
}
"""The architectures whose parameters are known in closed form."""
