"""Rows that nobody could learn from, in the middle of a run: it warns, leaves their steps out, or goes back and around them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prepared import TEXTS, checkpoint_folder, prepare_small, run_on
from support.ranks import run_ranks
from support.worker_runs import work_on

from rayapp.checkpoint.export import export_run
from rayapp.config.schema import CacheSection
from rayapp.data.group import is_held_out
from rayapp.data.order import RowOrder, SourceRows
from rayapp.data.shards import PreparedData, ShardReader
from rayapp.fragments import FragmentedState
from rayapp.storage import open_location

NUM_STEPS = 40
INTERVAL_STEPS = 5
ROWS_A_STEP = 8
KINDS = ("warn", "skip", "rewind")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Rows come in the order of the texts: some that can be learnt, then noise, then some that can be learnt."""
    letters = random.Random(0)
    texts = ("".join(chr(letters.randrange(33, 126)) for _ in range(110)) for _ in range(100))
    noise = next(text for text in texts if not is_held_out(text, 0.2))
    return prepare_small(tmp_path_factory.mktemp("data") / "prepared", [*TEXTS * 2, *TEXTS[:60], noise, *TEXTS[60:], *TEXTS])


@pytest.fixture(scope="module")
def runs(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any], list[str]]]:
    """One run a kind on two ranks: its folder, and rank 0's progress and lines."""
    root = tmp_path_factory.mktemp("runs")
    resolved = [
        run_on(
            prepared,
            root / kind,
            "llama",
            strategy="zero-2" if kind == "skip" else "ddp",
            train={
                "precision": "fp32",
                "num_steps": NUM_STEPS,
                "on_spike": kind,
                "spike_threshold": 10.0,
                "validation_interval_steps": 100,
                "validation_rows": 8,
            },
            data={"shuffle": False},
            checkpoint={"interval_steps": INTERVAL_STEPS, "keep_last": 50},
        )
        for kind in KINDS
    ]
    ends = run_ranks(work_on, 2, [run.model_dump_json() for run in resolved])[0]
    return {kind: (root / kind, *end) for kind, end in zip(KINDS, ends, strict=True)}


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def spiked(run_dir: Path) -> list[int]:
    return [record["step"] for record in records(run_dir, "event") if record["event"] == "loss_spike"]


def test_a_spike_is_recorded_and_told(runs: dict[str, tuple[Path, dict[str, Any], list[str]]]) -> None:
    run_dir, progress, lines = runs["warn"]
    first, *_ = spiked(run_dir)
    losses = {record["step"]: record["loss"] for record in records(run_dir, "step")}
    assert losses[first] > 1.1 * max(losses[step] for step in range(first - 5, first)), "the noise is no spike"
    assert all(record["applied"] for record in records(run_dir, "step"))
    assert (progress["step"], progress["skipped_steps"], progress["rewinds"], progress["data_offset"]) == (NUM_STEPS, 0, 0, 0)
    assert any(line.startswith(f"loss spike at step {first}: loss ") for line in lines)


def test_the_step_of_a_spike_is_left_out(runs: dict[str, tuple[Path, dict[str, Any], list[str]]]) -> None:
    run_dir, progress, _ = runs["skip"]
    left_out = [record["step"] for record in records(run_dir, "step") if not record["applied"]]
    assert left_out == spiked(run_dir)
    assert left_out[0] == spiked(runs["warn"][0])[0]
    assert all(record["loss"] is not None for record in records(run_dir, "step"))
    assert (progress["step"], progress["skipped_steps"]) == (NUM_STEPS, len(left_out))
    assert FragmentedState(checkpoint_folder(run_dir, NUM_STEPS)).step == NUM_STEPS - len(left_out)


def test_a_run_goes_back_and_leaves_the_rows_out(
    runs: dict[str, tuple[Path, dict[str, Any], list[str]]], prepared: PreparedData, tmp_path: Path
) -> None:
    """The first loss after it went back is that of the checkpoint's weights, by transformers, on the rows that follow the spike's."""
    from transformers import AutoModelForCausalLM

    run_dir, progress, lines = runs["rewind"]
    (rewind,) = [record for record in records(run_dir, "event") if record["event"] == "rewind"]
    spike = spiked(runs["warn"][0])[0]
    back = rewind["step"]
    assert 0 <= spike - 1 - back < INTERVAL_STEPS, "the newest checkpoint before the spike"
    assert f"at step {spike}; back to the checkpoint of step {back}" in rewind["detail"]
    assert any(line.startswith("rewind: ") for line in lines)
    assert progress["rewinds"] == 1
    steps = [record["step"] for record in records(run_dir, "step")]
    assert steps == list(range(1, NUM_STEPS + 1)), "what was made before it went back is cut off"
    assert progress["data_offset"] == spike - back

    export_run(open_location(str(run_dir)), open_location(str(tmp_path / "model")), step=back, dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    order = RowOrder([SourceRows(prepared.num_train_rows, 1.0)], seed=0, shuffle=False)
    with ShardReader(prepared, CacheSection()) as reader:
        rows = [reader[order.row_at(spike * ROWS_A_STEP + index)] for index in range(ROWS_A_STEP)]
        tokens = torch.stack([torch.tensor(row.tokens, dtype=torch.int64) for row in rows])
        counts = torch.stack([torch.tensor(row.loss_mask) for row in rows])[:, 1:]
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    found = next(record["loss"] for record in records(run_dir, "step") if record["step"] == back + 1)
    assert found == pytest.approx(float(losses[counts].mean()), abs=1e-5)
