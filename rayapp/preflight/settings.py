"""Settings of a run file that exclude each other, or need what is not there, whatever the cluster."""

from __future__ import annotations

from typing import Literal

from rayapp.config.load import LoadedRunFile
from rayapp.config.schema import RunFile
from rayapp.errors import Problem, RunFileError
from rayapp.preflight.trackers import tracker_problems

IMPLEMENTED_KINDS = ("auto", "ddp", "zero")


def check_settings(loaded: LoadedRunFile, device: Literal["cuda", "cpu"]) -> None:
    """Refuse what cannot go together.

    Args:
        loaded: the run file.
        device: what the workers compute on.

    Raises:
        RunFileError: with everything that is wrong.
    """
    file = loaded.file
    found = [*_parallel_kind(file), *_zero_options(file), *_optimizer(file), *_pretrained_tokenizer(file), *tracker_problems(file)]
    if device == "cpu":
        found += _cpu_workers(file)
    if found:
        raise RunFileError(*(Problem(p.subject, p.rule, p.remedy, loaded.where(p.subject.split("=")[0])) for p in found))


def _parallel_kind(file: RunFile) -> list[Problem]:
    parallel = file.parallel
    problems = []
    if parallel.kind not in IMPLEMENTED_KINDS:
        problems.append(Problem(f"parallel.kind={parallel.kind}", "cannot train yet", "use auto, ddp or zero"))
        return problems
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, key)
        if size not in (None, 1):
            problems.append(Problem(f"parallel.{key}={size}", f"is not something that kind: {parallel.kind} can take", "leave it out"))
    return problems


def _zero_options(file: RunFile) -> list[Problem]:
    parallel = file.parallel
    problems = []
    is_zero = parallel.kind == "zero"
    if parallel.overlap_communication is not None and parallel.kind == "ddp":
        rule = "goes with ZeRO; DDP always overlaps"
        problems.append(Problem(f"parallel.overlap_communication={parallel.overlap_communication}", rule, "leave it out"))
    if parallel.zero_stage is not None and not is_zero:
        problems.append(
            Problem(
                f"parallel.zero_stage={parallel.zero_stage}",
                f"goes with kind: zero, not with kind: {parallel.kind}",
                "set parallel.kind=zero or leave it out",
            )
        )
    if parallel.offload_optimizer != "none" and not is_zero:
        problems.append(
            Problem(
                f"parallel.offload_optimizer={parallel.offload_optimizer}",
                f"goes with kind: zero, not with kind: {parallel.kind}",
                "set parallel.kind=zero",
            )
        )
    stage = parallel.zero_stage or 2
    if parallel.offload_weights != "none" and not (is_zero and stage == 3):
        used = f"stage {stage}" if is_zero else f"kind: {parallel.kind}"
        problems.append(
            Problem(
                f"parallel.offload_weights={parallel.offload_weights}",
                f"goes with ZeRO stage 3, not with {used}",
                "set parallel.kind=zero parallel.zero_stage=3, or use parallel.offload_optimizer",
            )
        )
    return problems


def _optimizer(file: RunFile) -> list[Problem]:
    optim, train = file.optim, file.train
    if optim.warmup_steps > train.num_steps:
        return [
            Problem(
                f"optim.warmup_steps={optim.warmup_steps}",
                f"is more than train.num_steps({train.num_steps})",
                f"use at most {train.num_steps}",
            )
        ]
    return []


def _pretrained_tokenizer(file: RunFile) -> list[Problem]:
    uses_weights = file.model.path is not None and not file.model.random_weights
    if uses_weights and file.data.tokenizer.train is not None:
        return [
            Problem(
                f"data.tokenizer.train.vocab_size={file.data.tokenizer.train.vocab_size}",
                f"would give other tokens than the weights of {file.model.path} know",
                "leave data.tokenizer out, or set model.random_weights=true",
            )
        ]
    return []


def _cpu_workers(file: RunFile) -> list[Problem]:
    """What CPUs cannot do."""
    problems = []
    if file.train.precision == "fp16":
        problems.append(Problem("train.precision=fp16", "needs GPUs", "use bf16 or fp32"))
    for key in ("offload_optimizer", "offload_weights"):
        if getattr(file.parallel, key) != "none":
            problems.append(Problem(f"parallel.{key}={getattr(file.parallel, key)}", "has nothing to gain on CPUs", "leave it out"))
    if file.model.attention.startswith("flash"):
        problems.append(Problem(f"model.attention={file.model.attention}", "needs GPUs", "use sdpa"))
    if file.resources.gpu_type is not None:
        problems.append(
            Problem(
                f"resources.gpu_type={file.resources.gpu_type}", "goes with GPUs, not with train.device=cpu", "leave one of the two out"
            )
        )
    return problems
