"""stdout holds the result and nothing else; statuses; progress on and off a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rayapp.cli.console import Progress

ROOT = Path(__file__).parents[3]

VERB = """
import os, subprocess, sys, logging, warnings
import typer
from rayapp.cli.console import run_verb
from rayapp.documents import Completion
from rayapp.errors import *

def chatter():
    print("chatter by print")
    os.write(1, b"chatter by the descriptor\\n")
    subprocess.run(["echo", "chatter by a child"], check=True)
    logging.getLogger("rayapp.x").info("chatter by a log")
    warnings.warn("chatter by a warning")

def work(progress):
    chatter()
    progress("step 1/2")
    {work}
    return Completion(prompt="p", completion="é\\n")

def verb(as_json: bool = {as_json}):
    run_verb(work, lambda document: "shown " + document.completion, as_json=as_json)

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(verb)
app()
"""
CHATTER = ["print", "the descriptor", "a child", "a log", "a warning"]


def run(work: str = "pass", as_json: bool = True) -> subprocess.CompletedProcess[str]:
    script = VERB.format(work=work, as_json=as_json)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, encoding="utf-8", cwd=ROOT, timeout=60, check=False
    )


def test_stdout_is_exactly_one_document() -> None:
    done = run()
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"prompt": "p", "completion": "é\n"}
    assert [by for by in CHATTER if f"chatter by {by}" not in done.stderr] == []
    assert "step 1/2\n" in done.stderr


def test_without_json_the_result_is_for_people() -> None:
    done = run(as_json=False)
    assert done.stdout.strip() == "shown é"
    assert "chatter by a child" in done.stderr


@pytest.mark.parametrize(
    ("work", "status", "document"),
    [
        (
            "raise DataError(Problem('a=1', 'is not b', 'use c', 'x.yaml:3'), Problem('d', 'is [e]'))",
            2,
            {"error": "DataError", "problems": ["x.yaml:3: a=1 is not b; use c", "d is [e]"]},
        ),
        ("raise WorkerError('rank 3 ended early')", 1, {"error": "WorkerError", "problems": ["rank 3 ended early"]}),
        ("{}['key']", 1, {"error": "KeyError", "problems": ["'key'"]}),
        ("raise KeyboardInterrupt", 130, {"error": "KeyboardInterrupt", "problems": ["interrupted"]}),
    ],
)
def test_a_failure_has_a_status_and_a_document(work: str, status: int, document: dict[str, object]) -> None:
    done = run(work)
    assert done.returncode == status
    assert json.loads(done.stdout) == document
    for problem in document["problems"]:  # type: ignore[attr-defined]
        assert f"error: {problem}\n" in done.stderr
    assert ("Traceback" in done.stderr) == (document["error"] == "KeyError")


def test_a_failure_without_json_leaves_stdout_empty() -> None:
    done = run("raise DataError(Problem('a=1', 'is not b', 'use c'))", as_json=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: a=1 is not b; use c\n")


def test_ctrl_c_ends_with_130() -> None:
    script = VERB.format(work="import time; time.sleep(60)", as_json=True)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    assert process.stderr is not None
    while "step 1/2" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(stdout)["error"] == "KeyboardInterrupt"


def screen(written: str) -> list[str]:
    """What a terminal shows in the end."""
    rows, row = [""], 0
    for token in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|.|\n", written):
        if token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token == "\r" or token.startswith("\x1b"):
            assert token in ("\r", "\x1b[?25l", "\x1b[?25h") or token.endswith("m")
        else:
            rows[row] += token
    return [text for text in rows if text]


def test_on_a_terminal_a_line_replaces_its_like() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, force_terminal=True, width=80, legacy_windows=False)) as progress:
        for line in ["preparing [data]", "step 1/3  loss 9", "step 2/3  loss 8", "step 3/3  loss 7", "exporting"]:
            progress(line)
    assert screen(stream.getvalue()) == ["preparing [data]", "step 3/3  loss 7", "exporting"]


def test_elsewhere_every_line_is_written() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=20)) as progress:
        for line in ["step 1/3  a line longer than the width", "step 2/3", "step 3/3"]:
            progress(line)
    assert stream.getvalue() == "step 1/3  a line longer than the width\nstep 2/3\nstep 3/3\n"
