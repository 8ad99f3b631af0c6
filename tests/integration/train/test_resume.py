"""A run that is continued in new processes ends exactly as if it had never stopped, and its export is what was validated."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prepared import checkpoint_folder, claimed, prepare_small, run_on
from support.ranks import run_ranks
from support.worker_runs import work_on

from rayapp.checkpoint.export import export_run
from rayapp.config.schema import CacheSection
from rayapp.data.shards import PreparedData, ShardReader
from rayapp.fragments import PARTS, FragmentedState
from rayapp.storage import open_location

NUM_STEPS = 8
STOPPED_AT = 4


@dataclass(frozen=True)
class Case:
    family: str
    strategy: str
    precision: str
    config: dict[str, Any] | None = None
    data: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.strategy}-{self.precision}"


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CASES = [
    Case("llama", "ddp", "fp32"),
    Case("llama", "ddp", "bf16"),
    Case("llama", "zero-1", "bf16"),
    Case("llama", "zero-2", "fp32"),
    Case("llama", "zero-3", "fp32"),
    Case("llama", "zero-3", "bf16"),
    Case("gpt2", "zero-1", "fp32", config=DROPOUT),
    Case("gpt2", "zero-2", "bf16"),
    Case("qwen2", "zero-2", "fp32"),
    Case("opt", "zero-2", "fp32"),
    Case("opt", "zero-3", "bf16", data={"reset_attention": True}),
    Case("opt", "ddp", "fp32", data={"reset_attention": True}),
    Case("mixtral", "zero-2", "fp32"),
    Case("simple_transformer", "zero-2", "fp32"),
]


@dataclass(frozen=True)
class Runs:
    """What became of one case: the folders of both runs, and rank 0's progress and lines of each."""

    whole: Path
    resumed: Path
    whole_end: tuple[dict[str, Any], list[str]]
    resumed_end: tuple[dict[str, Any], list[str]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare_small(tmp_path_factory.mktemp("data") / "prepared")


@pytest.fixture(scope="module")
def runs(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Every case to its end, and once more in new processes from a copy without its last checkpoint."""
    root = tmp_path_factory.mktemp("runs")
    whole = {case.name: run_of(case, prepared, root / "whole" / case.name) for case in CASES}
    whole_ends = run_ranks(work_on, 2, [run.model_dump_json() for run in whole.values()])[0]
    resumed = []
    for name, run in whole.items():
        folder = root / "resumed" / name
        shutil.copytree(root / "whole" / name, folder)
        shutil.rmtree(checkpoint_folder(folder, NUM_STEPS))
        resumed.append(claimed(run, folder))
    resumed_ends = run_ranks(work_on, 2, [run.model_dump_json() for run in resumed])[0]
    return {
        name: Runs(root / "whole" / name, root / "resumed" / name, first, second)
        for name, first, second in zip(whole, whole_ends, resumed_ends, strict=True)
    }


def run_of(case: Case, prepared: PreparedData, folder: Path) -> Any:
    return run_on(
        prepared,
        folder,
        case.family,
        config=case.config,
        strategy=case.strategy,
        train={"precision": case.precision, "num_steps": NUM_STEPS, "validation_interval_steps": 3, "validation_rows": 1000},
        optim={"warmup_steps": 2, "schedule": "cosine"},
        data=case.data or {},
        checkpoint={"interval_steps": STOPPED_AT, "keep_last": 5},
    )


def step_records(run_dir: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "learning_rate" in record]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resuming_changes_no_bit(case: Case, runs: dict[str, Runs]) -> None:
    found = runs[case.name]
    assert any(f"continuing from the checkpoint of step {STOPPED_AT}" in line for line in found.resumed_end[1])
    assert not any("continuing" in line for line in found.whole_end[1])
    assert found.whole_end[0]["step"] == found.resumed_end[0]["step"] == NUM_STEPS
    assert found.whole_end[0]["validation_loss"] == found.resumed_end[0]["validation_loss"]
    for key in ("step", "loss", "grad_norm", "learning_rate", "num_valid_tokens"):
        whole = [record[key] for record in step_records(found.whole)]
        assert whole == [record[key] for record in step_records(found.resumed)], key
        assert len(whole) == NUM_STEPS
    states = [FragmentedState(checkpoint_folder(folder, NUM_STEPS)) for folder in (found.whole, found.resumed)]
    before = FragmentedState(checkpoint_folder(found.whole, STOPPED_AT))
    assert [state.step for state in (before, *states)] == [STOPPED_AT, NUM_STEPS, NUM_STEPS]
    for name in states[0].names():
        for part in PARTS:
            assert torch.equal(*(state.whole(name, part) for state in states)), f"{part} of {name}"
        assert not torch.equal(before.whole(name, "exp_avg_sq"), states[0].whole(name, "exp_avg_sq")), f"{name} was not trained"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loss_falls(case: Case, runs: dict[str, Runs]) -> None:
    progress = runs[case.name].resumed_end[0]
    assert progress["loss_last"] < progress["loss_first"]


@pytest.mark.parametrize("case", [case for case in CASES if case.precision == "fp32" and case.data is None], ids=lambda case: case.name)
def test_the_export_has_the_validation_loss_of_the_run(case: Case, runs: dict[str, Runs], prepared: PreparedData, tmp_path: Path) -> None:
    """Computed by transformers alone, over the held-out rows."""
    from transformers import AutoModelForCausalLM

    export_run(open_location(str(runs[case.name].resumed)), open_location(str(tmp_path / "model")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with ShardReader(prepared, CacheSection()) as reader:
        rows = [reader[prepared.num_train_rows + index] for index in range(prepared.num_validation_rows)]
        tokens = torch.stack([torch.tensor(row.tokens, dtype=torch.int64) for row in rows])
        counts = torch.stack([torch.tensor(row.loss_mask) for row in rows])[:, 1:]
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    assert len(rows) > 8
    assert float(losses[counts].mean()) == pytest.approx(runs[case.name].resumed_end[0]["validation_loss"], abs=1e-5)
