"""Every exception that rayapp raises on purpose.

RayappError                        the root; ``exit_status`` is what the command line returns
├── InputError                 (2) what the user gave cannot work; nothing was started
│   ├── RunFileError               the run file or an override
│   ├── ModelError                 the model's folder, name or configuration
│   ├── DataError                  the corpus, the tokenizer or the prepared shards
│   ├── PlacementError             what was asked for is not what the cluster has
│   ├── MemoryFitError             the model cannot fit with this layout
│   ├── StorageError               the storage cannot be reached or written
│   └── CheckpointError            no such run, an incomplete or a damaged checkpoint
└── RunError                   (1) it started and failed
    ├── WorkerError                a worker of the group ended early
    ├── NonFiniteError             too many steps in a row were not applied, or the loss went wrong too often
    ├── StorageLostError           the storage failed for good while the run was going
    ├── EngineError                the training engine refused or broke
    └── InterruptedRunError  (130) the run was asked to end before its last step
        └── TerminatedRunError (143) by SIGTERM

Every ``InputError`` is a list of :class:`Problem`: the value, the rule and the remedy, so that all of them are shown at
once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the input.

    Attributes:
        subject: what it is about, with its value: ``batch.global_batch_size=512``.
        rule: the rule that it breaks: ``is not a multiple of micro_batch_size(6) x dp_size(8)=48``.
        remedy: what to do about it: ``use 480 or 528``. May be empty when the rule says it all.
        where: file and line, where there is one: ``jobs/x.yaml:12``.
    """

    subject: str
    rule: str
    remedy: str = ""
    where: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{place}{self.subject} {self.rule}{remedy}"


class RayappError(Exception):
    """The root of rayapp's own exceptions."""

    exit_status = 1


class InputError(RayappError):
    """What the user gave cannot work. Raised before anything is started."""

    exit_status = 2

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("an InputError needs at least one Problem")
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[InputError], tuple[Problem, ...]]:
        return type(self), self.problems


class RunFileError(InputError):
    """The run file or an override is wrong."""


class ModelError(InputError):
    """The model's folder, name or configuration is wrong."""


class DataError(InputError):
    """The corpus, the tokenizer or the prepared shards are wrong."""


class PlacementError(InputError):
    """What was asked for is not what the cluster has."""


class MemoryFitError(InputError):
    """The model cannot fit with this layout."""


class StorageError(InputError):
    """The storage cannot be reached or written."""


class CheckpointError(InputError):
    """There is no such run, or its checkpoint is incomplete or damaged."""


class RunError(RayappError):
    """The run started and failed."""


class WorkerError(RunError):
    """A worker of the group ended early."""


class NonFiniteError(RunError):
    """Too many steps in a row were not applied, or the loss went wrong too often."""


class StorageLostError(RunError):
    """The storage failed for good while the run was going. What was complete before still is."""


class EngineError(RunError):
    """The training engine refused or broke."""


class InterruptedRunError(RunError):
    """The run was asked to end before its last step, by Ctrl-C."""

    exit_status = 130


class TerminatedRunError(InterruptedRunError):
    """The run was asked to end before its last step, by SIGTERM."""

    exit_status = 143
