"""Tokens/s of a run under Ray's TorchTrainer over the same worker started by torchrun, side by side on this machine.

    make benchmark-launch
    .venv/bin/python tests/benchmarks/launch_overhead.py jobs/quickstart.yaml --rounds 3 train.num_steps=20 --json

Rounds alternate between the two, so that a machine whose speed drifts is fair to both; each figure is the median over all
steady steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from torchrun import run_under_torchrun

from rayapp.checkpoint.runs import RunFolder
from rayapp.cluster.connect import connected
from rayapp.cluster.inventory import read_inventory
from rayapp.config.load import LoadedRunFile, load_run_file
from rayapp.config.resolved import ResolvedRun
from rayapp.data.prepare import prepare
from rayapp.data.shards import PreparedData
from rayapp.metrics.clock import warmup_steps
from rayapp.metrics.jsonl import read_records
from rayapp.metrics.record import StepRecord
from rayapp.preflight.derive import Derived, derive_all
from rayapp.preflight.resolve import claim_run, resolve
from rayapp.storage import Location, open_location
from rayapp.train.fit import fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="jobs/quickstart.yaml", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    overrides = given.overrides or ["train.num_steps=20", "train.validation_rows=8"]
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_run_file(given.file, [*overrides, f"storage.path={folder}"])
        rates = measure(loaded, open_location(folder), given.rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["ray"] / medians["torchrun"]
    if given.json:
        print(json.dumps({"tokens_per_s": medians, "ratio": ratio, "num_steps": {name: len(values) for name, values in rates.items()}}))
        return
    for name, rate in medians.items():
        print(f"{name:<10}{rate:>12,.0f} tokens/s  (median of {len(rates[name])} steps)")
    print(f"{'ratio':<10}{ratio:>12.3f}")


def measure(loaded: LoadedRunFile, storage: Location, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of every steady step, by launcher."""
    rates: dict[str, list[float]] = {"torchrun": [], "ray": []}
    with connected("local"):
        prepared = prepare(loaded.file, storage, tell)
        derived = derive_all(loaded, read_inventory(), prepared)
        for number in range(rounds):
            run = start(derived, prepared, storage / "bench" / f"torchrun-{number}")
            run_under_torchrun(run, sys.stderr)
            rates["torchrun"] += steady_rates(run)
            run = start(derived, prepared, storage / "bench" / f"ray-{number}")
            fit(run, tell)
            rates["ray"] += steady_rates(run)
    return rates


def tell(line: str) -> None:
    print(line, file=sys.stderr)


def start(derived: Derived, prepared: PreparedData, run_dir: Location) -> ResolvedRun:
    run = resolve(derived, prepared, run_dir, None)
    claim_run(run_dir, run, "")
    return run


def steady_rates(run: ResolvedRun) -> list[float]:
    """Steps after the warm-up that were not profiled."""
    steps = [r for r in read_records(RunFolder(open_location(run.run_dir)).metrics) if isinstance(r, StepRecord)]
    profiled = {r.step for r in steps if r.communication_share is not None and run.layout.world_size > 1}
    return [r.tokens_per_s for r in steps[warmup_steps(len(steps)) :] if r.step not in profiled]


if __name__ == "__main__":
    main()
