"""Starts a run on a cluster: checks, data, workers through Ray Train's TorchTrainer, export."""

from __future__ import annotations

import json
import logging
import re

import yaml

from rayapp.checkpoint.checkpoints import Checkpoint, newest_intact
from rayapp.checkpoint.claims import claimed
from rayapp.checkpoint.export import export_run
from rayapp.checkpoint.runs import RunFolder, named_run, new_run_id, newest_run, read_resolved
from rayapp.cluster.connect import connected, finds_cluster
from rayapp.cluster.inventory import local_inventory, read_inventory
from rayapp.config.load import LoadedRunFile
from rayapp.config.resolved import ResolvedRun
from rayapp.config.schema import NAME_PATTERN
from rayapp.data.prepare import prepare
from rayapp.documents import TrainDocument
from rayapp.errors import CheckpointError, Problem, RunFileError
from rayapp.metrics.jsonl import read_records
from rayapp.preflight.derive import derive_all
from rayapp.preflight.resolve import check_prepared, claim_run, open_storage, resolve
from rayapp.preflight.start import check_start, find_usable
from rayapp.report.page import run_page
from rayapp.storage import Location
from rayapp.train.environment import describe_environment
from rayapp.train.fit import Finished, Report, fit, read_failures

logger = logging.getLogger(__name__)

NEWEST = "latest"


def train(loaded: LoadedRunFile, *, resume: str | None, run_id: str | None, address: str | None, report: Report) -> TrainDocument:
    """Train what a run file describes and export the result.

    Args:
        loaded: the run file.
        resume: a run's id, or ``latest`` for the newest of the family; None starts a new run.
        run_id: the new run's id; None: made from the time.
        address: of the cluster; see :func:`rayapp.cluster.connect.connected`.
        report: takes lines of progress.

    Raises:
        InputError: something cannot work; no worker was started.
        RunError: training failed.
    """
    storage = open_storage(loaded)
    run_dir, checkpoint = _choose_run(loaded, storage, resume, run_id)
    before = None if checkpoint is None else read_resolved(run_dir)
    prepared = find_usable(loaded.file, storage, before)
    if checkpoint is not None and _is_finished(checkpoint, run_dir, loaded):
        report(f"run {run_dir.name} has all of its {checkpoint.step} steps; exporting it again")
        export_run(run_dir, RunFolder(run_dir).model, checkpoint.step)
        return TrainDocument.model_validate_json(RunFolder(run_dir).summary.read_bytes())
    if not finds_cluster(address):
        check_start(loaded, local_inventory(), prepared, before)  # refuse what cannot work before a Ray is started for it
    with claimed(run_dir):  # before the cluster, which may take long to come up: two starts of one run must not both go on
        with connected(address):
            inventory = read_inventory()
            check_start(loaded, inventory, prepared, before)
            if prepared is None:
                prepared = prepare(loaded.file, storage, report)
                check_prepared(prepared)
            run = resolve(derive_all(loaded, inventory, prepared), prepared, run_dir, checkpoint)
            claim_run(run_dir, run, yaml.safe_dump(loaded.file.model_dump(mode="json"), sort_keys=False))
            RunFolder(run_dir).environment.write_text(json.dumps(describe_environment(inventory), indent=1))
            report(
                f"run {run.file.name}/{run.run_id}: {run.strategy} on {run.layout.world_size} x {run.device.name} ({run.strategy_reason})"
            )
            finished = fit(run, report)
        report("exporting the model")
        model_dir = export_run(run_dir, RunFolder(run_dir).model, finished.outcome.progress.step).model_dir
        return _conclude(run, run_dir, finished, model_dir)


def _choose_run(loaded: LoadedRunFile, storage: Location, resume: str | None, run_id: str | None) -> tuple[Location, Checkpoint | None]:
    name = loaded.file.name
    if resume is None:
        _check_run_id(run_id)
        run_dir = storage / name / (run_id or new_run_id())
        if RunFolder(run_dir).resolved.exists():
            raise CheckpointError(
                Problem(f"run {run_dir}", "exists already", f"continue it with --resume {run_dir.name}, or take another --run-id")
            )
        return run_dir, None
    run_dir = newest_run(storage, name) if resume == NEWEST else named_run(storage, name, resume)
    checkpoint = newest_intact(RunFolder(run_dir).checkpoints, deep=False)  # the workers compare the contents
    if checkpoint is None:
        logger.warning("run %s has no complete checkpoint; it starts from step 0", run_dir)
    elif checkpoint.step > loaded.file.train.num_steps:
        rule = f"is less than the {checkpoint.step} steps that run {run_dir.name} has behind it"
        remedy = f"use more than {checkpoint.step}, or start a new run"
        raise CheckpointError(Problem(f"train.num_steps={loaded.file.train.num_steps}", rule, remedy, loaded.where("train.num_steps")))
    return run_dir, checkpoint


def _is_finished(checkpoint: Checkpoint, run_dir: Location, loaded: LoadedRunFile) -> bool:
    summary = RunFolder(run_dir).summary
    if checkpoint.step != loaded.file.train.num_steps or not summary.exists():
        return False
    if TrainDocument.model_validate_json(summary.read_bytes()).steps != checkpoint.step:
        return False  # of an earlier, shorter end
    try:
        checkpoint.verify()
    except CheckpointError as error:
        logger.warning("%s", error)
        return False  # the workers go on from the checkpoint before
    return True


def _check_run_id(run_id: str | None) -> None:
    if run_id is not None and (run_id == NEWEST or not re.fullmatch(NAME_PATTERN, run_id)):
        rule = f"is not a name that matches {NAME_PATTERN}, or is the word {NEWEST}"
        raise RunFileError(Problem(f"--run-id {run_id}", rule, "use letters, digits, dots, dashes and underscores"))


def _conclude(run: ResolvedRun, run_dir: Location, finished: Finished, model_dir: str) -> TrainDocument:
    """The summary, written beside the run together with its page."""
    outcome = finished.outcome
    progress, device = outcome.progress, outcome.device
    per_peak = None
    if outcome.tokens_per_s is not None and device.peak_flops is not None:
        per_peak = outcome.tokens_per_s / (device.peak_flops * run.layout.world_size)
    document = TrainDocument(
        run_dir=str(run_dir),
        model_dir=model_dir,
        steps=progress.step,
        loss_first=progress.loss_first,
        loss_last=progress.loss_last,
        validation_loss=progress.validation_loss,
        tokens_per_s=outcome.tokens_per_s,
        mfu=None if per_peak is None else per_peak * run.flops_per_token,
        mfu_causal=None if per_peak is None else per_peak * run.flops_per_token_causal,
        peak_flops_source=device.peak_flops_source,
        peak_memory_bytes=outcome.peak_memory_bytes,
        average_memory_bytes=outcome.average_memory_bytes,
        skipped_steps=progress.skipped_steps,
        restarts=finished.restarts,
        failures=read_failures(RunFolder(run_dir)),
        rewinds=progress.rewinds,
        target_loss_step=progress.target_loss_step,
        target_loss_s=progress.target_loss_s,
        strategy=run.strategy,
        world_size=run.layout.world_size,
    )
    folder = RunFolder(run_dir)
    folder.report.write_text(
        run_page([record.model_dump(mode="json") for record in read_records(folder.metrics)], document, f"{run.file.name}/{run.run_id}")
    )
    folder.summary.write_text(document.model_dump_json(indent=1))
    return document
