"""From a model section to a configuration, and from a configuration to a network with weights.

A network is always made on the meta device first, so that its size and shape are known without its weights. Fresh
weights are drawn block by block, each block from its own seed, so that they are the same however they are sharded, and no
process needs to hold more than a block.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rayapp.config.schema import ModelSection
from rayapp.errors import ModelError, Problem
from rayapp.models.language_model import LanguageModel
from rayapp.models.loss import LossHead
from rayapp.models.spec import ModelSpec, spec_from_config, spec_from_counts
from rayapp.models.transformer import MODEL_TYPE, SimpleTransformer, SimpleTransformerConfig

PRETRAINED = "pretrained"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def model_config(section: ModelSection, vocab_size: int, special_tokens: dict[str, int | None]) -> dict[str, Any]:
    """The model's complete configuration.

    Args:
        section: the run file's model.
        vocab_size: entries of the tokenizer; the vocabulary of a fresh model where the run file sets none.
        special_tokens: ``bos_token_id`` and the like, of the tokenizer, for a fresh model.

    Raises:
        ModelError: the kind, the folder or a key is wrong.
    """
    if section.kind == PRETRAINED:
        return _pretrained_config(section)
    tokens = {"vocab_size": vocab_size, **special_tokens}
    if section.kind == MODEL_TYPE:
        return _simple_config(tokens, section.config)
    return _fresh_config(section.kind, tokens, section.config)


def _pretrained_config(section: ModelSection) -> dict[str, Any]:
    from transformers import AutoConfig

    assert section.path is not None
    check_model_folder(section.path, needs_weights=not section.random_weights)
    try:
        config = AutoConfig.from_pretrained(section.path, revision=section.revision)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            Problem(
                f"model.path={section.path!r}",
                f"has no usable configuration: {_first_line(error)}",
                "give a folder with config.json, or a hub name that this machine can reach or has cached",
            )
        ) from error
    _check_keys(section.config, set(config.to_dict()) | set(config.attribute_map), config.model_type)
    with _config_errors(config.model_type):
        config.update(section.config)
    return cast("dict[str, Any]", json.loads(config.to_json_string(use_diff=False)))


def _simple_config(tokens: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    _check_keys(overrides, {field.name for field in fields(SimpleTransformerConfig)}, MODEL_TYPE)
    with _config_errors(MODEL_TYPE):
        return SimpleTransformerConfig(**{**tokens, **overrides}).to_dict()


def _fresh_config(kind: str, tokens: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_TYPE, PRETRAINED]
        raise ModelError(
            Problem(
                f"model.kind={kind!r}",
                "is not a causal language model of transformers",
                _did_you_mean(kind, names) or f"use {MODEL_TYPE}, {PRETRAINED}, or a model type such as llama, qwen3, gpt2 or mixtral",
            )
        )
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    known = set(default.to_dict()) | set(default.attribute_map)
    _check_keys(overrides, known, kind)
    with _config_errors(kind):
        config = config_class(**{**{k: v for k, v in tokens.items() if k in known or k.endswith("token_id")}, **overrides})
    return cast("dict[str, Any]", json.loads(config.to_json_string(use_diff=False)))


def _check_keys(overrides: dict[str, Any], known: set[str], kind: str) -> None:
    problems = [
        Problem(
            f"model.config.{key}={value!r}",
            f"is not a setting of {kind}",
            _did_you_mean(key, known) or f"the settings are {', '.join(sorted(known))}",
        )
        for key, value in overrides.items()
        if key not in known
    ]
    if problems:
        raise ModelError(*problems)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


@contextlib.contextmanager
def _config_errors(kind: str) -> Iterator[None]:
    """Configuration classes report bad values by many exceptions; all of them come from the run file's values here."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ImportError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(
            Problem(
                f"model.config of {kind}",
                f"is refused: {_last_line(error)}",
                "correct the values under model.config, or set model.attention",
            )
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def check_model_folder(path: str, *, needs_weights: bool) -> None:
    """Refuse a local folder that lacks a configuration or weights. A hub name passes.

    Raises:
        ModelError: with what is missing.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")):
            raise ModelError(Problem(f"model.path={path!r}", "does not exist", "give an existing folder or a hub name"))
        return
    if not (folder / "config.json").is_file():
        raise ModelError(Problem(f"model.path={path!r}", "has no config.json", "give the folder of a transformers model"))
    if not needs_weights:
        return
    present = [name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not present:
        raise ModelError(
            Problem(
                f"model.path={path!r}",
                f"has no weights: none of {', '.join(WEIGHT_FILES)}",
                "complete the folder, or set model.random_weights=true to start from fresh weights",
            )
        )
    if present[0].endswith(".index.json"):
        shards = set(json.loads((folder / present[0]).read_text())["weight_map"].values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelError(
                Problem(f"model.path={path!r}", f"lacks {len(missing)} of {len(shards)} weight files: {missing[0]}", "complete the folder")
            )


def check_against_data(config: dict[str, Any], vocab_size: int, sequence_length: int) -> None:
    """Refuse a vocabulary smaller than the tokenizer's, and a sequence longer than the model's positions.

    Raises:
        ModelError: with both, where both are wrong.
    """
    spec = model_spec(config)
    problems = []
    if spec.vocab_size < vocab_size:
        problems.append(
            Problem(
                f"model.config.vocab_size={spec.vocab_size}",
                f"is smaller than the tokenizer's {vocab_size} entries",
                f"set it to at least {vocab_size}, or leave it out for a fresh model",
            )
        )
    if spec.max_positions is not None and sequence_length > spec.max_positions:
        problems.append(
            Problem(
                f"data.sequence_length={sequence_length}",
                f"is longer than the model's {spec.max_positions} positions",
                f"use at most {spec.max_positions}, or set model.config.{_positions_key(config)}={sequence_length} for a fresh model",
            )
        )
    if problems:
        raise ModelError(*problems)


def _positions_key(config: dict[str, Any]) -> str:
    return "n_positions" if "n_positions" in config else "max_position_embeddings"


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Parameters and FLOPs: by closed form where the family is known, else counted on the meta device."""
    spec = spec_from_config(config)
    if spec is not None:
        return spec
    network: Any = meta_network(config, attention="eager")
    head = network.get_output_embeddings().weight
    tables = [m.weight for m in network.modules() if isinstance(m, nn.Embedding) and m.weight is not head]
    inactive = sum(_inactive_parameters(name, parameter, config) for name, parameter in network.named_parameters())
    total = sum(parameter.numel() for parameter in network.parameters())
    vectors = sum(parameter.numel() for parameter in network.parameters() if parameter.dim() < 2)
    in_products = total - inactive - vectors - sum(table.numel() for table in tables)
    return spec_from_counts(config, num_parameters=total, num_active_parameters=total - inactive, num_flop_parameters=in_products)


