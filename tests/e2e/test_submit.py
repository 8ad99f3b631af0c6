"""`ray job submit --working-dir .` on a cluster that asks for a token."""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT, TOKEN, CommandLine, Head
from transformers import AutoModelForCausalLM

JOB_TIMEOUT_S = 400.0
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
QUICKLY = [
    "data.sequence_length=64", "data.validation_fraction=0.1", "data.tokenizer.train.vocab_size=512", "model.config.hidden_size=64",
    "model.config.intermediate_size=128", "model.config.num_hidden_layers=2", "batch={global_batch_size: 8}", "parallel={kind: auto}",
    "train={num_steps: 3, num_workers: 2, device: cpu, validation_rows: 16}", "optim.warmup_steps=1",
]  # fmt: skip


def rest(head: Head, path: str) -> Any:
    """What the dashboard answers."""
    request = urllib.request.Request(f"{head.dashboard_url}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def submitted(head: Head, *arguments: str) -> tuple[dict[str, Any], str]:
    """The finished job, as the cluster describes it, and its log."""
    job = f"test-{uuid.uuid4().hex[:8]}"
    command = ["ray", "job", "submit", "--address", head.dashboard_url, "--working-dir", str(ROOT), "--submission-id", job, "--no-wait"]
    done = head.commands.run(*command, "--", "python", "-m", "rayapp", *arguments)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while (described := rest(head, f"/api/jobs/{job}"))["status"] not in TERMINAL:
        assert time.monotonic() < deadline, described
        time.sleep(0.5)
    return described, rest(head, f"/api/jobs/{job}/logs")["logs"]


def test_a_submitted_job_prepares_trains_and_exports(head: Head, corpus: Path, tmp_path: Path) -> None:
    job, log = submitted(
        head, "train", "jobs/quickstart.yaml", f"storage.path={tmp_path}", f"data.source={corpus}", *QUICKLY, "--run-id", "r1"
    )
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0), log
    run_dir = tmp_path / "quickstart" / "r1"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["model_dir"]) == (3, 2, str(run_dir / "model"))
    # the least sharded strategy, for a model of this size fits anywhere
    assert summary["strategy"] == "ddp"
    assert "ddp needs" in json.loads((run_dir / "run.json").read_text())["strategy_reason"]
    assert AutoModelForCausalLM.from_pretrained(run_dir / "model").config.hidden_size == 64
    assert "step 3/3  loss" in log


def test_a_relative_storage_is_refused_in_the_job(head: Head) -> None:
    job, log = submitted(head, "train", "jobs/quickstart.yaml", "storage.path=somewhere")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 2), log
    assert (
        "error: command line: storage.path=somewhere is relative, and a submitted job's folder is thrown away; "
        "use an absolute path that every node shares, or s3://..." in log
    )


@pytest.mark.parametrize("token", [None, "fedcba9876543210" * 4], ids=["none", "another"])
def test_a_job_without_the_clusters_token_is_refused(head: Head, token: str | None, tmp_path: Path) -> None:
    stranger = CommandLine.in_folder(tmp_path)
    if token is not None:
        stranger.environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    before = rest(head, "/api/jobs/")
    done = stranger.run("ray", "job", "submit", "--address", head.dashboard_url, "--no-wait", "--", "true")
    assert done.returncode != 0
    assert "token" in done.stderr.lower()
    assert rest(head, "/api/jobs/") == before
