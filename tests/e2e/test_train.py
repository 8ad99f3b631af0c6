"""Prepare, train, resume, complete, export: every verb on real text, in processes of their own, read from the outside."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc as ipc
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import CommandLine, Head
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayapp.config.load import load_run_file
from rayapp.documents import ConfigDocument, ExportDocument, GenerateDocument, PrepareDocument, TrainDocument
from rayapp.metrics.record import StepRecord

NUM_STEPS = 12
VOCAB_SIZE = 512
SEQUENCE_LENGTH = 64
GLOBAL_BATCH_SIZE = 8
NUM_PARAMETERS = VOCAB_SIZE * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # embedding, attention and feed-forward with norms, norm

STEP_FIGURES = {
    "loss", "grad_norm", "learning_rate", "tokens_per_s", "samples_per_s", "step_s", "data_wait_share", "communication_share",
    "checkpoint_share", "mfu", "mfu_causal", "memory_bytes", "peak_memory_bytes", "num_valid_tokens", "applied", "skipped_steps",
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A finished `rayapp train --json`.

    Attributes:
        stdout: everything on it.
        stderr: everything on it.
        left: what still ran a moment after the command ended.
        shared_memory: files that it left there.
    """

    stdout: str
    stderr: str
    left: list[str]
    shared_memory: set[str]

    @property
    def document(self) -> TrainDocument:
        return TrainDocument.model_validate_json(self.stdout)

    @property
    def run_dir(self) -> Path:
        return Path(self.document.run_dir)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def rows_of(shard: Path) -> np.ndarray:
    """[rows, SEQUENCE_LENGTH + 1] tokens."""
    rows = ipc.open_file(shard).read_all()["tokens"].combine_chunks()
    return np.asarray(rows.flatten()).reshape(len(rows), -1)


