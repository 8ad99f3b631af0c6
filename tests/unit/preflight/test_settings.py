"""Settings that exclude each other, all of them at once, each with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from rayapp.config.load import LoadedRunFile
from rayapp.errors import RunFileError
from rayapp.preflight.settings import check_settings

Load = Callable[..., LoadedRunFile]


@pytest.mark.parametrize(
    ("overrides", "device"),
    [
        ([], "cpu"),
        (["train.precision=fp16", "model.attention=flash_attention_2", "resources.gpu_type=H100"], "cuda"),
        (["parallel={kind: zero, zero_stage: 2, offload_optimizer: cpu}"], "cuda"),
        (["parallel={kind: zero, zero_stage: 3, offload_optimizer: cpu, offload_weights: cpu}"], "cuda"),
        (["parallel={kind: ddp, tensor_parallel_size: 1, pipeline_parallel_size: 1}"], "cpu"),
        (["train.num_steps=10", "optim.warmup_steps=10"], "cpu"),
        (["model={kind: pretrained, path: gpt2}", "data.tokenizer={path: gpt2}"], "cpu"),
        (["model={kind: pretrained, path: gpt2, random_weights: true}"], "cpu"),
    ],
)
def test_what_goes_together(load: Load, overrides: list[str], device: Literal["cuda", "cpu"]) -> None:
    check_settings(load(*overrides), device)


@pytest.mark.parametrize(
    ("overrides", "device", "subjects"),
    [
        (
            ["train.precision=fp16", "parallel={kind: zero, offload_optimizer: cpu}"],
            "cpu",
            ["train.precision", "parallel.offload_optimizer"],
        ),
        (["parallel={zero_stage: 3}"], "cuda", ["parallel.zero_stage"]),  # auto chooses the stage itself
        (["parallel={kind: zero, offload_weights: cpu}"], "cuda", ["parallel.offload_weights"]),  # stage 2
        (["parallel={kind: ddp, offload_optimizer: cpu}"], "cuda", ["parallel.offload_optimizer"]),
        (["parallel={pipeline_parallel_size: 2}"], "cuda", ["parallel.pipeline_parallel_size"]),
        (["parallel={kind: tensor}", "train.num_steps=5", "optim.warmup_steps=6"], "cuda", ["parallel.kind", "optim.warmup_steps"]),
        (["model={kind: pretrained, path: gpt2}"], "cuda", ["data.tokenizer.train.vocab_size"]),
    ],
)
def test_what_excludes_each_other(load: Load, overrides: list[str], device: Literal["cuda", "cpu"], subjects: list[str]) -> None:
    loaded = load(*overrides)
    with pytest.raises(RunFileError) as error:
        check_settings(loaded, device)
    problems = error.value.problems
    assert [problem.subject.partition("=")[0] for problem in problems] == subjects
    assert all(problem.remedy for problem in problems)
    assert [problem.where for problem in problems] == [
        f"{loaded.path}:3" if subject.startswith("data") else "command line" for subject in subjects
    ]
