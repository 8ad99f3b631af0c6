"""The time of training that checkpoints cost: written beside training, written while training waits, and none at all.

    make benchmark-checkpoints
    .venv/bin/python tests/benchmarks/checkpoint_cost.py --weights-millions 8 --rounds 1 --json cost.json

Trains a Llama of each size by the worker itself, without Ray: on gloo ranks, or with NCCL where there is a GPU. A weight has
12 bytes of state: itself and Adam's two moments in fp32. The three variants are

    without        no checkpoint before the run's last step
    asynchronous   one every --interval steps, with checkpoint.asynchronous=true
    waiting        the same with checkpoint.asynchronous=false

A round starts each of them in fresh processes, every other round in the reverse order, so that a machine whose speed drifts is
fair to all. Compare figures of one table only. The measured steps come after the first checkpoint, which is shown by itself: it
allocates the memory that later ones copy into. A run's last checkpoint, which training always waits for, comes after them.

Columns of a run:
    wall s            the measured steps and what held them up
    step s            median of a step without what checkpoints held up
    first s           how long the run's first checkpoint held training up
    held up s         how long one of the others did: median
    write s           how long it took until it was complete: median; asynchronous: after the copy
    beside s          median step while a checkpoint was written
    apart s           median of the other steps

Columns of the comparison that follows the runs of a size: medians over the rounds, and their lowest and highest:
    beside            beside s over apart s
    lost s            what one checkpoint costs: held up s, and the surplus of the steps beside its writing
    own               time over that without checkpoints, by lost s and apart s: from medians of the same run alone, which a machine with
                      other work disturbs least
    time              wall s over that of the run of the same round without checkpoints
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torchrun import run_under_torchrun

from rayapp.checkpoint.runs import RunFolder
from rayapp.config.resolved import ResolvedDevice, ResolvedRun
from rayapp.config.schema import Precision
from rayapp.data.shards import PreparedData
from rayapp.metrics.jsonl import read_records
from rayapp.storage import open_location
from rayapp.train.loop import FIRST_PROFILED_STEP

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.checkpoint_figures import Comparison, RunFigures, compared, median_of, run_figures
from support.prepared import TEXTS, prepare_small, run_on

Kind = Literal["cpu", "cuda"]
Variant = Literal["without", "asynchronous", "waiting"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

WARMUP_STEPS = FIRST_PROFILED_STEP + 1
"""Up to the step that is profiled for its communication, which is then the only one."""

STRATEGY = "zero-2"
VOCABULARY = 8192
LAYERS = 8
HEAD_WIDTH = 64
WIDTH_SHARE = 300
"""Weights over the square of the model's width: a wide feed-forward makes up the rest."""


@dataclass(frozen=True)
class Machine:
    """What a kind of device is given to do, so that a step takes from 0.3 to 2 s.

    Attributes:
        ranks: worker processes.
        precision: of the forward and backward pass.
        sequence_length: tokens of a row.
        rows: in one micro-batch at most.
        step_flops: of one rank's step.
    """

    ranks: int
    precision: Precision
    sequence_length: int
    rows: int
    step_flops: float


MACHINES: dict[Kind, Machine] = {
    "cpu": Machine(ranks=2, precision="fp32", sequence_length=64, rows=16, step_flops=2e10),
    "cuda": Machine(ranks=1, precision="bf16", sequence_length=1024, rows=16, step_flops=1e14),
}


@dataclass(frozen=True)
class Plan:
    """How every run is made.

    Attributes:
        kind: of the device.
        ranks: worker processes.
        precision: of the forward and backward pass.
        interval: steps from one checkpoint to the next.
        steps: that are measured.
        rounds: runs of each variant and size.
    """

    kind: Kind
    ranks: int
    precision: Precision
    interval: int
    steps: int
    rounds: int

    @property
    def first(self) -> int:
        """The last step that is not measured: a checkpoint follows it."""
        return math.ceil(WARMUP_STEPS / self.interval) * self.interval

    @property
    def last(self) -> int:
        """The last measured step; one more ends the run."""
        return self.first + self.steps


