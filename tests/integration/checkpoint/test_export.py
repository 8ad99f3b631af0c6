"""An export is a plain Hugging Face folder with the logits of the model that was trained."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs
from support.export_work import STEPS, Exported, probe_tokens, train_and_export
from support.prepared import VOCAB_SIZE, checkpoint_folder, prepare_small, run_on
from support.ranks import run_ranks

from rayapp.checkpoint.checkpoints import MANIFEST
from rayapp.checkpoint.export import export_run
from rayapp.errors import CheckpointError, StorageError
from rayapp.storage import Location, open_location

SHARD_BYTES = 20_000


@dataclass(frozen=True)
class Case:
    family: str
    strategy: str
    precision: str = "fp32"
    config: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.strategy}-{self.precision}" + ("-other" if self.config else "")


CASES = [
    Case("llama", "zero-3"),
    Case("llama", "ddp", config={"tie_word_embeddings": False}),
    Case("gpt2", "zero-2"),
    Case("gpt2", "zero-3", "bf16"),
    Case("qwen2", "zero-3"),
    Case("qwen2", "zero-1", config={"tie_word_embeddings": True}),
    Case("opt", "zero-3"),
    Case("mixtral", "zero-3"),
    Case("mixtral", "zero-2", "bf16"),
    Case("simple_transformer", "zero-2"),
    Case("simple_transformer", "zero-3", "bf16"),
    Case("llama", "zero-3", "bf16"),
    Case("llama", "ddp", "bf16", config={"tie_word_embeddings": False}),
]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def exported(root: Path) -> dict[str, Exported]:
    prepared = prepare_small(root / "prepared")
    runs = [
        run_on(
            prepared,
            root / case.name,
            case.family,
            config=case.config,
            strategy=case.strategy,
            train={"precision": case.precision},
            export={"max_shard_bytes": SHARD_BYTES},
        )
        for case in CASES
    ]
    found = run_ranks(train_and_export, 2, [run.model_dump_json() for run in runs])[0]
    return dict(zip(BY_NAME, found, strict=True))


@pytest.mark.parametrize("name", list(BY_NAME))
def test_logits_are_those_of_the_live_model(exported: dict[str, Exported], name: str) -> None:
    found = exported[name]
    assert found.missing == found.unexpected == []
    assert found.live.std() > 0.05, "logits without a spread would prove nothing"
    case = BY_NAME[name]
    if case.precision == "bf16":
        assert found.reloaded.dtype == torch.bfloat16
        # OPT scales its queries before the product, torch's attention scales the product: roundings of bf16 differ
        worst = 2**-6 if case.family == "simple_transformer" else 0.0
        torch.testing.assert_close(found.reloaded, found.live, rtol=0, atol=worst)
    else:
        torch.testing.assert_close(found.reloaded, found.live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.precision == "fp32"])
def test_a_process_that_never_trained_reads_it(exported: dict[str, Exported], root: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = root / name / "model"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=probe_tokens()).logits, exported[name].live, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def step_3(count):\n    return count"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) <= VOCAB_SIZE
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == 0
    completed = model.generate(**tokenizer("def ", return_tensors="pt", return_token_type_ids=False), max_new_tokens=3, do_sample=False)
    assert completed.shape[1] > 1


def test_weights_are_in_shards_of_the_size_asked_for(exported: dict[str, Exported], root: Path) -> None:
    from safetensors import safe_open

    for name in exported:
        folder = root / name / "model"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
        assert len(files) > 2
        held: dict[str, str] = {}
        total = 0
        for file in files:
            with safe_open(folder / file, framework="pt") as tensors:
                sizes = [tensors.get_tensor(key).nbytes for key in tensors.keys()]  # noqa: SIM118 (it does not iterate)
                held |= dict.fromkeys(tensors.keys(), file)
            assert sum(sizes) <= SHARD_BYTES or len(sizes) == 1
            total += sum(sizes)
        assert index["weight_map"] == held
        assert index["metadata"]["total_size"] == total


def test_tied_weights_are_written_once(exported: dict[str, Exported], root: Path) -> None:
    def names(name: str) -> set[str]:
        return set(json.loads((root / name / "model" / "model.safetensors.index.json").read_text())["weight_map"])

    assert exported
    assert names("llama-ddp-fp32-other") - names("llama-zero-3-fp32") == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("dtype", "torch_dtype", "worst"), [("fp32", torch.float32, 0.0), ("bf16", torch.bfloat16, 2**-8), ("fp16", torch.float16, 2**-11)]
)
def test_another_type(
    exported: dict[str, Exported], root: Path, tmp_path: Path, dtype: str, torch_dtype: torch.dtype, worst: float
) -> None:
    from transformers import AutoModelForCausalLM

    run_dir = open_location(str(root / "qwen2-zero-3-fp32"))
    document = export_run(run_dir, open_location(str(tmp_path / "model")), dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(root / "qwen2-zero-3-fp32" / "model")
    assert exported
    assert (document.dtype, document.step, document.num_parameters) == (dtype, STEPS, sum(p.numel() for p in original.parameters()))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert ours.dtype == torch_dtype, name
        torch.testing.assert_close(ours.float(), theirs, rtol=worst, atol=worst * 1e-2)


def test_an_export_to_storage_that_is_no_file_tree(exported: dict[str, Exported], root: Path, tmp_path: Path) -> None:
    assert exported
    bucket = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    out = Location(bucket, "family/model", "mock://bucket/family/model")
    document = export_run(open_location(str(root / "opt-zero-3-fp32")), out)
    assert document.model_dir == "mock://bucket/family/model"
    assert digests(tmp_path / "family" / "model") == digests(root / "opt-zero-3-fp32" / "model")


def digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*")}


def test_an_export_that_fails_leaves_the_older_one_as_it_was(exported: dict[str, Exported], root: Path, tmp_path: Path) -> None:
    run_dir = root / "gpt2-zero-2-fp32"
    before = digests(run_dir / "model")
    names_before = sorted(path.name for path in run_dir.iterdir())
    checkpoint = checkpoint_folder(run_dir, STEPS)
    state, manifest = checkpoint / "state.json", checkpoint / MANIFEST
    kept = state.read_bytes(), manifest.read_bytes()
    assert exported
    try:
        promise_more(state, manifest)
        with pytest.raises(CheckpointError, match=r"parameter transformer\.extra .* has 0 of the 6 elements"):
            export_run(open_location(str(run_dir)), open_location(str(run_dir / "model")))
        with pytest.raises(CheckpointError):
            export_run(open_location(str(run_dir)), open_location(str(tmp_path / "new")))
    finally:
        state.write_bytes(kept[0])
        manifest.write_bytes(kept[1])
    assert digests(run_dir / "model") == before
    assert sorted(path.name for path in run_dir.iterdir()) == names_before
    assert list(tmp_path.iterdir()) == []


def promise_more(state: Path, manifest: Path) -> None:
    """Let a checkpoint name a weight, last of all, that none of its files holds."""
    index = json.loads(state.read_text())
    index["shapes"]["transformer.extra"] = [2, 3]
    state.write_text(json.dumps(index))
    listed = json.loads(manifest.read_text())
    listed["files"]["state.json"] = {"size_bytes": state.stat().st_size, "sha256": hashlib.sha256(state.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("step", "dtype", "told"),
    [(99, None, f"step 99 has no complete checkpoint in .*; the steps are {STEPS}"), (None, "int8", "dtype='int8' is not one of")],
)
def test_what_cannot_be_exported_is_refused(
    exported: dict[str, Exported], root: Path, tmp_path: Path, step: int | None, dtype: str | None, told: str
) -> None:
    assert exported
    with pytest.raises(CheckpointError, match=told):
        export_run(open_location(str(root / "gpt2-zero-2-fp32")), open_location(str(tmp_path / "out")), step=step, dtype=dtype)


def test_an_export_without_its_tokenizer_is_refused(exported: dict[str, Exported], root: Path, tmp_path: Path) -> None:
    assert exported
    tokenizer = root / "prepared" / "tokenizer"
    tokenizer.rename(root / "elsewhere")
    try:
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            export_run(open_location(str(root / "gpt2-zero-2-fp32")), open_location(str(tmp_path / "out")))
    finally:
        (root / "elsewhere").rename(tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no run\.json"):
        export_run(open_location(str(tmp_path)), open_location(str(tmp_path / "out")))


def test_an_export_replaces_nothing_but_an_export(exported: dict[str, Exported], root: Path, tmp_path: Path) -> None:
    assert exported
    run_dir = root / "gpt2-zero-2-fp32"
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.md").write_text("dear to me")
    for target, told in ((work, "holds notes.md"), (run_dir, "holds checkpoints"), (root, "holds ")):
        with pytest.raises(StorageError, match=told):
            export_run(open_location(str(run_dir)), open_location(str(target)))
    assert (work / "notes.md").read_text() == "dear to me"
    assert (run_dir / "run.json").exists()
    out = open_location(str(tmp_path / "again"))
    assert export_run(open_location(str(run_dir)), out) == export_run(open_location(str(run_dir)), out)
