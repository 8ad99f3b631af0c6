"""From a model section to a configuration and to weights: what is refused, and what fresh weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import FAMILIES
from torch import nn

from rayapp.config.schema import ModelSection
from rayapp.errors import ModelError
from rayapp.models.build import check_against_data, check_model_folder, fresh_model, meta_network, model_config, model_spec, named_seed
from rayapp.models.language_model import LanguageModel

CPU = torch.device("cpu")
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def config_of(kind: str, **overrides: Any) -> dict[str, Any]:
    return model_config(ModelSection(kind=kind, config=overrides), 96, TOKENS)


def model_of(kind: str, *, seed: int = 3, attention: str = "eager", partition: Any = None, **overrides: Any) -> LanguageModel:
    section = ModelSection(kind=kind, attention=attention, config=overrides)
    config = model_config(section, 96, TOKENS)
    return fresh_model(config, section, seed=seed, dtype=torch.float32, device=CPU, chunk_tokens=16, partition=partition)


def weights_of(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_weights()}


@pytest.mark.parametrize(
    ("kind", "overrides", "told"),
    [
        ("lama", {}, r"model\.kind='lama' is not a causal language model of transformers; did you mean llama\?"),
        ("bert-like-thing", {}, r"is not a causal language model of transformers; use simple_transformer, pretrained, or"),
        ("clip", {}, r"model\.kind='clip' is not a causal language model"),
        ("llama", {"hiden_size": 8}, r"model\.config\.hiden_size=8 is not a setting of llama; did you mean hidden_size\?"),
        ("llama", {"zzz": 8}, r"model\.config\.zzz=8 is not a setting of llama; the settings are .*hidden_size"),
        ("simple_transformer", {"num_layer": 2}, r"is not a setting of simple_transformer; did you mean num_"),
        ("simple_transformer", {"hidden_size": 30, "num_attention_heads": 4}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ("llama", {"hidden_size": "wide"}, r"model\.config of llama is refused: .*correct the values under model\.config"),
    ],
)
def test_a_wrong_section_is_refused(kind: str, overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){told}"):
        config_of(kind, **overrides)


def test_every_wrong_key_is_listed() -> None:
    with pytest.raises(ModelError) as refused:
        config_of("gpt2", n_embed=8, n_layers=2)
    assert [problem.subject for problem in refused.value.problems] == ["model.config.n_embed=8", "model.config.n_layers=2"]


def test_names_that_transformers_maps_are_taken() -> None:
    config = config_of("gpt2", hidden_size=32, num_hidden_layers=3)
    assert (config["n_embd"], config["n_layer"], config["vocab_size"], config["eos_token_id"]) == (32, 3, 96, 0)


def test_a_width_that_heads_do_not_divide_is_refused_before_weights() -> None:
    with pytest.raises(ModelError, match="is refused"):
        meta_network(config_of("gpt2", n_embd=30, n_head=4), attention="eager")


def test_both_disagreements_with_the_data_are_told() -> None:
    config = config_of("gpt2", n_positions=16, vocab_size=50)
    check_against_data(config, 50, 16)
    with pytest.raises(ModelError) as refused:
        check_against_data(config, 51, 17)
    assert str(refused.value).splitlines() == [
        "model.config.vocab_size=50 is smaller than the tokenizer's 51 entries; set it to at least 51, or leave it out for a fresh model",
        "data.sequence_length=17 is longer than the model's 16 positions; use at most 16, or set model.config.n_positions=17 for a fresh "
        "model",
    ]


def test_a_model_folder_is_checked(tmp_path: Path) -> None:
    def check() -> None:
        check_model_folder(str(tmp_path / "model"), needs_weights=True)

    with pytest.raises(ModelError, match="does not exist"):
        check()
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no weights: none of model\.safetensors.*set model\.random_weights=true"):
        check()
    check_model_folder(str(tmp_path / "model"), needs_weights=False)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model" / "one.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files: two\.safetensors"):
        check()
    (tmp_path / "model" / "two.safetensors").write_bytes(b"")
    check()


def test_a_folder_with_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(ModelError, match="has no usable configuration"):
        model_config(ModelSection(kind="pretrained", path=str(tmp_path), random_weights=True), 96, TOKENS)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_are_a_function_of_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    first = weights_of(model_of(family, **FAMILIES[family]))
    torch.manual_seed(2)
    random_state = torch.get_rng_state()
    again = weights_of(model_of(family, **FAMILIES[family]))
    assert torch.equal(torch.get_rng_state(), random_state), "drawing weights leaves the generator of dropout alone"
    other = weights_of(model_of(family, seed=4, **FAMILIES[family]))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_do_not_hang_on_how_blocks_are_sharded(family: str) -> None:
    """Every parameter is handed over exactly once with its value, and whoever takes it may let go of it at once."""
    expected = weights_of(model_of(family, **FAMILIES[family]))
    taken: dict[int, torch.Tensor] = {}

    def take(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert id(parameter) not in taken
            taken[id(parameter)] = parameter.data
            parameter.data = torch.empty(0)

    model = model_of(family, partition=take, **FAMILIES[family])
    assert {name: taken[id(p)].shape for name, p in model.named_weights()} == {name: w.shape for name, w in expected.items()}
    assert all(torch.equal(taken[id(p)], expected[name]) for name, p in model.named_weights())
    assert len(taken) == len(expected)


def test_a_block_is_the_same_in_a_deeper_model() -> None:
    shallow = weights_of(model_of("llama", **FAMILIES["llama"]))
    deep = weights_of(model_of("llama", **{**FAMILIES["llama"], "num_hidden_layers": 4}))
    assert set(shallow) < set(deep)
    assert all(torch.equal(deep[name], weight) for name, weight in shallow.items())
    query = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(deep[query.format(0)], deep[query.format(1)])


def test_seeds_of_blocks_differ_and_fit_torch() -> None:
    seeds = {named_seed(seed, f"layers.{index}") for seed in range(30) for index in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (
            "llama",
            {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.05},
        ),
        (
            "qwen2",
            {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        ("simple_transformer", {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.05}),
    ],
)
def test_fresh_matrices_are_normal_and_norms_are_one(kind: str, overrides: dict[str, Any]) -> None:
    weights = weights_of(model_of(kind, **overrides))
    expected = overrides.get("initializer_range", 0.02)
    for name, weight in weights.items():
        if weight.dim() == 2:
            assert float(weight.std()) == pytest.approx(expected, rel=0.03), name
            assert abs(float(weight.mean())) < 4 * expected / weight.numel() ** 0.5, name
        elif name.endswith("bias"):
            assert not weight.any(), name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name
    assert sum(weight.dim() == 2 for weight in weights.values()) > 10


def test_gpt2_scales_its_residual_projections_by_depth() -> None:
    weights = weights_of(model_of("gpt2", n_embd=256, n_layer=8, n_head=4, n_positions=64))
    assert float(weights["transformer.h.3.attn.c_attn.weight"].std()) == pytest.approx(0.02, rel=0.03)
    assert float(weights["transformer.h.3.attn.c_proj.weight"].std()) == pytest.approx(0.02 / 16**0.5, rel=0.03)


def test_an_unknown_family_is_counted_on_the_meta_device() -> None:
    """GPT-NeoX by hand: embedding and output V D each, layers 12 D^2 + 13 D, a final norm 2 D."""
    width, layers = 64, 3
    config = config_of("gpt_neox", hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width)
    spec = model_spec(config)
    by_hand = 2 * 96 * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert spec.num_parameters == spec.num_active_parameters == by_hand
    assert spec.num_parameters == sum(p.numel() for p in model_of("gpt_neox", **{
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width,
    }).parameters())  # fmt: skip


def test_a_model_without_torchs_attention_is_counted_too() -> None:
    """Bloom: tied embedding V D with a norm after it, layers 12 D^2 + 13 D, a final norm."""
    width, layers = 64, 3
    spec = model_spec(config_of("bloom", hidden_size=width, n_layer=layers, n_head=4))
    assert spec.num_parameters == 96 * width + layers * (12 * width**2 + 13 * width) + 4 * width


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "overrides", "fused"),
    [
        ("llama", TINY, True),
        ("gpt2", FAMILIES["gpt2"], True),
        ("mixtral", FAMILIES["mixtral"], True),
        ("cohere", {**TINY, "logit_scale": 0.25}, False),
        ("gemma2", {**TINY, "head_dim": 8, "pad_token_id": 0, "final_logit_softcapping": 5.0}, False),
        ("gemma2", {**TINY, "head_dim": 8, "pad_token_id": 0, "final_logit_softcapping": None}, True),
        ("granite", {**TINY, "logits_scaling": 4.0}, False),
    ],
)
def test_the_loss_is_that_of_the_models_own_logits(kind: str, overrides: dict[str, Any], fused: bool) -> None:
    model = model_of(kind, **overrides).eval()
    model.choose_loss(model, CPU)
    assert model.fused_loss == fused
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 96, (2, 2, 20), generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # logits that capping and scaling change
        network: Any = model.network
        logits = network(input_ids=tokens).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-5, atol=1e-4)