def main() -> None:
    given = arguments()
    plan = Plan(given.kind, given.ranks, given.precision, given.interval, given.steps, given.rounds)
    document: dict[str, Any] = {"torch": torch.__version__, "strategy": STRATEGY, **dataclasses.asdict(plan), "sizes": []}
    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-", dir=given.storage) as folder:
        machine = f"{plan.ranks} x {plan.kind}, {plan.precision}, {STRATEGY}"
        say(f"{machine}; {plan.steps} measured steps a run, a checkpoint every {plan.interval}; in {folder}")
        prepared = prepare_small(Path(folder) / "prepared", TEXTS * 20, MACHINES[plan.kind].sequence_length)
        for weights in given.weights_millions:
            size: dict[str, Any] = {"weights_millions": weights, "runs": []}
            document["sizes"].append(size)
            measure(weights, plan, prepared, Path(folder), size, lambda: save(document, given.json))


def arguments() -> argparse.Namespace:
    kind: Kind = "cuda" if torch.cuda.is_available() else "cpu"
    machine = MACHINES[kind]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-millions", type=sizes, default="8,80", metavar="M,M", help="sizes of the model (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each variant and size (default: %(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=24, help="measured steps of a run, a multiple of --interval (default: %(default)s)"
    )
    parser.add_argument(
        "--interval",
        type=positive,
        default=8,
        help="steps between two checkpoints; they should take longer than a checkpoint takes to write (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=positive, default=machine.ranks, help="workers (default here: %(default)s)")
    parser.add_argument("--precision", choices=get_args(Precision), default=machine.precision, help="(default here: %(default)s)")
    parser.add_argument(
        "--storage",
        type=Path,
        metavar="DIR",
        help="where the runs lie for their time, up to two checkpoints large (default: a temporary folder)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured here, anew after every run")
    given = parser.parse_args()
    if given.steps % given.interval:
        parser.error(f"--steps {given.steps} is not a multiple of --interval {given.interval}")
    given.kind = kind
    return given


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def sizes(text: str) -> list[float]:
    millions = [float(part) for part in text.split(",")]
    if min(millions) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a size of less than 1 million weights")
    return millions


def measure(millions: float, plan: Plan, prepared: PreparedData, folder: Path, size: dict[str, Any], keep: Callable[[], None]) -> None:
    """Run all variants of one size, telling every run and then the comparison; ``size`` takes what is kept."""
    runs: dict[Variant, list[RunFigures]] = {variant: [] for variant in VARIANTS}
    for number in range(plan.rounds):
        for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            run = resolved_run(millions, variant, plan, prepared, folder / f"{millions:g}-{number}-{variant}")
            if not size["runs"]:
                size["num_parameters"] = run.num_parameters
                say(f"\n{run.num_parameters / 1e6:.1f} M weights, {12 * run.num_parameters / 1e6:,.0f} MB of state")
                say(RUN_HEADER)
            figures = figures_of(run, plan)
            runs[variant].append(figures)
            say(run_line(number + 1, variant, figures))
            size["runs"].append({"round": number + 1, "variant": variant, **dataclasses.asdict(figures)})
            keep()
    say(f"\n{COMPARISON_HEADER}")
    size["comparisons"] = {}
    for variant in VARIANTS:
        comparison = compared(runs[variant], runs["without"])
        say(comparison_line(variant, comparison))
        size["comparisons"][variant] = dataclasses.asdict(comparison)
    for line in remarks(runs, plan):
        say(line)
    keep()


def resolved_run(millions: float, variant: Variant, plan: Plan, prepared: PreparedData, run_dir: Path) -> ResolvedRun:
    machine = MACHINES[plan.kind]
    row_flops = 6e6 * millions * machine.sequence_length
    rows = max(1, round(machine.step_flops / row_flops))
    num_steps = plan.last + 1
    run = run_on(
        prepared,
        run_dir,
        "llama",
        config=model_config(round(1e6 * millions)),
        strategy=STRATEGY,
        world_size=plan.ranks,
        micro_batch_size=min(rows, machine.rows),
        accumulation=max(1, round(rows / machine.rows)),
        data={"sequence_length": machine.sequence_length},
        optim={"learning_rate": 1e-4},
        train={
            "precision": plan.precision,
            "num_steps": num_steps,
            "validation_interval_steps": num_steps,
            "validation_rows": 1,
            "loss_chunk_tokens": 1024,
        },
        checkpoint={
            "interval_steps": num_steps if variant == "without" else plan.interval,
            "asynchronous": variant == "asynchronous",
            "keep_last": 1,
            "keep_best": 0,
        },
        metrics={"communication_interval_steps": num_steps},
    )
    device = ResolvedDevice(kind=plan.kind, name=plan.kind, memory_bytes=None, peak_flops=None, peak_flops_source="asked of the device")
    return run.model_copy(update={"device": device})


def model_config(num_weights: int) -> dict[str, Any]:
    """A Llama of about so many weights: few layers, as wide as is usual, with a feed-forward that makes up the rest."""
    width = HEAD_WIDTH * max(1, round(math.sqrt(num_weights / WIDTH_SHARE) / HEAD_WIDTH))
    rest = num_weights - VOCABULARY * width - LAYERS * 4 * width**2
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width // HEAD_WIDTH,
        "intermediate_size": 64 * max(1, round(rest / (64 * 3 * width * LAYERS))),
    }


def figures_of(run: ResolvedRun, plan: Plan) -> RunFigures:
    """Train, and leave nothing of the run behind."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            run_under_torchrun(run, output)
        except BaseException:
            output.seek(0)
            sys.stderr.write(output.read())
            raise
    records = read_records(RunFolder(open_location(run.run_dir)).metrics)
    shutil.rmtree(run.run_dir)
    return run_figures(records, first=plan.first, last=plan.last)


RUN_HEADER = "round  variant         wall s   step s  first s  held up s  write s  beside s  apart s"


def run_line(number: int, variant: Variant, figures: RunFigures) -> str:
    cells = [
        number_in(8, figures.wall_s),
        number_in(9, figures.step_s),
        number_in(9, figures.first_held_up_s),
        number_in(11, median_of(figures.held_up_s)),
        number_in(9, median_of(figures.write_s)),
        number_in(10, median_of(figures.beside_s)),
        number_in(9, median_of(figures.apart_s)),
    ]
    return f"{number:<7}{variant:<14}" + "".join(cells)


COMPARISON_HEADER = "variant       checkpoints  first s  held up s  write s   beside   lost s  own                     time"


def comparison_line(variant: Variant, comparison: Comparison) -> str:
    cells = [
        f"{comparison.num_checkpoints:>11}",
        number_in(9, comparison.first_held_up_s),
        number_in(11, comparison.held_up_s),
        number_in(9, comparison.write_s),
        number_in(9, comparison.beside_ratio),
        number_in(9, comparison.lost_s),
        f"  {spread(comparison.own_ratios):<24}{spread(comparison.time_ratios)}",
    ]
    return f"{variant:<14}" + "".join(cells)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})" if ratios else "–"


def number_in(width: int, value: float | None) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}.3f}"


def remarks(runs: dict[Variant, list[RunFigures]], plan: Plan) -> Iterator[str]:
    """What makes the figures something else than they are called."""
    for variant in ("asynchronous", "waiting"):
        made = [len(figures.held_up_s) for figures in runs[variant]]
        planned = plan.steps // plan.interval
        if min(made) < planned:
            yield f"{variant}: {made} checkpoints a run in place of {planned}: one took longer than the interval; lengthen --interval"
    if not all(figures.apart_s for figures in runs["asynchronous"]):
        yield "asynchronous: every step of a run met a write, so that there are none to compare with; lengthen --interval"
    num_waited = sum(figures.num_waited for figures in runs["asynchronous"])
    if num_waited:
        yield f"asynchronous: training waited for the writing of {num_waited} checkpoints, since the host had no memory for a copy"


def save(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=1) + "\n")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
