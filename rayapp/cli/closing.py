"""What a verb ends with for people: where everything of a run lies, and what to try next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text


def closing(run_dir: str, commands: Sequence[str]) -> Group:
    """The places of a run and the next commands.

    Args:
        run_dir: the run's folder.
        commands: to try next, each a line.
    """
    folder, mark, options = run_dir.partition("?")  # a URI's options stand behind its path
    places = {
        "model": f"{folder}/model{mark}{options}",
        "report": f"{folder}/report.html{mark}{options}",
        "metrics": f"{folder}/metrics.jsonl{mark}{options}",
        "TensorBoard": f"tensorboard --logdir {shlex.quote(run_dir)}",
    }
    lines = [f"{label:<12} {place}" for label, place in places.items()]
    return Group(*(Text(line) for line in ["", *lines, "", "Next:", *(f"  {command}" for command in commands)]))


def launcher() -> str:
    """How this command was started, so that the next one starts the same way: `rayapp`, or a Python with `-m rayapp`."""
    if Path(sys.argv[0]).parts[-2:] == ("rayapp", "__main__.py"):
        python = Path(sys.executable)
        shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        return f"{shlex.quote(str(shown))} -m rayapp"
    return "rayapp"


def resume_command(file: str, overrides: Sequence[str], run_id: str, num_steps: int) -> str:
    """Train a run on to ``num_steps``, with the overrides that it was started with."""
    others = [override for override in overrides if not override.startswith("train.num_steps=")]
    return f"{launcher()} train {shlex.join([file, *others, f'train.num_steps={num_steps}'])} --resume {run_id}"


def generate_command(file: str, overrides: Sequence[str]) -> str:
    """Complete a prompt with the newest export."""
    return f"{launcher()} generate {shlex.join([file, *overrides])} --prompt 'def '"


def export_command(run_dir: str) -> str:
    """Export the run's newest checkpoint elsewhere."""
    return f"{launcher()} export {shlex.quote(run_dir)} exported --dtype fp32"


def config_command(file: str, overrides: Sequence[str]) -> str:
    """Show what the run file comes to."""
    return f"{launcher()} config {shlex.join([file, *overrides])}"
