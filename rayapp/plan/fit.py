"""Whether a run fits in the memory of its workers, and which strategy is the least sharded that does. Pure.

Measured on an H200 with torch 2.11, transformers' layers without compilation and the chunked loss: Llama of 1.2 B weights at
five sizes, GPT-2, Qwen3 and Mixtral, in bf16 and fp32, with and without activation checkpointing. The tensors at the peak
were within 3.5 % of the estimate, the memory of the device within 2.5 %. Compiled layers took a quarter less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product

from rayapp.config.schema import RunFile
from rayapp.errors import MemoryFitError, Problem
from rayapp.layout import Layout
from rayapp.models.spec import ModelSpec
from rayapp.plan.activations import Device, Pass, backward_bytes, loss_bytes, minimum_activation_bytes, saved_bytes
from rayapp.plan.states import DATA_PARALLEL_STRATEGIES, DataParallelStrategy, communication_bytes, rank_states, zero_stage

CUDA_CONTEXT_BYTES = 800_000_000
"""What a process takes of a GPU outside torch's allocator: context, kernels and cuBLAS. Measured on an H200, torch 2.11:
553 MB after the first allocation, 800 MB in training."""

CPU_PROCESS_BYTES = 500_000_000
"""Resident memory of a worker before it holds a model: torch, transformers, DeepSpeed and Ray imported. Measured on Linux,
torch 2.13: 504 MB."""

ALLOCATOR_SLACK = 0.03
"""What the allocator holds beyond the tensors, as a share of them. Measured on an H200 over models of 0.2 to 1.2 billion
weights at their peak: 0.01 to 0.04, and 0.065 with activation checkpointing."""

LARGEST_FACTOR_OF_WORKERS = 1024
"""More workers than this times those of the run are not proposed."""


@dataclass(frozen=True)
class MemoryQuestion:
    """What the memory of one worker depends on.

    Attributes:
        spec: the model.
        strategy: how its states are spread over the data-parallel ranks.
        dp_size: data-parallel ranks.
        work: one pass of one rank.
        activation_checkpointing: layers keep their inputs only.
        loss_chunk_tokens: positions whose logits are held at once.
        bucket_bytes: size of communication buffers.
        overlap_communication: gradients are reduced during the backward pass.
        offload_optimizer: ZeRO keeps the optimizer's states in the host's memory.
        offload_weights: ZeRO-3 keeps the weights there.
    """

    spec: ModelSpec
    strategy: DataParallelStrategy
    dp_size: int
    work: Pass
    activation_checkpointing: bool = False
    loss_chunk_tokens: int = 1024
    bucket_bytes: int = 500_000_000
    overlap_communication: bool = True
    offload_optimizer: bool = False
    offload_weights: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker's device.

    Attributes:
        by_kind: weights, gradients, optimizer, activations, logits, buffers, overhead; they add up to ``total_bytes``.
        minimum_bytes: what it takes whatever the kernels and the allocator do: weights, the optimizer's states, and the
            largest of gradients, their fp32 copy, and those activations that no kernel computes again.
        host_bytes: what one worker keeps in the host's memory instead; 0 on CPUs, where that is the same memory.
    """

    by_kind: dict[str, int]
    minimum_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())


def memory_question(
    file: RunFile, *, spec: ModelSpec, strategy: DataParallelStrategy, layout: Layout, micro_batch_size: int, device: Device
) -> MemoryQuestion:
    """The question that a run file asks."""
    overlap = file.parallel.overlap_communication
    work = Pass(micro_batch_size, file.data.sequence_length, file.train.precision, device, file.model.attention)
    return MemoryQuestion(
        spec=spec,
        strategy=strategy,
        dp_size=layout.dp_size,
        work=work,
        activation_checkpointing=file.train.activation_checkpointing,
        loss_chunk_tokens=file.train.loss_chunk_tokens,
        bucket_bytes=file.parallel.bucket_bytes,
        overlap_communication=device == "cuda" if overlap is None else overlap,
        offload_optimizer=file.parallel.offload_optimizer == "cpu",
        offload_weights=file.parallel.offload_weights == "cpu",
    )


def estimate(question: MemoryQuestion) -> MemoryEstimate:
    """Memory of one worker at its peak.

    What the forward pass saved is there while the loss is computed, and while the backward pass is in its first layer;
    ``activations`` count the latter, ``logits`` what the loss takes beyond it. Or the peak is in the optimizer's step, when
    the activations are gone and the gradients are there in fp32 too; what that takes beyond them counts as buffers.
    """
    q, on_cpu = question, question.work.device == "cpu"
    states = rank_states(
        q.spec.num_parameters,
        q.strategy,
        q.work.precision,
        q.dp_size,
        offload_optimizer=q.offload_optimizer and not on_cpu,
        offload_weights=q.offload_weights and not on_cpu,
    )
    backward = backward_bytes(q.spec, q.work, checkpointing=q.activation_checkpointing)
    activations = saved_bytes(q.spec, q.work, checkpointing=q.activation_checkpointing) + backward
    logits = max(0, loss_bytes(q.spec, q.work, chunk_tokens=q.loss_chunk_tokens) - backward)
    communication = communication_bytes(
        q.spec, q.strategy, q.work.precision, bucket_bytes=q.bucket_bytes, overlap_communication=q.overlap_communication
    )
    tensors = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activations,
        "logits": logits,
        "buffers": communication + max(0, states.step - activations - logits),
    }
    process = CPU_PROCESS_BYTES if on_cpu else CUDA_CONTEXT_BYTES
    overhead = process + int(ALLOCATOR_SLACK * sum(tensors.values()))
    least_activations = minimum_activation_bytes(q.spec, q.work, checkpointing=q.activation_checkpointing)
    minimum = states.weights + states.optimizer + max(states.gradients, states.step, least_activations) + process
    return MemoryEstimate({**tensors, "overhead": overhead}, minimum, states.host)


