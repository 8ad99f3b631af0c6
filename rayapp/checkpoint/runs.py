"""Where a run keeps what, and which runs a family has.

NAME/RUN_ID/run.json          the resolved run
            run.yaml          the run file as it was given, overrides applied
            environment.json  package versions, git state, hardware
            checkpoints/      see rayapp.checkpoint.store
            metrics.jsonl     every figure of every step
            tensorboard/      the same for TensorBoard
            model/            the exported Hugging Face folder
            marker            which start owns the run
            claims/           see rayapp.checkpoint.claims
            failures.jsonl    what went wrong with workers, a line each
            summary.json      what `rayapp train --json` prints; written last
            report.html       the run's page
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from rayapp.config.resolved import ResolvedRun
from rayapp.errors import CheckpointError, Problem
from rayapp.storage import Location

NUM_LISTED = 5


@dataclass(frozen=True)
class RunFolder:
    """The places of one run."""

    root: Location

    @property
    def resolved(self) -> Location:
        return self.root / "run.json"

    @property
    def run_file(self) -> Location:
        return self.root / "run.yaml"

    @property
    def environment(self) -> Location:
        return self.root / "environment.json"

    @property
    def checkpoints(self) -> Location:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Location:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Location:
        return self.root / "tensorboard"

    @property
    def model(self) -> Location:
        return self.root / "model"

    @property
    def summary(self) -> Location:
        return self.root / "summary.json"

    @property
    def marker(self) -> Location:
        return self.root / "marker"

    @property
    def failures(self) -> Location:
        return self.root / "failures.jsonl"

    @property
    def report(self) -> Location:
        return self.root / "report.html"


def new_run_id() -> str:
    """A start's name: its time in UTC, so that names sort by age, and four random letters against two at once."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def read_resolved(root: Location) -> ResolvedRun:
    """What a run was resolved to.

    Raises:
        CheckpointError: the folder is not a run's.
    """
    location = RunFolder(root).resolved
    if not location.exists():
        raise CheckpointError(Problem(f"run {root}", "has no run.json", "give the folder of a run: STORAGE/NAME/RUN_ID"))
    try:
        return ResolvedRun.model_validate_json(location.read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            Problem(
                f"run {root}", f"has a run.json that this version cannot read: {error.errors()[0]['msg']}", "use the version that wrote it"
            )
        ) from error


def runs_of(storage: Location, name: str) -> list[Location]:
    """The runs of a family, oldest first."""
    runs = [run for run in (storage / name).children() if RunFolder(run).resolved.exists()]
    return sorted(runs, key=lambda run: (_created_at(run), run.name))


def _created_at(run: Location) -> float:
    return float(json.loads(RunFolder(run).resolved.read_bytes()).get("created_at", 0.0))


def newest_complete_run(storage: Location, name: str, run_id: str | None = None) -> Location:
    """The newest run of a family that has an export, or the one asked for.

    Raises:
        CheckpointError: there is none.
    """
    if run_id is not None:
        run = named_run(storage, name, run_id)
        if not (RunFolder(run).model / "config.json").exists():
            raise CheckpointError(Problem(f"run {run}", "has no exported model", f"finish it with: rayapp train FILE --resume {run_id}"))
        return run
    complete = [run for run in runs_of(storage, name) if (RunFolder(run).model / "config.json").exists()]
    if not complete:
        raise CheckpointError(Problem(f"family {name} in {storage}", "has no complete run", "train one first: rayapp train FILE"))
    return complete[-1]


def named_run(storage: Location, name: str, run_id: str) -> Location:
    """One run of a family by its id.

    Raises:
        CheckpointError: there is no such run; the newest ids are named.
    """
    run = storage / name / run_id
    if not RunFolder(run).resolved.exists():
        known = [other.name for other in runs_of(storage, name)][-NUM_LISTED:]
        raise CheckpointError(
            Problem(f"run {run_id!r} of {name} in {storage}", "does not exist", f"the newest are {', '.join(known) or 'none'}")
        )
    return run


def newest_run(storage: Location, name: str) -> Location:
    """The newest run of a family, complete or not.

    Raises:
        CheckpointError: there is none.
    """
    runs = runs_of(storage, name)
    if not runs:
        raise CheckpointError(Problem(f"family {name} in {storage}", "has no run to resume", "start one: rayapp train FILE"))
    return runs[-1]
