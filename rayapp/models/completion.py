"""Completes prompts with an exported model, on whatever device this machine has."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rayapp.config.schema import GenerateSection
from rayapp.documents import Completion, GenerateDocument
from rayapp.errors import ModelError, Problem
from rayapp.storage import Location


def complete(model_dir: Location, prompts: list[str], settings: GenerateSection) -> GenerateDocument:
    """Continue each prompt.

    Args:
        model_dir: a Hugging Face folder.
        prompts: the texts to continue.
        settings: how many tokens, and how they are drawn.

    Raises:
        ModelError: a prompt and what is to follow are longer than the model's positions.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _on_disk(model_dir) as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    completions = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
        if not inputs["input_ids"].shape[1]:  # an empty prompt begins a document
            inputs = {"input_ids": torch.tensor([[tokenizer.eos_token_id]], device=device)}
        length = inputs["input_ids"].shape[1]
        _check_length(model.config, length, settings.max_new_tokens)
        torch.manual_seed(settings.seed)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=settings.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **sampling)
        completions.append(Completion(prompt=prompt, completion=tokenizer.decode(tokens[0, length:], skip_special_tokens=True)))
    return GenerateDocument(model_dir=str(model_dir), completions=completions)


def _check_length(config: Any, prompt_tokens: int, max_new_tokens: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise ModelError(
            Problem(
                f"generate.max_new_tokens={max_new_tokens}",
                f"after a prompt of {prompt_tokens} tokens is more than the model's {positions} positions",
                f"use at most {max(0, positions - prompt_tokens)}, or a shorter prompt",
            )
        )


@contextlib.contextmanager
def _on_disk(model_dir: Location) -> Iterator[Path]:
    """The folder as a local path; a remote one is downloaded and removed again."""
    if model_dir.is_local:
        yield model_dir.local_path
        return
    with tempfile.TemporaryDirectory(prefix="rayapp-model-") as copy:
        for file in model_dir.files():
            file.download(Path(copy) / file.name)
        yield Path(copy)