def is_first_of_stream(shard: Path) -> bool:
    """A shard `train-GGGGGG-000`: its first row's first token is not the last token of a row before."""
    return shard.stem.endswith("-000")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def resolved(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return document


@pytest.fixture(scope="session")
def prepared(commands: CommandLine, run_file: Path) -> PrepareDocument:
    return PrepareDocument.model_validate(commands.document("prepare", str(run_file), "--address", "local"))


@pytest.fixture(scope="session")
def trained(commands: CommandLine, run_file: Path, prepared: PrepareDocument) -> Trained:
    """Twelve steps of ZeRO-2 in bf16 on a Ray that the command starts for itself."""
    before = shared_memory()
    done = commands.rayapp("train", str(run_file), "--address", "local", "--json")
    assert done.returncode == 0, done.stderr
    left = [" ".join(process.cmdline()) for process in commands.processes()]
    return Trained(done.stdout, done.stderr, left, shared_memory() - before)


def test_prepare_says_what_it_made(prepared: PrepareDocument, corpus: Path) -> None:
    assert (prepared.reused, prepared.vocab_size, prepared.dropped) == (False, VOCAB_SIZE, {})
    assert prepared.num_documents == len(list(corpus.iterdir()))
    shards = {path: ipc.open_file(path).read_all() for path in Path(prepared.data_dir).rglob("*.arrow")}
    rows = {split: sum(len(shard) for path, shard in shards.items() if split in path.name) for split in ("train", "validation")}
    assert rows == {"train": prepared.num_train_rows, "validation": prepared.num_validation_rows}
    assert rows["validation"] > 0
    # a row begins with the token that ended the one before
    assert rows["train"] * SEQUENCE_LENGTH == pytest.approx(prepared.num_train_tokens, abs=SEQUENCE_LENGTH + 1)


def test_the_rows_are_the_corpus(prepared: PrepareDocument, corpus: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(prepared.data_dir) / "tokenizer")
    text = ""
    for path in sorted(Path(prepared.data_dir).rglob("train-*.arrow")):
        tokens = rows_of(path)
        text += tokenizer.decode(np.concatenate([tokens[: is_first_of_stream(path), 0], tokens[:, 1:].reshape(-1)]))
    documents = {path.read_text() for path in corpus.iterdir()}
    found = [document for document in text.split(tokenizer.eos_token) if document]
    assert len(set(found) & documents) == len(found) > len(documents) / 2


def test_prepared_data_is_used_again(prepared: PrepareDocument, commands: CommandLine, run_file: Path) -> None:
    again = PrepareDocument.model_validate(commands.document("prepare", str(run_file), "--address", "local"))
    assert again == prepared.model_copy(update={"reused": True})


def test_training_prints_one_document_and_the_loss_falls(trained: Trained) -> None:
    document = trained.document
    assert (document.steps, document.strategy, document.world_size, document.restarts, document.skipped_steps) == (
        NUM_STEPS, "zero-2", 2, 0, 0,
    )  # fmt: skip
    assert document.loss_first is not None
    assert document.loss_last is not None
    assert document.loss_first == pytest.approx(math.log(VOCAB_SIZE), abs=0.2)
    assert document.loss_last < document.loss_first - 0.5
    assert document.validation_loss == pytest.approx(document.loss_last, abs=0.5)
    assert document.tokens_per_s is not None
    assert document.tokens_per_s > 0
    assert (document.mfu, document.mfu_causal) == (None, None)
    assert 0 < document.average_memory_bytes <= document.peak_memory_bytes
    assert json.loads((trained.run_dir / "summary.json").read_text()) == json.loads(trained.stdout)


def test_progress_is_told_on_stderr(trained: Trained) -> None:
    lines = [line for line in trained.stderr.splitlines() if " pid=" not in line]  # Ray passes on what its own actors print
    assert any(line.startswith(f"step {NUM_STEPS}/{NUM_STEPS}  loss ") and "tok/s" in line for line in lines)
    assert any(line.startswith(f"validation at step {NUM_STEPS}: loss ") for line in lines)
    assert "Traceback" not in "".join(lines)


def test_nothing_is_left_behind(trained: Trained) -> None:
    assert trained.left == []
    assert trained.shared_memory == set()


def test_the_run_folder_holds_what_was_asked_and_what_became_of_it(trained: Trained, prepared: PrepareDocument, run_file: Path) -> None:
    again, asked = load_run_file(trained.run_dir / "run.yaml"), load_run_file(run_file)
    assert again.file == asked.file
    run = resolved(trained.run_dir)
    assert run["layout"] == {
        "world_size": 2, "dp_size": 2, "pp_size": 1, "tp_size": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    assert (run["data"]["fingerprint"], run["data"]["num_train_rows"]) == (prepared.fingerprint, prepared.num_train_rows)
    assert (run["num_parameters"], run["transformers_config"]["vocab_size"]) == (NUM_PARAMETERS, VOCAB_SIZE)
    environment = json.loads((trained.run_dir / "environment.json").read_text())
    assert environment["packages"]["torch"] == version("torch")
    assert [node["num_gpus"] for node in environment["nodes"]] == [0]
    page = (trained.run_dir / "report.html").read_text()
    assert run["run_id"] in page
    assert "<script src" not in page


def test_every_step_has_its_figures_once(trained: Trained) -> None:
    steps = steps_of(trained.run_dir)
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    for record in steps:
        assert record.keys() >= STEP_FIGURES
        StepRecord.model_validate(record)
        assert record["tokens_per_s"] == pytest.approx(SEQUENCE_LENGTH * record["samples_per_s"])
        assert record["samples_per_s"] == pytest.approx(GLOBAL_BATCH_SIZE / record["step_s"])
        assert 0 < record["num_valid_tokens"] <= GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH
        assert record["grad_norm"] > 0
    assert [steps[0]["loss"], steps[-1]["loss"]] == [trained.document.loss_first, trained.document.loss_last]
    assert max(record["learning_rate"] for record in steps) == pytest.approx(1e-2)
    assert [record["communication_share"] for record in steps].count(None) == NUM_STEPS - 1


def test_tensorboard_reads_the_same_losses(trained: Trained) -> None:
    events = EventAccumulator(str(trained.run_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in steps_of(trained.run_dir)
    ]


def test_checkpoints_are_vouched_for_and_the_newest_are_kept(trained: Trained) -> None:
    folders = sorted((trained.run_dir / "checkpoints").glob("step-*"))
    manifests = {folder: json.loads((folder / "manifest.json").read_text()) for folder in folders}
    assert {10, 12} <= {manifest["progress"]["step"] for manifest in manifests.values()}  # every second step, and two are kept
    assert len(manifests) <= 3  # the best besides
    for folder, manifest in manifests.items():
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *manifest["files"]}
        for name, entry in manifest["files"].items():
            content = (folder / name).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size_bytes"], entry["sha256"])


def held_out_loss(model: Any, data_dir: str, num_rows: int) -> float:
    """Mean cross-entropy in nats of as many held-out rows, evenly spread, by transformers alone."""
    (path,) = Path(data_dir).rglob("validation-*.arrow")
    tokens = torch.from_numpy(rows_of(path).copy()).long()
    chosen = tokens[[position * len(tokens) // num_rows for position in range(num_rows)]]
    with torch.inference_mode():
        logits = model(chosen[:, :-1]).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten()))


def test_transformers_loads_the_model_which_has_learnt_what_the_run_says(trained: Trained, prepared: PrepareDocument) -> None:
    assert trained.document.model_dir == str(trained.run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(trained.document.model_dir)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS
    assert model.dtype == torch.bfloat16
    num_rows = min(64, prepared.num_validation_rows)
    assert held_out_loss(model, prepared.data_dir, num_rows) == pytest.approx(trained.document.validation_loss, abs=0.02)
    tokenizer = AutoTokenizer.from_pretrained(trained.document.model_dir)
    prompt = tokenizer("def ", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_generate_completes_as_transformers_does(trained: Trained, commands: CommandLine, run_file: Path) -> None:
    said = commands.document("generate", str(run_file), "generate.max_new_tokens=8", "--prompt", "def ", "--prompt", "import ")
    document = GenerateDocument.model_validate(said)
    assert document.model_dir == trained.document.model_dir
    assert [completion.prompt for completion in document.completions] == ["def ", "import "]
    model = AutoModelForCausalLM.from_pretrained(document.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(document.model_dir)
    prompt = tokenizer("def ", return_tensors="pt")
    whole = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert document.completions[0].completion == tokenizer.decode(whole, skip_special_tokens=True)


def test_export_gives_the_weights_that_training_exported(trained: Trained, commands: CommandLine, tmp_path: Path) -> None:
    said = commands.document("export", str(trained.run_dir), str(tmp_path / "out"), "--step", str(NUM_STEPS))
    document = ExportDocument.model_validate(said)
    assert (document.step, document.dtype, document.num_parameters) == (NUM_STEPS, "bf16", NUM_PARAMETERS)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", trained.run_dir / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (trained.run_dir / "model").iterdir()}


def test_config_names_what_was_derived(commands: CommandLine, run_file: Path) -> None:
    values = {value.key: value for value in ConfigDocument.model_validate(commands.document("config", str(run_file))).values}
    accumulation = values["batch.gradient_accumulation_steps"]
    assert (accumulation.value, accumulation.origin) == (2, "derived")
    assert "micro_batch_size(2) x gradient_accumulation_steps(2) x dp_size(2) = 8" in accumulation.note
    assert (values["train.num_steps"].origin, values["train.seed"].origin) == ("file", "default")


def test_a_resumed_run_goes_on_where_it_ended(trained: Trained, head: Head, run_file: Path, tmp_path: Path) -> None:
    """On a copy, so that the first run stays what it was; on another cluster, so that nothing hangs on the first."""
    storage = tmp_path / "storage"
    shutil.copytree(trained.run_dir.parents[1], storage)
    run_id = trained.run_dir.name
    document = TrainDocument.model_validate(
        head.commands.document("train", str(run_file), f"storage.path={storage}", f"train.num_steps={NUM_STEPS + 4}", "--resume", run_id)
    )
    assert document.run_dir == str(storage / "tiny" / run_id)
    assert (document.steps, document.loss_first) == (NUM_STEPS + 4, trained.document.loss_first)
    steps = steps_of(Path(document.run_dir))
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 5))
    assert steps[:NUM_STEPS] == steps_of(trained.run_dir)
    assert all(record["loss"] < steps[0]["loss"] - 0.3 for record in steps[NUM_STEPS:])


def test_resuming_a_finished_run_only_exports_it_again(trained: Trained, commands: CommandLine, run_file: Path) -> None:
    model = Path(trained.document.model_dir or "")
    (model / "model.safetensors").unlink()
    done = commands.rayapp("train", str(run_file), "--resume", Path(trained.document.run_dir).name, "--address", "local", "--json")
    assert done.returncode == 0, done.stderr
    assert TrainDocument.model_validate_json(done.stdout) == trained.document
    assert (model / "model.safetensors").exists()
    assert len(steps_of(Path(trained.document.run_dir))) == trained.document.steps


def test_ddp_trains_on_a_cluster_and_starts_from_the_same_weights(trained: Trained, head: Head, run_file: Path) -> None:
    document = TrainDocument.model_validate(
        head.commands.document("train", str(run_file), "parallel={kind: ddp}", "train.num_steps=3", "--run-id", "with-ddp")
    )
    assert (document.strategy, document.steps, document.world_size) == ("ddp", 3, 2)
    assert Path(document.run_dir).name == "with-ddp"
    assert document.loss_first == pytest.approx(trained.document.loss_first, rel=1e-3)
    assert document.model_dir is not None
    AutoModelForCausalLM.from_pretrained(document.model_dir)
