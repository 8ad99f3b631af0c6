"""A Ray of its own, whose Prometheus port is read as Prometheus would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SESSION = """
import json, sys, time, urllib.request
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
port = ray.nodes()[0]["MetricsExportPort"]

@ray.remote
class Worker:
    def train(self):
        from rayapp.metrics.ray_gauge import RayGaugeSink
        from rayapp.metrics.record import CheckpointRecord, StepRecord, ValidationRecord
        self.sink = RayGaugeSink("20261201-k3f9", "quickstart")
        step = dict(time=1.0, learning_rate=2e-3, tokens_per_s=5400.0, samples_per_s=21.0, step_s=1.5, data_wait_share=0.004,
                    checkpoint_share=0.0, mfu=0.41, mfu_causal=None, memory_bytes=10, peak_memory_bytes=20, num_valid_tokens=8192,
                    applied=True, skipped_steps=0)
        self.sink.write(StepRecord(step=6, loss=8.25, grad_norm=1.5, communication_share=0.125, **step))
        self.sink.write(StepRecord(step=7, loss=7.75, grad_norm=float("inf"), **step))
        self.sink.write(ValidationRecord(time=2.0, step=7, loss=7.5, perplexity=1808.0, seconds=2.0, num_valid_tokens=1, elapsed_s=9.0))
        self.sink.write(CheckpointRecord(time=3.0, step=7, seconds=0.5, bytes=100))
        self.sink.flush()

worker = Worker.remote()
ray.get(worker.train.remote())
deadline = time.monotonic() + 90
while time.monotonic() < deadline:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("ray_rayapp_")]
    if any("validation_loss" in line for line in lines) and any("checkpoint_step" in line for line in lines):
        break
    time.sleep(0.5)
print(json.dumps(lines))
"""


def exported() -> dict[str, tuple[str, float]]:
    """Each gauge's labels and value, from a session in a process of its own."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SESSION], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    gauges = {}
    for line in json.loads(done.stdout.splitlines()[-1]):
        name_and_labels, value = line.rsplit(" ", 1)
        name, labels = name_and_labels.split("{", 1)
        gauges[name] = (labels, float(value))
    return gauges


@pytest.fixture(scope="module")
def gauges() -> dict[str, tuple[str, float]]:
    return exported()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 7.0),
        ("loss", 7.75),
        ("learning_rate", 2e-3),
        ("tokens_per_s", 5400.0),
        ("mfu", 0.41),
        ("memory_bytes", 10.0),
        ("communication_share", 0.125),  # of the last step that was profiled
        ("validation_loss", 7.5),
        ("checkpoint_step", 7.0),
    ],
)
def test_prometheus_reads_the_last_figure_with_the_run_s_tags(gauges, name, value):
    labels, read = gauges[f"ray_rayapp_{name}"]
    assert read == pytest.approx(value)
    assert 'run="20261201-k3f9"' in labels
    assert 'family="quickstart"' in labels


def test_what_is_not_known_is_not_exported(gauges):
    assert "ray_rayapp_mfu_causal" not in gauges


def test_what_is_not_finite_is_not_shown_as_the_figure_before(gauges):
    assert "ray_rayapp_grad_norm" not in gauges


def test_metrics_need_no_ray():
    code = """
import sys
import rayapp.metrics.clock, rayapp.metrics.communication, rayapp.metrics.jsonl, rayapp.metrics.memory
import rayapp.metrics.record, rayapp.metrics.sink, rayapp.metrics.tensorboard
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
