"""Small prepared data and runs on it, made without Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayapp.checkpoint.runs import RunFolder
from rayapp.config.resolved import ResolvedData, ResolvedRun
from rayapp.config.schema import SourceSection
from rayapp.data.group import Group, RowFormat, prepare_group
from rayapp.data.reading import Piece
from rayapp.data.shards import MANIFEST_NAME, TOKENIZER_NAME, DataManifest, PreparedData, SourceEntry, open_prepared
from rayapp.data.sources import list_source
from rayapp.data.tokenizer import backend_json, save_tokenizer, tokenizer_sha256, train_tokenizer, vocab_size_of
from rayapp.preflight.resolve import claim_run
from rayapp.storage import open_location
from support.runs import FAMILIES, SEQUENCE, resolved

TEXTS = [f"def step_{i}(count):\n    return count + {i} * {i % 7}\n" + "pass\n" * (i % 5) for i in range(150)]
VOCAB_SIZE = 300


def prepare_small(folder: Path, texts: Sequence[str] = TEXTS, sequence_length: int = SEQUENCE) -> PreparedData:
    """Rows in the texts' order (some hundred by default), a fifth of the documents held out, and the tokenizer's folder."""
    folder.mkdir(parents=True)
    corpus = folder.parent / f"{folder.name}.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(iter(TEXTS), VOCAB_SIZE)
    location = open_location(str(folder))
    save_tokenizer(tokenizer, location / TOKENIZER_NAME)
    row_format = RowFormat(
        backend_json(tokenizer),
        int(tokenizer.eos_token_id),
        sequence_length=sequence_length,
        rows_per_shard=50,
        validation_fraction=0.2,
        max_document_bytes=10_000,
    )
    files = list_source(SourceSection(path=str(corpus)))
    result = prepare_group(Group(0, 0, tuple(Piece(file) for file in files)), row_format, location)
    manifest = DataManifest(
        fingerprint="small",
        sequence_length=sequence_length,
        vocab_size=vocab_size_of(tokenizer),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        eos_token_id=row_format.eos_token_id,
        sources=[SourceEntry(path=str(corpus), weight=1.0, train=result.train.shards, validation=result.validation.shards)],
        num_documents=len(texts),
        num_validation_documents=result.validation.num_documents,
        num_train_tokens=result.train.num_tokens,
        num_validation_tokens=result.validation.num_tokens,
        dropped=result.dropped,
        num_unreadable_files=0,
        unreadable_files=[],
    )
    (location / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return open_prepared(location)


def run_on(prepared: PreparedData, run_dir: Path, family: str, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedRun:
    """A run of a tiny model on prepared data, its folder claimed; ``settings`` as for :func:`support.runs.resolved`."""
    model = {"config": {"vocab_size": prepared.vocab_size, **FAMILIES[family], **(config or {})}}
    run = resolved(family, model=model, **settings)
    data = ResolvedData(
        folder=str(prepared.folder),
        fingerprint=prepared.manifest.fingerprint,
        vocab_size=prepared.vocab_size,
        num_train_rows=prepared.num_train_rows,
        num_validation_rows=prepared.num_validation_rows,
    )
    return claimed(run.model_copy(update={"data": data, "storage_marker": "small"}), run_dir)


def claimed(run: ResolvedRun, run_dir: Path) -> ResolvedRun:
    """The same run in another folder, which is claimed for it."""
    moved = run.model_copy(update={"run_id": run_dir.name, "run_dir": str(run_dir)})
    claim_run(open_location(str(run_dir)), moved, "name: test\n")
    return moved


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where a run's checkpoint of a step lies."""
    return RunFolder(open_location(str(run_dir))).checkpoints.local_path / f"step-{step:08d}"
