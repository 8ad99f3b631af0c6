"""SimpleTransformer against torch's own encoder, and against transformers' OPT."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayapp.models.transformer import SimpleTransformer, SimpleTransformerConfig, document_mask

SMALL = SimpleTransformerConfig(vocab_size=61, hidden_size=24, num_attention_heads=4, num_hidden_layers=3, max_position_embeddings=64)


def network() -> SimpleTransformer:
    torch.manual_seed(3)
    model = SimpleTransformer(SMALL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def torch_encoder(model: SimpleTransformer) -> nn.TransformerEncoder:
    """torch's encoder with the same weights."""
    layer = nn.TransformerEncoderLayer(24, 4, dim_feedforward=96, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for ours, theirs in zip(model.model.decoder.layers, encoder.layers, strict=True):
        attention = ours.self_attn
        state = {
            "self_attn.in_proj_weight": torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            "self_attn.in_proj_bias": torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]),
            "self_attn.out_proj.weight": attention.out_proj.weight,
            "self_attn.out_proj.bias": attention.out_proj.bias,
            "linear1.weight": ours.fc1.weight,
            "linear1.bias": ours.fc1.bias,
            "linear2.weight": ours.fc2.weight,
            "linear2.bias": ours.fc2.bias,
            "norm1.weight": ours.self_attn_layer_norm.weight,
            "norm1.bias": ours.self_attn_layer_norm.bias,
            "norm2.weight": ours.final_layer_norm.weight,
            "norm2.bias": ours.final_layer_norm.bias,
        }
        theirs.load_state_dict(state)
    return encoder.eval()


def test_equals_torchs_transformer_encoder() -> None:
    model = network()
    tokens = torch.randint(0, 61, (2, 17))
    mask = nn.Transformer.generate_square_subsequent_mask(17)
    with torch.no_grad():
        hidden = torch_encoder(model)(model.model.decoder.embed_tokens(tokens), mask=mask, is_causal=True)
        expected = hidden @ model.lm_head.weight.T
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


def test_equals_transformers_opt_with_its_position_table() -> None:
    from transformers import AutoModelForCausalLM, OPTConfig

    model = network()
    opt = AutoModelForCausalLM.from_config(OPTConfig.from_dict(SMALL.opt_config())).eval()
    name, table = SMALL.opt_positions(torch.float32)
    opt.load_state_dict({**model.state_dict(), name: table})
    tokens = torch.randint(0, 61, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(opt(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_documents_in_a_row_do_not_see_each_other() -> None:
    model = network()
    tokens = torch.randint(0, 61, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        together = model(tokens, positions)
        apart = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_document_mask_is_causal_and_blockwise() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 1]]))[0, 0]
    assert mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_defaults_are_the_documents_example() -> None:
    config = SimpleTransformerConfig()
    assert (config.vocab_size, config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (50_000, 1024, 16, 24)


@pytest.mark.parametrize("wrong", [{"hidden_size": 10, "num_attention_heads": 3}, {"num_hidden_layers": 0}, {"vocab_size": -1}])
def test_refuses_sizes_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is not a"):
        SimpleTransformerConfig(**wrong)