def _inactive_parameters(name: str, parameter: nn.Parameter, config: dict[str, Any]) -> int:
    """Weights of routed experts that one token does not pass through."""
    num_experts: int | None = next(
        (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None
    )
    if num_experts is None or ".experts." not in name:
        return 0
    active: int = config["num_experts_per_tok"]
    return parameter.numel() * (num_experts - active) // num_experts


def meta_network(config: dict[str, Any], *, attention: str) -> nn.Module:
    """The network on the meta device, its output layer replaced by a :class:`LossHead`.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    if config["model_type"] == MODEL_TYPE:
        known = {field.name for field in fields(SimpleTransformerConfig)}
        with torch.device("meta"):
            return SimpleTransformer(SimpleTransformerConfig(**{k: v for k, v in config.items() if k in known}))
    from transformers import AutoModelForCausalLM

    with _config_errors(config["model_type"]), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(transformers_config(config), attn_implementation=attention)
    _replace_head(network)
    return cast("nn.Module", network)


def transformers_config(config: dict[str, Any]) -> Any:
    """The configuration object of transformers; a SimpleTransformer's is the OPT that it equals."""
    from transformers import CONFIG_MAPPING

    if config["model_type"] == MODEL_TYPE:
        known = {field.name for field in fields(SimpleTransformerConfig)}
        config = SimpleTransformerConfig(**{k: v for k, v in config.items() if k in known}).opt_config()
    return CONFIG_MAPPING[config["model_type"]].from_dict({k: v for k, v in config.items() if k != "model_type"})


def _replace_head(network: Any) -> None:
    head = network.get_output_embeddings()
    network.set_output_embeddings(LossHead(head.weight, getattr(head, "bias", None), head.out_features))


def enable_activation_checkpointing(network: nn.Module) -> None:
    """Keep each layer's input only, and compute the rest again in the backward pass."""
    if isinstance(network, SimpleTransformer):
        network.model.activation_checkpointing = True
        return
    hf: Any = network
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})


