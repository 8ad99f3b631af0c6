"""From a checked run file and prepared data to a resolved run."""

from __future__ import annotations

import os
import secrets
import time

from rayapp.checkpoint.checkpoints import Checkpoint
from rayapp.checkpoint.runs import RunFolder, read_resolved
from rayapp.cluster.connect import in_submitted_job
from rayapp.config.load import LoadedRunFile
from rayapp.config.resolved import ResolvedData, ResolvedDevice, ResolvedLayout, ResolvedRun
from rayapp.config.schema import Precision, RunFile
from rayapp.data.shards import PreparedData
from rayapp.errors import CheckpointError, DataError, Problem, StorageError
from rayapp.hardware import find_accelerator
from rayapp.preflight.derive import Derived
from rayapp.preflight.placement import Placement
from rayapp.storage import Location, open_location

DEEP_CHECK_BYTES = 16 * 2**30
KEPT_ON_RESUME = (("batch", "global_batch_size"), ("train", "seed"), ("data", "shuffle"), ("data", "sequence_length"))


def open_storage(loaded: LoadedRunFile) -> Location:
    """The storage of a run file, proved to be writable.

    Raises:
        StorageError: it cannot be opened or written, or it is relative inside a submitted job.
    """
    path = loaded.file.storage.path
    if in_submitted_job() and "://" not in path and not os.path.isabs(os.path.expanduser(path)):
        raise StorageError(
            Problem(
                f"storage.path={path}",
                "is relative, and a submitted job's folder is thrown away",
                "use an absolute path that every node shares, or s3://...",
                loaded.where("storage.path"),
            )
        )
    storage = open_location(path, retry_s=loaded.file.storage.retry_s)
    probe = storage / f".rayapp-probe-{secrets.token_hex(4)}"
    storage.make_dirs()
    probe.write_bytes(b"")
    probe.delete()
    return storage


def check_prepared(prepared: PreparedData) -> None:
    """Refuse damaged shards. Content is compared where that takes seconds; sizes always are.

    Raises:
        DataError: with the shard.
    """
    prepared.verify(deep=sum(shard.size_bytes for shard in prepared.manifest.shards) <= DEEP_CHECK_BYTES)
    if prepared.num_train_rows == 0:
        raise DataError(
            Problem(f"data {prepared.folder}", "has no row to train on", "give more text, a shorter data.sequence_length or hold out less")
        )


def resolve(derived: Derived, prepared: PreparedData, run_dir: Location, checkpoint: Checkpoint | None) -> ResolvedRun:
    """Everything that a worker needs to know.

    Args:
        derived: the complete run file and its plan.
        prepared: the data.
        run_dir: the run's folder.
        checkpoint: what the run continues from.

    Raises:
        CheckpointError: the run to resume has another model.
        DataError: the run to resume has other data.
    """
    created_at = time.time()
    if checkpoint is not None:
        before = read_resolved(run_dir)
        created_at = before.created_at
        check_same_data(prepared.manifest.fingerprint, before)
        check_resumable(derived, before)
    file, batch, layout = derived.file, derived.batch, derived.layout
    sequence = file.data.sequence_length
    return ResolvedRun(
        run_id=run_dir.name,
        created_at=created_at,
        run_dir=str(run_dir),
        file=file,
        strategy=derived.strategy,
        strategy_reason=derived.strategy_reason,
        layout=ResolvedLayout(
            world_size=layout.world_size,
            dp_size=layout.dp_size,
            pp_size=layout.pp_size,
            tp_size=layout.tp_size,
            micro_batch_size=batch.micro_batch_size,
            gradient_accumulation_steps=batch.gradient_accumulation_steps,
        ),
        device=_device(file, derived.placement),
        data=ResolvedData(
            folder=str(prepared.folder),
            fingerprint=prepared.manifest.fingerprint,
            vocab_size=prepared.vocab_size,
            num_train_rows=prepared.num_train_rows,
            num_validation_rows=prepared.num_validation_rows,
        ),
        transformers_config=derived.model,
        num_parameters=derived.spec.num_parameters,
        flops_per_token=derived.spec.flops_per_token(sequence),
        flops_per_token_causal=derived.spec.flops_per_token_causal(sequence),
        storage_marker=secrets.token_hex(16),
        resume_step=None if checkpoint is None else checkpoint.step,
    )


def _device(file: RunFile, placement: Placement) -> ResolvedDevice:
    peak, source = peak_flops(file, placement)
    return ResolvedDevice(
        kind=placement.device, name=placement.device_name, memory_bytes=placement.memory_bytes, peak_flops=peak, peak_flops_source=source
    )


def peak_flops(file: RunFile, placement: Placement) -> tuple[float | None, str]:
    """FLOP/s of one device for MFU, and where that figure comes from; None where it is not known."""
    if file.metrics.peak_flops is not None:
        return file.metrics.peak_flops, "metrics.peak_flops of the run file"
    if placement.device == "cpu":
        return None, "no peak is known for CPUs; set metrics.peak_flops for MFU"
    return peak_flops_of(placement.device_name, file.train.precision)


def peak_flops_of(name: str, precision: Precision) -> tuple[float | None, str]:
    """The catalogue's dense FLOP/s of an accelerator, and its source; None where it is not known."""
    known = find_accelerator(name)
    peak = known.peak_flops(precision) if known else None
    if known is None or peak is None:
        return None, f"no {precision} peak is known for {name}; set metrics.peak_flops for MFU"
    return peak, f"{known.name}, dense {precision}: {peak / 1e12:.0f} TFLOP/s"


def check_same_data(data_fingerprint: str, before: ResolvedRun) -> None:
    """Refuse to continue a run on other data.

    Raises:
        DataError: the data differs.
    """
    if data_fingerprint != before.data.fingerprint:
        raise DataError(
            Problem(
                f"data {data_fingerprint}",
                f"is not what run {before.run_id} was started on ({before.data.fingerprint})",
                "restore the corpus and the keys under data, or start a new run",
            )
        )


def check_resumable(derived: Derived, before: ResolvedRun) -> None:
    """Refuse to continue a run with another model or in another order of data.

    Raises:
        CheckpointError: the model or the order of data differs.
    """
    problems = []
    for key in sorted(set(derived.model) | set(before.transformers_config)):
        ours, theirs = derived.model.get(key), before.transformers_config.get(key)
        if ours != theirs and key != "transformers_version":
            problems.append(Problem(f"model.config.{key}={ours!r}", f"was {theirs!r} when run {before.run_id} was started", "set it back"))
    for section, key in KEPT_ON_RESUME:
        ours, theirs = getattr(getattr(derived.file, section), key), getattr(getattr(before.file, section), key)
        if ours != theirs:
            rule = f"was {theirs} when run {before.run_id} was started, and the order of data hangs on it"
            problems.append(Problem(f"{section}.{key}={ours}", rule, "set it back, or start a new run"))
    if problems:
        raise CheckpointError(*problems)


def claim_run(run_dir: Location, run: ResolvedRun, run_file: str) -> None:
    """Make the run's folder and write what it was resolved to.

    Raises:
        StorageError: the storage refused.
    """
    folder = RunFolder(run_dir)
    run_dir.make_dirs()
    folder.run_file.write_text(run_file)
    folder.resolved.write_text(run.model_dump_json(indent=1))
    folder.marker.write_text(run.storage_marker)
