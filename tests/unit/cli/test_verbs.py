"""The verbs' arguments, statuses, documents and imports. Nothing is trained here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from rich.console import Console

from rayapp import __version__
from rayapp.cli.app import spell_out_resume
from rayapp.cli.config import config_document, config_table
from rayapp.cli.export import find_run
from rayapp.cli.schema import run_file_schema
from rayapp.cli.train import commands_to_try
from rayapp.config.load import load_run_file
from rayapp.config.schema import RunFile
from rayapp.documents import TrainDocument
from rayapp.errors import CheckpointError

ROOT = Path(__file__).parents[3]
QUICKSTART = "jobs/quickstart.yaml"


def rayapp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rayapp", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "x.yaml", "--resume"], ["train", "x.yaml", "--resume=latest"]),
        (["train", "x.yaml", "--resume", "--json"], ["train", "x.yaml", "--resume=latest", "--json"]),
        (["train", "x.yaml", "--resume", "train.seed=1"], ["train", "x.yaml", "--resume=latest", "train.seed=1"]),
        (["train", "--resume", "jobs/x.yaml"], ["train", "--resume=latest", "jobs/x.yaml"]),
        (["train", "--resume", "x.yaml"], ["train", "--resume=latest", "x.yaml"]),
        (["train", "x.yaml", "--resume", "20261201-1"], ["train", "x.yaml", "--resume", "20261201-1"]),
        (["train", "x.yaml", "--resume=a"], ["train", "x.yaml", "--resume=a"]),
        (["generate", "x.yaml", "--", "--resume"], ["generate", "x.yaml", "--", "--resume"]),
    ],
)
def test_resume_may_come_without_a_run_id(arguments: list[str], expected: list[str]) -> None:
    assert spell_out_resume(arguments) == expected


def test_version() -> None:
    done = rayapp("--version")
    assert (done.returncode, done.stdout) == (0, f"rayapp {__version__}\n")


@pytest.mark.parametrize("verb", ["prepare", "train", "export", "generate", "config", "schema"])
def test_every_verb_has_json(verb: str) -> None:
    done = rayapp(verb, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train"],
        ["train", QUICKSTART, "--nonsense"],
        ["generate", QUICKSTART],
        ["export", "runs/x", "out", "--step", "-1"],
        ["train", QUICKSTART, "--resume", "--run-id", "x"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    done = rayapp(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    "arguments", [["prepare"], ["train"], ["train", "--resume"], ["generate", "--prompt", "x"], ["config"]], ids=lambda a: " ".join(a)
)
def test_every_verb_refuses_a_wrong_run_file_with_all_its_problems(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\nbatch: {global_batch_size: -1}\nx: 1\n")
    done = rayapp(*arguments, str(path), "train.num_steps=many", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {
        "error": "RunFileError",
        "problems": [
            f"{path}:2: batch.global_batch_size=-1 is not greater than 0; use 1 or more",
            f"{path}:3: x=1 is not a key of the run file; its keys are {', '.join(RunFile.model_fields)}",
            "command line: train.num_steps=many is not an integer; write a plain number",
        ],
    }
    assert done.stderr == "".join(f"error: {problem}\n" for problem in json.loads(done.stdout)["problems"])


def test_a_run_that_is_not_there_cannot_be_exported() -> None:
    done = rayapp("export", "no/such-run", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "name a run's folder" in done.stderr


def test_a_run_is_found_by_its_folder_and_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "quickstart" / "r1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "runs/quickstart/r1", "quickstart/r1", f"file://{folder}"):
        assert find_run(name).uri == str(folder)
    with pytest.raises(CheckpointError, match=r"quickstart/r2 is not there"):
        find_run("quickstart/r2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["schema"],
        ["config", "no-such-file.yaml"],
        ["config", QUICKSTART, "x=1"],
        ["train", QUICKSTART, "x=1"],
        ["--version"],
    ],
)
def test_what_needs_neither_torch_nor_ray_does_not_import_them(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from rayapp.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'ray', 'transformers', 'deepspeed', 'pyarrow'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def validator() -> jsonschema.Draft202012Validator:
    schema = run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_fits_the_printed_schema(path: Path) -> None:
    assert list(validator().iter_errors(yaml.safe_load(path.read_text()))) == []


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    for wrong in [{"name": "x", "batch": {"global": 1}}, {"name": "x", "train": {"precision": "bf17"}}, {"batch": {}}, {"name": "a b"}]:
        assert list(validator().iter_errors(wrong)), wrong


def test_schema_is_printed_with_every_fields_description() -> None:
    done = rayapp("schema", "--json")
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    assert printed == run_file_schema()
    bare = [
        f"{section}.{key}"
        for section, definition in printed["$defs"].items()
        for key, entry in definition["properties"].items()
        if not entry.get("description")
    ]
    assert bare == []


def test_config_names_the_origin_of_every_value() -> None:
    loaded = load_run_file(ROOT / QUICKSTART, ["train.seed=7"])
    batch = loaded.file.batch.model_copy(update={"gradient_accumulation_steps": 4})
    resolved = loaded.file.model_copy(update={"batch": batch})
    document = config_document(loaded, resolved, {"batch.gradient_accumulation_steps": "32 / (4 x 2)"})
    by_key = {entry.key: (entry.value, entry.origin, entry.note) for entry in document.values}
    assert by_key["train.seed"] == (7, "override", "command line")
    assert by_key["batch.gradient_accumulation_steps"] == (4, "derived", "32 / (4 x 2)")
    assert by_key["batch.micro_batch_size"] == (4, "file", f"{ROOT / QUICKSTART}:6")
    assert by_key["optim.betas"] == ([0.9, 0.95], "default", "")
    assert by_key["model.config.hidden_size"] == (256, "file", f"{ROOT / QUICKSTART}:4")
    assert [entry.key for entry in document.values] == list(loaded.origins)


def test_config_prints_the_resolved_tree() -> None:
    done = rayapp("config", QUICKSTART, "train.num_workers=1", "train.device=cpu", "--json")
    assert done.returncode == 0, done.stderr
    by_key = {entry["key"]: entry for entry in json.loads(done.stdout)["values"]}
    accumulation = by_key["batch.gradient_accumulation_steps"]
    assert (accumulation["value"], accumulation["origin"]) == (8, "derived")  # 32 / (4 x 1)
    assert accumulation["note"]
    assert by_key["train.num_workers"] == {"key": "train.num_workers", "value": 1, "origin": "override", "note": "command line"}
    assert by_key["batch.micro_batch_size"]["note"] == f"{QUICKSTART}:6"


def test_config_for_people_has_a_line_for_every_value() -> None:
    loaded = load_run_file(ROOT / QUICKSTART)
    stream = io.StringIO()
    Console(file=stream, width=200).print(config_table(config_document(loaded, loaded.file, {})))
    rows = [line.split() for line in stream.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["key", "value", "origin"]
    assert [row[0] for row in rows[1:]] == list(loaded.origins)
    assert ["batch.micro_batch_size", "4", "file,", f"{ROOT / QUICKSTART}:6"] in rows


def trained(run_dir: str) -> TrainDocument:
    return TrainDocument(
        run_dir=run_dir, model_dir=f"{run_dir}/model", steps=100, loss_first=8.4, loss_last=5.3, validation_loss=5.0, tokens_per_s=1.0,
        mfu=None, mfu_causal=None, peak_flops_source="", peak_memory_bytes=1, average_memory_bytes=1, skipped_steps=0, restarts=0,
        target_loss_step=None, target_loss_s=None, strategy="zero-2", world_size=2,
    )  # fmt: skip


def test_the_commands_to_try_find_the_same_run() -> None:
    commands = commands_to_try(
        trained("/data/my runs/quickstart/r1"), str(QUICKSTART), ["storage.path=/data/my runs", "train.num_steps=100"]
    )
    assert commands == [
        "rayapp generate jobs/quickstart.yaml 'storage.path=/data/my runs' train.num_steps=100 --prompt 'def '",
        "rayapp train jobs/quickstart.yaml 'storage.path=/data/my runs' train.num_steps=200 --resume r1",
        "rayapp export '/data/my runs/quickstart/r1' exported --dtype fp32",
    ]