Partition = Callable[[list[nn.Parameter]], None]


def fresh_model(
    config: dict[str, Any],
    section: ModelSection,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk_tokens: int,
    partition: Partition | None = None,
) -> LanguageModel:
    """A model with fresh weights, drawn in fp32 on ``device`` and kept as ``dtype``; buffers stay in fp32.

    Args:
        config: the complete configuration.
        section: for the attention implementation.
        seed: of the weights.
        dtype: of the parameters.
        device: where they are.
        chunk_tokens: see :class:`LanguageModel`.
        partition: called with a block's parameters as soon as they have values; it may shard them.
    """
    network = meta_network(config, attention=section.attention)
    materialised: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, modules in _blocks(network):
        fresh: list[nn.Parameter] = []
        for module in modules:
            fresh.extend(_materialise(module, device, materialised))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(named_seed(seed, name))
            _init_modules(network, modules)
        for parameter in fresh:
            parameter.data = parameter.data.to(dtype)
        if partition is not None:
            partition(fresh)
    return LanguageModel(network, chunk_tokens=chunk_tokens)


def pretrained_model(
    config: dict[str, Any], section: ModelSection, *, dtype: torch.dtype, device: torch.device, chunk_tokens: int
) -> LanguageModel:
    """A model with the weights of ``section.path``. Inside a ZeRO-3 context of transformers it comes out sharded.

    Raises:
        ModelError: weights are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM

    try:
        network, loading = AutoModelForCausalLM.from_pretrained(
            section.path,
            config=transformers_config(config),
            revision=section.revision,
            dtype=dtype,
            attn_implementation=section.attention,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            Problem(f"model.path={section.path!r}", f"cannot be loaded: {_first_line(error)}", "check the folder's files and model.config")
        ) from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(Problem(f"model.path={section.path!r}", f"lacks {len(missing)} weights: {missing[0]} ...", "complete the folder"))
    _replace_head(network)
    if not any(hasattr(parameter, "ds_id") for parameter in network.parameters()):
        network.to(device)
    return LanguageModel(network, chunk_tokens=chunk_tokens)


def named_seed(seed: int, name: str) -> int:
    """A seed of its own for each part of a model, from the run's seed and the part's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _blocks(network: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """The elements of every outermost ModuleList with all that they hold, then everything else; children come first."""
    rest: list[nn.Module] = []

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}".lstrip(".")
            if isinstance(module, nn.ModuleList):
                yield full, list(_children_first(child))
            else:
                yield from walk(child, full)
        rest.append(module)

    yield from walk(network, "")
    yield "", rest


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _materialise(
    module: nn.Module, device: torch.device, materialised: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> Iterator[nn.Parameter]:
    """Give a module's own meta parameters and buffers memory; a tied parameter is given memory once."""
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) not in materialised:
            empty = torch.empty_like(parameter, dtype=torch.float32, device=device)
            fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            # the meta tensor is kept alive, or its id could be given to another
            materialised[id(parameter)] = materialised[id(fresh)] = (parameter, fresh)
            yield fresh
        setattr(module, name, materialised[id(parameter)][1])
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def _init_modules(network: nn.Module, modules: list[nn.Module]) -> None:
    if isinstance(network, SimpleTransformer):
        for module in modules:
            network.init_module(module)
        return
    hf: Any = network
    for module in modules:
        if isinstance(module, LossHead):
            if module.weight is not hf.get_input_embeddings().weight:
                nn.init.normal_(module.weight, std=getattr(hf.config, "initializer_range", 0.02))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            hf._init_weights(module)
