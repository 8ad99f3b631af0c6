"""What cannot work is refused with the value, the rule and the remedy, exit status 2, and before a Ray is started for it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from rayapp.checkpoint.checkpoints import Manifest
from rayapp.checkpoint.progress import Progress
from rayapp.cli.app import app, spell_out_resume
from rayapp.cluster.inventory import local_inventory
from rayapp.config.load import load_run_file
from rayapp.data.packing import Rows
from rayapp.data.prepare import fingerprint, prepared_folder
from rayapp.data.shards import MANIFEST_NAME, DataManifest, ShardWriter, SourceEntry, open_prepared
from rayapp.data.tokenizer import train_tokenizer
from rayapp.documents import ErrorDocument
from rayapp.preflight.derive import derive_all
from rayapp.preflight.resolve import claim_run, resolve
from rayapp.storage import open_location

VOCAB_SIZE = 300
SEQUENCE_LENGTH = 16
POSITIONS = 24
MORE_THAN_ANY_MACHINE_HAS = 4096
RUN_ID = "r1"


class RayWasAskedFor(Exception):
    """Stands in the way of a Ray."""


@dataclass(frozen=True)
class Workplace:
    """A run file that could train, and a storage in which its data is prepared and its run `r1` has a checkpoint.

    Attributes:
        run_file: its path.
        storage: the storage's folder.
        models: folders of tiny pretrained models, whole and broken.
    """

    run_file: Path
    storage: Path
    models: Path

    @property
    def shard(self) -> Path:
        (path,) = self.storage.glob("data/*/source-000/train-*.arrow")
        return path

    def runs(self) -> set[Path]:
        return {path.parent for path in self.storage.glob("*/*/run.json")}


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray that is asked for is an error, and the verbs' logging ends with the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RayWasAskedFor

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"the {n} of {n * n} is nothing but {n}"}) + "\n" for n in range(500)))
    return path


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 models of 24 positions with their tokenizer: whole, and with a piece missing; and another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=POSITIONS, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    network = transformers.GPT2LMHeadModel(config)
    tokenizer = train_tokenizer(iter(["some words to merge, some more words to merge"]), VOCAB_SIZE)
    network.save_pretrained(folder / "whole")
    network.save_pretrained(folder / "sharded", max_shard_size="10KB")
    for name in ("whole", "sharded"):
        tokenizer.save_pretrained(folder / name)
    for name, missing in {"no-weights": "model.safetensors", "no-config": "config.json"}.items():
        shutil.copytree(folder / "whole", folder / name)
        (folder / name / missing).unlink()
    shutil.copytree(folder / "sharded", folder / "no-shard")
    sorted((folder / "no-shard").glob("model-*.safetensors"))[1].unlink()
    train_tokenizer(iter(["quite different tokens"]), VOCAB_SIZE).save_pretrained(folder / "another-tokenizer")
    return folder


@pytest.fixture(scope="module")
def template(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file and its storage, made without training anything."""
    folder = tmp_path_factory.mktemp("template")
    tree = {
        "name": "refused",
        "storage": {"path": str(folder / "storage")},
        "model": {
            "kind": "llama",
            "config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        "data": {"source": str(corpus_file), "sequence_length": SEQUENCE_LENGTH, "tokenizer": {"train": {"vocab_size": VOCAB_SIZE}}},
        "batch": {"global_batch_size": 32, "micro_batch_size": 4},
        "parallel": {"kind": "zero"},
        "train": {"num_steps": 10, "num_workers": 2, "device": "cpu"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    _prepare_by_hand(path)
    _save_by_hand(path)
    return folder


def _prepare_by_hand(run_file: Path) -> None:
    file = load_run_file(run_file).file
    folder = prepared_folder(open_location(file.storage.path), fingerprint(file))
    (folder / "source-000").make_dirs()
    tokens = np.random.default_rng(1).integers(1, VOCAB_SIZE, (40, SEQUENCE_LENGTH + 1), dtype=np.int32)
    writer = ShardWriter(folder, "source-000/train-000000", sequence_length=SEQUENCE_LENGTH, rows_per_shard=100, writer_id="test")
    writer.add(Rows(tokens, np.ones(tokens.shape, dtype=np.bool_), [np.zeros(1, dtype=np.int32)] * len(tokens)))
    manifest = DataManifest(
        fingerprint=fingerprint(file), sequence_length=SEQUENCE_LENGTH, vocab_size=VOCAB_SIZE, tokenizer_sha256="", eos_token_id=0,
        sources=[SourceEntry(path=str(file.data.source), weight=1.0, train=writer.finish(), validation=[])],
        num_documents=40, num_validation_documents=0, num_train_tokens=tokens.size, num_validation_tokens=0,
        dropped={}, num_unreadable_files=0, unreadable_files=[],
    )  # fmt: skip
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())


def _save_by_hand(run_file: Path) -> None:
    loaded = load_run_file(run_file)
    storage = open_location(loaded.file.storage.path)
    prepared = open_prepared(prepared_folder(storage, fingerprint(loaded.file)))
    run_dir = storage / loaded.file.name / RUN_ID
    run = resolve(derive_all(loaded, local_inventory(), prepared), prepared, run_dir, None)
    claim_run(run_dir, run, run_file.read_text())
    manifest = Manifest(progress=Progress(step=4, data_fingerprint=run.data.fingerprint), files={}, written_at=0.0)
    (run_dir / "checkpoints" / "step-4").make_dirs()
    (run_dir / "checkpoints" / "step-4" / "manifest.json").write_text(manifest.model_dump_json())


@pytest.fixture
def workplace(template: Path, pretrained: Path, tmp_path: Path) -> Workplace:
    shutil.copytree(template, tmp_path / "place")
    path = tmp_path / "place" / "run.yaml"
    path.write_text(path.read_text().replace(str(template), str(path.parent)))
    return Workplace(path, tmp_path / "place" / "storage", pretrained)


def train(workplace: Workplace, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``rayapp train FILE ARGUMENTS --address local --json`` in this process."""
    filled = [
        argument.replace("<models>", str(workplace.models)).replace("<folder>", str(workplace.run_file.parent)) for argument in arguments
    ]
    line = spell_out_resume(["train", str(workplace.run_file), *filled, "--address", "local", "--json"])
    result = CliRunner().invoke(app, line)
    return result.exit_code, result.stdout, result.stderr


def refusal(workplace: Workplace, *arguments: str) -> tuple[str, list[str]]:
    """The exception's class and the sentences, after a look at all that a refusal must keep to."""
    before = workplace.runs()
    status, stdout, stderr = train(workplace, *arguments)
    assert status == 2, stderr
    document = ErrorDocument.model_validate_json(stdout)
    for problem in document.problems:
        assert f"error: {problem}\n" in stderr
    assert "Traceback" not in stderr
    assert workplace.runs() == before
    return document.error, document.problems


def says(sentence: str, *parts: str) -> bool:
    """The parts are in the sentence, one after the other."""
    position = 0
    for part in parts:
        position = sentence.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def pretrained_model(name: str, *, tokenizer: str = "{}") -> list[str]:
    return [f"model={{kind: pretrained, path: <models>/{name}}}", f"data.tokenizer={tokenizer}"]


@pytest.mark.parametrize(
    "arguments", [[], ["--resume"], ["--run-id", "r2"], pretrained_model("whole"), pretrained_model("sharded")], ids=str
)
def test_what_can_work_gets_as_far_as_a_ray(workplace: Workplace, arguments: list[str]) -> None:
    status, stdout, stderr = train(workplace, *arguments)
    assert status == 1, stderr
    assert json.loads(stdout)["error"] == "RayWasAskedFor"


REFUSALS: dict[str, tuple[list[str], str, list[str]]] = {
    "unknown key": (["train.num_step=3"], "RunFileError", ["train.num_step=3 is not a key of train; did you mean num_steps?"]),
    "wrong type": (["train.num_steps=3.0"], "RunFileError", ["train.num_steps=3.0 is not an integer; write 3"]),
    "negative size": (["batch.micro_batch_size=-4"], "RunFileError", ["batch.micro_batch_size=-4 is not greater than 0"]),
    "batch that does not divide": (
        ["batch.global_batch_size=36"],
        "InputError",
        ["batch.global_batch_size=36 is not a multiple of micro_batch_size(4) x dp_size(2)=8; use 32 or 40"],
    ),
    "batch that is another product": (
        ["batch.gradient_accumulation_steps=2"],
        "InputError",
        [
            "batch.global_batch_size=32 is not micro_batch_size(4) x gradient_accumulation_steps(2) x dp_size(2)=16; "
            "use 16, or leave batch.gradient_accumulation_steps out"
        ],
    ),
    "more workers than there are CPUs": (
        [f"train.num_workers={MORE_THAN_ANY_MACHINE_HAS}"],
        "PlacementError",
        [f"train.num_workers={MORE_THAN_ANY_MACHINE_HAS}", "is more than the ", " workers of 1 CPU each", "; use train.num_workers="],
    ),
    "more GPUs than there are": (
        [f"train.num_workers={MORE_THAN_ANY_MACHINE_HAS}", "train.device=cuda"],
        "PlacementError",
        [
            f"train.num_workers={MORE_THAN_ANY_MACHINE_HAS}",
            "1 CPU and 1 GPU",
            "the cluster",
            "has 1 node(s) with ",
            " GPUs",
            "or add nodes",
        ],
    ),
    "a type of GPU that is not there": (
        ["train={num_steps: 10}", "resources.gpu_type=TPU-of-tomorrow"],
        "PlacementError",
        ["train.device=cuda", "finds no node for a worker of 1 CPU and 1 TPU-of-tomorrow GPU", "resources", "add nodes"],
    ),
    "missing tokenizer": (
        ["data.tokenizer={path: <folder>/no-tokenizer}"],
        "DataError",
        ["tokenizer '", "/no-tokenizer' cannot be loaded: there is no such folder; give an existing folder or a hub name"],
    ),
    "missing data": (
        ["data.source=<folder>/no.txt"],
        "DataError",
        ["data.source='", "/no.txt' does not exist (", "; check the path, and that this machine reaches it"],
    ),
    "pattern that matches nothing": (
        ["data.source=<folder>/*.txt"],
        "DataError",
        ["data.source='", "/*.txt' matches no file; look at what lies in "],
    ),
    "tokenizer of other words than the weights": (
        pretrained_model("whole", tokenizer="{path: <models>/another-tokenizer}"),
        "DataError",
        [
            "data.tokenizer.path='",
            "/another-tokenizer' is another tokenizer than that of the weights in ",
            "; leave data.tokenizer out, or set model.random_weights=true",
        ],
    ),
    "tokenizer to be trained beside weights": (
        pretrained_model("whole", tokenizer="{train: {vocab_size: 300}}"),
        "RunFileError",
        [
            "command line: data.tokenizer.train.vocab_size=300 would give other tokens than the weights of ",
            " know; leave data.tokenizer out, or set model.random_weights=true",
        ],
    ),
    "no tokenizer": (
        ["data.tokenizer={}"],
        "DataError",
        ["data.tokenizer", "model.kind=llama brings none", "give data.tokenizer.path"],
    ),
    "vocabulary smaller than the tokenizer's": (
        ["model.config.vocab_size=256"],
        "ModelError",
        ["model.config.vocab_size=256 is smaller than the tokenizer's 300 entries; set it to at least 300"],
    ),
    "sequence longer than the positions": (
        [*pretrained_model("whole"), f"data.sequence_length={POSITIONS + 1}"],
        "ModelError",
        [f"data.sequence_length=25 is longer than the model's {POSITIONS} positions; use at most 24, or set model.config.n_positions=25"],
    ),
    "stage without ZeRO": (
        ["parallel={kind: ddp, zero_stage: 2}"],
        "RunFileError",
        ["command line: parallel.zero_stage=2 goes with kind: zero, not with kind: ddp; set parallel.kind=zero or leave it out"],
    ),
    "weights offloaded in stage 2": (
        ["parallel={kind: zero, zero_stage: 2, offload_weights: cpu}"],
        "RunFileError",
        ["parallel.offload_weights=cpu goes with ZeRO stage 3, not with stage 2; set parallel.kind=zero parallel.zero_stage=3"],
    ),
    "offloading without ZeRO": (
        ["parallel={kind: ddp, offload_optimizer: cpu}"],
        "RunFileError",
        ["parallel.offload_optimizer=cpu goes with kind: zero, not with kind: ddp; set parallel.kind=zero"],
    ),
    "offloading on CPUs": (
        ["parallel={kind: zero, offload_optimizer: cpu}"],
        "RunFileError",
        ["command line: parallel.offload_optimizer=cpu has nothing to gain on CPUs; leave it out"],
    ),
    "fp16 on CPUs": (["train.precision=fp16"], "RunFileError", ["command line: train.precision=fp16 needs GPUs; use bf16 or fp32"]),
    "flash attention on CPUs": (
        ["model.attention=flash_attention_2"],
        "RunFileError",
        ["model.attention=flash_attention_2 needs GPUs; use sdpa"],
    ),
    "type of GPU for CPU workers": (
        ["resources.gpu_type=H100"],
        "RunFileError",
        ["command line: resources.gpu_type=H100 goes with GPUs, not with train.device=cpu; leave one of the two out"],
    ),
    **{
        f"{kind} parallel": (
            [f"parallel={{kind: {kind}}}"],
            "RunFileError",
            [f"parallel.kind={kind} cannot train yet; use auto, ddp or zero"],
        )
        for kind in ("fsdp", "tensor", "pipeline", "hybrid")
    },
    "degree that the kind cannot take": (
        ["parallel.tensor_parallel_size=2"],
        "RunFileError",
        ["parallel.tensor_parallel_size=2 is not something that kind: zero can take; leave it out"],
    ),
    "storage that is a file": (
        ["storage.path=<folder>/run.yaml"],
        "StorageError",
        ["storage ", "/run.yaml cannot be created: ", "; check the path, the permissions and the free space"],
    ),
    "storage below a file": (
        ["storage.path=<folder>/run.yaml/runs"],
        "StorageError",
        ["storage ", "/run.yaml/runs cannot be created: ", "; check the path"],
    ),
    "storage that takes no folder": (
        ["storage.path=/proc/runs"],
        "StorageError",
        ["storage /proc/runs cannot be created: ", "; check the path, the permissions"],
    ),
    "storage of an unknown scheme": (
        ["storage.path=ftp://host/runs"],
        "StorageError",
        ["'ftp://host/runs' cannot be opened: ", "; use a path, or s3://, gs:// or hdfs:// with a bucket or host"],
    ),
    "model folder without weights": (
        pretrained_model("no-weights"),
        "ModelError",
        [
            "model.path='",
            "/no-weights' has no weights: none of model.safetensors, ",
            "; complete the folder, or set model.random_weights=true",
        ],
    ),
    "model folder without configuration": (
        pretrained_model("no-config"),
        "ModelError",
        ["model.path='", "/no-config' has no config.json; give the folder of a transformers model"],
    ),
    "model folder without a shard": (
        pretrained_model("no-shard"),
        "ModelError",
        ["model.path='", "/no-shard' lacks 1 of ", " weight files: model-00002-of-", "; complete the folder"],
    ),
    "model folder that is not there": (
        [*pretrained_model("nowhere"), "data.tokenizer={path: <models>/whole}"],
        "ModelError",
        ["model.path='", "/nowhere' does not exist; give an existing folder or a hub name"],
    ),
    "unknown model kind": (
        ["model.kind=lama"],
        "ModelError",
        ["model.kind='lama' is not a causal language model of transformers; did you mean llama?"],
    ),
    "unknown model setting": (
        ["model.config.num_hidden_layer=2"],
        "ModelError",
        ["model.config.num_hidden_layer=2 is not a setting of llama; did you mean num_hidden_layers?"],
    ),
    "width that heads do not divide": (
        ["model.config.hidden_size=17"],
        "ModelError",
        ["model.config of llama is refused: ", "17", "2", "; correct the values under model.config"],
    ),
    "warm-up longer than the run": (
        ["optim.warmup_steps=11"],
        "RunFileError",
        ["command line: optim.warmup_steps=11 is more than train.num_steps(10); use at most 10"],
    ),
    "resuming a family without runs": (
        ["name=another", "--resume"],
        "CheckpointError",
        ["family another in ", "has no run to resume; start one: rayapp train FILE"],
    ),
    "resuming an unknown run": (
        ["--resume", "r9"],
        "CheckpointError",
        ["run 'r9' of refused in ", " does not exist; the newest are r1"],
    ),
    "starting a run that exists": (
        ["--run-id", "r1"],
        "CheckpointError",
        ["/refused/r1 exists already; continue it with --resume r1, or take another --run-id"],
    ),
    "a run id that leaves the family": (
        ["--run-id", "../x"],
        "RunFileError",
        ["--run-id ../x is not a name that matches ", "; use letters, digits, dots, dashes and underscores"],
    ),
    "resuming to a step that is past": (
        ["train.num_steps=3", "--resume"],
        "CheckpointError",
        ["train.num_steps=3 is less than the 4 steps that run r1 has behind it; use more than 4, or start a new run"],
    ),
    "resuming on other data": (
        ["data.sequence_length=8", "--resume"],
        "DataError",
        ["data ", " is not what run r1 was started on (", "; restore the corpus and the keys under data, or start a new run"],
    ),
    "resuming with another model": (
        ["model.config.num_hidden_layers=2", "--resume"],
        "CheckpointError",
        ["model.config.num_hidden_layers=2 was 1 when run r1 was started; set it back"],
    ),
    "resuming with another batch": (
        ["batch.global_batch_size=64", "--resume"],
        "CheckpointError",
        ["batch.global_batch_size=64 was 32 when run r1 was started, and the order of data hangs on it; set it back, or start a new run"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused(workplace: Workplace, case: str) -> None:
    arguments, error, parts = REFUSALS[case]
    found, problems = refusal(workplace, *arguments)
    assert found == error, problems
    assert any(says(problem, *parts) for problem in problems), problems


@pytest.mark.parametrize("write", [Path.mkdir, Path.touch], ids=["a folder without files", "a file without text"])
def test_an_empty_corpus_is_refused(workplace: Workplace, write: Callable[[Path], None]) -> None:
    source = workplace.run_file.parent / "empty"
    write(source)
    error, (problem,) = refusal(workplace, f"data.source={source}")
    assert error == "DataError"
    assert says(problem, f"data.source='{source}' holds no ", "; ")


def test_a_damaged_shard_is_refused(workplace: Workplace) -> None:
    content = bytearray(workplace.shard.read_bytes())
    content[len(content) // 2] ^= 1
    workplace.shard.write_bytes(content)
    error, (problem,) = refusal(workplace)
    assert error == "DataError"
    assert says(problem, f"shard {workplace.shard} is damaged", "SHA-256", "; remove the folder and run `rayapp prepare` again")


def test_a_truncated_shard_is_refused(workplace: Workplace) -> None:
    size = workplace.shard.stat().st_size
    workplace.shard.write_bytes(workplace.shard.read_bytes()[:-10])
    error, (problem,) = refusal(workplace)
    assert error == "DataError"
    assert says(problem, f"shard {workplace.shard} has {size - 10} bytes, not {size}; remove the folder and run `rayapp prepare` again")


def test_a_missing_shard_is_refused(workplace: Workplace) -> None:
    shard = workplace.shard
    shard.unlink()
    error, (problem,) = refusal(workplace)
    assert error == "DataError"
    assert says(problem, f"shard {shard} is missing; remove the folder and run `rayapp prepare` again")


def test_a_word_level_vocabulary_larger_than_the_weights_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    """The tokenizer that comes with the weights knows more than they do."""
    folder = tmp_path / "model"
    shutil.copytree(workplace.models / "whole", folder)
    tokenizer = Tokenizer(models.WordLevel(unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(f"w{n}" for n in range(400))], trainers.WordLevelTrainer(special_tokens=["<eos>"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    error, (problem,) = refusal(workplace, f"model={{kind: pretrained, path: {folder}}}", "data.tokenizer={}")
    assert error == "ModelError"
    assert says(problem, "model.config.vocab_size=300 is smaller than the tokenizer's 401 entries; set it to at least 401")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def test_a_model_that_cannot_fit_is_refused_with_its_figures(workplace: Workplace) -> None:
    """transformers' own Llama: 32 layers of width 4096 and 11008."""
    arguments = ["model={kind: llama}", "resources.memory_bytes=20000000000", "parallel={kind: zero, zero_stage: 1}"]
    error, (problem,) = refusal(workplace, *arguments)
    assert error == "MemoryFitError"
    num_parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * VOCAB_SIZE * 4096 + 4096
    assert says(
        problem,
        "zero-1 with train.num_workers=2 batch.micro_batch_size=4 needs ",
        f"weights {gigabytes(2 * num_parameters)}, gradients {gigabytes(2 * num_parameters)}, ",
        f"optimizer {gigabytes(12 * num_parameters / 2)}",
        "at the very least ",
        "of 20.0 GB; use ",
        "train.num_workers=",
    )


def test_a_model_far_too_large_for_this_machine_is_refused(workplace: Workplace) -> None:
    """A Llama of 70 billion weights."""
    shape = "hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, num_attention_heads: 64, num_key_value_heads: 8"
    error, (problem,) = refusal(workplace, f"model={{kind: llama, config: {{{shape}}}}}", "parallel={kind: zero, zero_stage: 3}")
    assert error == "MemoryFitError"
    num_parameters = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * VOCAB_SIZE * 8192 + 8192
    assert says(problem, "zero-3 with ", f"weights {gigabytes(num_parameters)}, ", f"optimizer {gigabytes(6 * num_parameters)}", "; use ")


def test_a_relative_storage_in_a_submitted_job_is_refused(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}))
    monkeypatch.chdir(tmp_path)
    error, (problem,) = refusal(workplace, "storage.path=runs")
    assert error == "StorageError"
    assert says(problem, "storage.path=runs is relative, and a submitted job's folder is thrown away; use an absolute path")
    assert not (tmp_path / "runs").exists()


def test_everything_that_is_wrong_with_the_settings_comes_at_once(workplace: Workplace) -> None:
    error, problems = refusal(
        workplace, "parallel={kind: ddp, zero_stage: 1, offload_weights: cpu}", "optim.warmup_steps=11", "train.precision=fp16"
    )
    assert error == "RunFileError"
    starts = ["parallel.zero_stage=1", "parallel.offload_weights=cpu", "optim.warmup_steps=11", "train.precision=fp16"]
    assert [start for start in starts if not any(f"command line: {start} " in problem for problem in problems)] == []
