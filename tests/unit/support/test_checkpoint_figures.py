"""The figures of `make benchmark-checkpoints`, from records of runs whose every second is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.checkpoint_figures import RunFigures, compared, run_figures

from rayapp.metrics.record import CheckpointRecord, MetricsRecord, StepRecord

STEP_S, COPY_S, WRITE_S = 1.0, 0.25, 2.5
SLOWED_S = 1.5
FIRST, LAST = 4, 12


def step_record(step: int, time: float, step_s: float) -> StepRecord:
    return StepRecord(
        time=time, step=step, loss=1.0, grad_norm=1.0, learning_rate=1e-3, tokens_per_s=1.0, samples_per_s=1.0, step_s=step_s,
        data_wait_share=0.0, checkpoint_share=0.0, mfu=None, mfu_causal=None, memory_bytes=1, peak_memory_bytes=1, num_valid_tokens=1,
        applied=True, skipped_steps=0,
    )  # fmt: skip


def checkpoint_record(step: int, time: float, seconds: float) -> CheckpointRecord:
    return CheckpointRecord(time=time, step=step, seconds=seconds, write_seconds=WRITE_S, bytes=1200)


def written_beside() -> list[MetricsRecord]:
    """Checkpoints at 4, 8 and 12; the two steps after each are slowed, and the write ends in the second of them."""
    records: list[MetricsRecord] = []
    now = 1000.0
    for step in range(1, 14):
        step_s = SLOWED_S if step > 4 and step % 4 in (1, 2) else STEP_S
        now += step_s
        if step % 4 == 2 and step > 4:
            records.append(checkpoint_record(step - 2, now, COPY_S if step > 6 else 9.0))  # found complete
        if step % 4 == 0:
            now += COPY_S
        records.append(step_record(step, now, step_s))
    records += [checkpoint_record(12, now, COPY_S), checkpoint_record(13, now, 50.0)]
    return records


def waited_for() -> list[MetricsRecord]:
    records: list[MetricsRecord] = []
    now = 1000.0
    for step in range(1, 14):
        now += STEP_S
        if step % 4 == 0 or step == 13:
            now += WRITE_S
            records.append(checkpoint_record(step, now, WRITE_S))
        records.append(step_record(step, now, STEP_S))
    return records


def without() -> list[MetricsRecord]:
    return [*(step_record(step, 1000.0 + STEP_S * step, STEP_S) for step in range(1, 14)), checkpoint_record(13, 1020.0, WRITE_S)]


def figures(records: list[MetricsRecord]) -> RunFigures:
    return run_figures(records, first=FIRST, last=LAST)


def test_a_run_that_is_written_beside_its_steps() -> None:
    run = figures(written_beside())
    assert run.wall_s == pytest.approx(4 * STEP_S + 4 * SLOWED_S + 2 * COPY_S)
    assert run.beside_s == [SLOWED_S] * 4
    assert run.apart_s == [STEP_S] * 4
    assert run.first_held_up_s == 9.0
    assert run.held_up_s == [COPY_S] * 2
    assert run.write_s == [WRITE_S] * 2
    assert run.num_waited == 0
    assert run.beside_ratio == pytest.approx(SLOWED_S / STEP_S)
    assert run.lost_s == pytest.approx(COPY_S + 2 * (SLOWED_S - STEP_S))
    assert run.own_ratio == pytest.approx((4 * STEP_S + 4 * SLOWED_S + 2 * COPY_S) / (8 * STEP_S))


def test_a_step_that_meets_the_end_of_a_write_is_beside_it() -> None:
    records = [
        record.model_copy(update={"write_seconds": 3.5}) if isinstance(record, CheckpointRecord) else record for record in written_beside()
    ]
    assert figures(records).beside_s == [SLOWED_S, SLOWED_S, STEP_S] * 2


def test_a_run_that_waits_for_its_checkpoints() -> None:
    run = figures(waited_for())
    assert run.wall_s == pytest.approx(8 * STEP_S + 2 * WRITE_S)
    assert (run.beside_s, run.apart_s) == ([], [STEP_S] * 8)
    assert run.held_up_s == [WRITE_S] * 2
    assert run.num_waited == 2
    assert run.beside_ratio is None
    assert run.lost_s == pytest.approx(WRITE_S)
    assert run.own_ratio == pytest.approx((8 * STEP_S + 2 * WRITE_S) / (8 * STEP_S))


def test_the_last_checkpoint_of_a_run_is_not_counted() -> None:
    run = figures(without())
    assert run.wall_s == pytest.approx(8 * STEP_S)
    assert (run.first_held_up_s, run.held_up_s, run.write_s) == (None, [], [])
    assert (run.lost_s, run.own_ratio) == (None, None)
    assert run.checkpoint_bytes == 1200


def test_a_run_whose_steps_are_all_beside_a_write_says_nothing_about_others() -> None:
    records = [
        record.model_copy(update={"write_seconds": 5.5}) if isinstance(record, CheckpointRecord) else record for record in written_beside()
    ]
    run = figures(records)
    assert (run.apart_s, run.beside_ratio, run.lost_s, run.own_ratio) == ([], None, None, None)


def test_rounds_are_compared_one_by_one() -> None:
    """The second round's machine is half as fast, and both rounds lose the same share."""
    waited, plain = figures(waited_for()), figures(without())
    comparison = compared([waited, replace(waited, wall_s=2 * waited.wall_s)], [plain, replace(plain, wall_s=2 * plain.wall_s)])
    assert comparison.time_ratios == pytest.approx([13 / 8, 13 / 8])
    assert comparison.own_ratios == pytest.approx([13 / 8, 13 / 8])
    assert comparison.lost_s == pytest.approx(WRITE_S)
    assert comparison.num_checkpoints == 4
    assert comparison.beside_ratio is None


def test_runs_without_checkpoints_lose_nothing() -> None:
    plain = figures(without())
    comparison = compared([plain], [plain])
    assert comparison.time_ratios == [1.0]
    assert (comparison.own_ratios, comparison.lost_s, comparison.held_up_s, comparison.first_held_up_s) == ([], None, None, None)