def choose_strategy(question: MemoryQuestion, memory_bytes: int | None) -> tuple[DataParallelStrategy, str]:
    """The least sharded of ddp and ZeRO 1, 2, 3 that fits, and why in one sentence.

    Where none fits it is the one that needs least. ``question.strategy`` does not matter.

    Args:
        question: everything else.
        memory_bytes: of one worker's device; None where it is not known.
    """
    if memory_bytes is None:
        return "ddp", "ddp is the least sharded, and how much memory a worker has is not known"
    options = {strategy: estimate(replace(question, strategy=strategy)).total_bytes for strategy in DATA_PARALLEL_STRATEGIES}
    have = f"of {gigabytes(memory_bytes)} a worker"
    if question.dp_size == 1:
        return "ddp", f"with one worker there is nothing to shard; ddp needs {gigabytes(options['ddp'])} {have}"
    before = ""
    for strategy, needed in options.items():
        if needed <= memory_bytes:
            return strategy, f"{strategy} needs {gigabytes(needed)} {have}{before}"
        before = f", where {strategy} needs {gigabytes(needed)}"
    least = min(options, key=lambda strategy: options[strategy])
    return least, f"{least} needs least, {gigabytes(options[least])} {have}, and none fits for certain"


def check_fit(question: MemoryQuestion, memory_bytes: int | None) -> MemoryEstimate:
    """The estimate, unless it is certain that the run cannot fit.

    Certain means that the states and the activations that no kernel can do without are already more than there is. A run
    whose estimate is larger than the memory, but not certainly so, is let through.

    Args:
        question: the run.
        memory_bytes: of one worker's device; None where it is not known, and then nothing is refused.

    Raises:
        MemoryFitError: it cannot fit; with the figures by kind and the nearest changes that would.
    """
    answer = estimate(question)
    if memory_bytes is None or answer.minimum_bytes <= memory_bytes:
        return answer
    kinds = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in answer.by_kind.items())
    raise MemoryFitError(
        Problem(
            f"{question.strategy} with train.num_workers={question.dp_size} batch.micro_batch_size={question.work.micro_batch_size}",
            f"needs {gigabytes(answer.total_bytes)} a worker ({kinds}), at the very least {gigabytes(answer.minimum_bytes)}, "
            f"of {gigabytes(memory_bytes)}",
            _remedy(question, memory_bytes),
        )
    )


def gigabytes(size_bytes: int) -> str:
    """A size for people, in units of 10^9 bytes."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 9.95e9 else f"{size_bytes / 1e9:.2f} GB"


def _remedy(question: MemoryQuestion, memory_bytes: int) -> str:
    """The fewest changes whose estimate fits, each as mild as it can be; all alternatives of that number."""
    axes = _changes(question)
    for count in range(1, len(axes) + 1):
        found = [words for group in combinations(axes, count) if (words := _mildest(question, group, memory_bytes))]
        if found:
            return "use " + ", or ".join(found)
    return "no smaller batch, sharding, offloading or number of workers is enough; use workers with more memory, or a smaller model"


def _mildest(question: MemoryQuestion, axes: tuple[list[_Change], ...], memory_bytes: int) -> str | None:
    """One change of each axis that together fit, in words."""
    for changes in product(*axes):
        changed = question
        for change in changes:
            changed = change.apply(changed)
        if _is_possible(changed) and estimate(changed).total_bytes <= memory_bytes:
            return " and ".join(change.words for change in changes)
    return None


@dataclass(frozen=True)
class _Change:
    """One setting of the run, in words and as a function."""

    words: str
    apply: Callable[[MemoryQuestion], MemoryQuestion]


def _changes(question: MemoryQuestion) -> list[list[_Change]]:
    """What can be changed, each from the mildest to the strongest."""
    halvings = [question.work.micro_batch_size >> shift for shift in range(1, question.work.micro_batch_size.bit_length())]
    strategies = DATA_PARALLEL_STRATEGIES[zero_stage(question.strategy) + 1 :]
    doublings = [question.dp_size << shift for shift in range(1, LARGEST_FACTOR_OF_WORKERS.bit_length())]
    axes = [
        [_Change(f"batch.micro_batch_size={size}", partial(_with_micro_batch, micro_batch_size=size)) for size in halvings],
        [_Change("train.activation_checkpointing=true", partial(replace, activation_checkpointing=True))],
        [
            _Change(f"parallel.kind=zero parallel.zero_stage={zero_stage(strategy)}", partial(replace, strategy=strategy))
            for strategy in strategies
        ],
        [
            _Change("parallel.offload_optimizer=cpu", partial(replace, offload_optimizer=True)),
            _Change(
                "parallel.offload_optimizer=cpu parallel.offload_weights=cpu",
                partial(replace, offload_optimizer=True, offload_weights=True),
            ),
        ],
        [_Change(f"train.num_workers={dp_size}", partial(replace, dp_size=dp_size)) for dp_size in doublings],
    ]
    return [axis for axis in axes if axis]


def _is_possible(question: MemoryQuestion) -> bool:
    """Offloading is for accelerators and ZeRO, that of weights for ZeRO-3."""
    if question.offload_weights and question.strategy != "zero-3":
        return False
    return not question.offload_optimizer or (question.strategy != "ddp" and question.work.device == "cuda")


def _with_micro_batch(question: MemoryQuestion, micro_batch_size: int) -> MemoryQuestion:
    return replace(question, work=replace(question.work, micro_batch_size=micro_batch_size))
