"""Whole runs of the worker, as the ranks of a test make them."""

from __future__ import annotations

from typing import Any

import torch

from rayapp.train.lifeline import LocalLifeline
from rayapp.train.worker import Refusal, run_worker


def work_on(run_jsons: list[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Train every run to its end; for each of them its progress and the lines that were told."""
    results = []
    for run_json in run_jsons:
        lines: list[str] = []
        outcome = run_worker(
            run_json, device=torch.device("cpu"), lifeline=LocalLifeline(lines.append), optional_sinks=lambda _run, _step: []
        )
        if isinstance(outcome, Refusal):
            raise outcome.error
        results.append((outcome.progress.model_dump(), lines))
    return results
