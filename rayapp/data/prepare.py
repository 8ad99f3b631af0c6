"""Prepares a corpus: tokenized in parallel with Ray Data, packed to rows once, kept under its fingerprint."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from transformers import PreTrainedTokenizerFast

from rayapp.config.schema import RunFile
from rayapp.data.group import Group, GroupResult, RowFormat, form_groups, prepare_item
from rayapp.data.reading import cut_file, read_piece
from rayapp.data.shards import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    DataManifest,
    PreparedData,
    ShardEntry,
    SourceEntry,
    UnreadableFile,
    open_prepared,
)
from rayapp.data.sources import ListedSource, list_sources
from rayapp.data.tokenizer import backend_json, load_tokenizer, save_tokenizer, tokenizer_sha256, train_tokenizer, vocab_size_of
from rayapp.errors import DataError, Problem, RayappError, StorageError
from rayapp.storage import Location

FORMAT_VERSION = 1
PREPARED_FOLDER = "data"
FINGERPRINT_DIGITS = 32
MAX_LISTED_FILES = 20
TRAINING_PIECE_BYTES = 2**22
REPORT_INTERVAL_S = 2.0


@dataclass(frozen=True)
class _Corpus:
    """What there is to prepare.

    Attributes:
        sources: with their files.
        tokenizer: None if it is to be trained on them.
        fingerprint: of all that determines the rows.
    """

    sources: list[ListedSource]
    tokenizer: PreTrainedTokenizerFast | None
    fingerprint: str


def fingerprint(file: RunFile) -> str:
    """What tells prepared data apart: of the corpus (names, sizes and times of change), the tokenizer and how rows are made.

    Raises:
        DataError: the corpus or the tokenizer is not as the run file says.
    """
    return _survey(file).fingerprint


def prepared_folder(storage: Location, data_fingerprint: str) -> Location:
    """Where the data with a fingerprint lies."""
    return storage / PREPARED_FOLDER / data_fingerprint


def find_prepared(file: RunFile, storage: Location) -> PreparedData | None:
    """The prepared data of a run file, or None where there is none yet. Needs no Ray.

    Raises:
        DataError: the corpus or the tokenizer is not as the run file says, or the prepared data is damaged.
    """
    return _find(prepared_folder(storage, fingerprint(file)))


def prepare(file: RunFile, storage: Location, report: Callable[[str], None]) -> PreparedData:
    """The prepared data of a run file, made if it is not there. Ray must be initialised.

    The manifest is written last, so a folder that was left half-written is not used, and the next call fills it anew. Two calls
    at once write the same bytes under the same names, each file whole or not at all.

    Args:
        file: the run file.
        storage: every node must reach it.
        report: takes a line of progress.

    Raises:
        DataError: the corpus or the tokenizer is not as the run file says, nothing is left of a source, or the data that
            is there is damaged.
        StorageError: the corpus cannot be read or the storage cannot be written.
    """
    corpus = _survey(file)
    folder = prepared_folder(storage, corpus.fingerprint)
    if (found := _find(folder)) is not None:
        report(f"prepared data {corpus.fingerprint} is there already")
        return found
    try:
        manifest = _write(file, corpus, folder, report)
    except StorageError:
        # another prepare that ended first may have removed our unfinished files
        if (found := _find(folder)) is not None:
            return found
        raise
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1))
    _remove_leftovers(folder, manifest)
    return open_prepared(folder, reused=False)


def _find(folder: Location) -> PreparedData | None:
    return open_prepared(folder) if (folder / MANIFEST_NAME).exists() else None


def _survey(file: RunFile) -> _Corpus:
    sources = list_sources(file.data)
    tokenizer = None if file.data.tokenizer.train else _load_tokenizer(file)
    return _Corpus(sources, tokenizer, _fingerprint(file, sources, tokenizer))


def _load_tokenizer(file: RunFile) -> PreTrainedTokenizerFast:
    if file.data.tokenizer.path is not None:
        return load_tokenizer(file.data.tokenizer.path)
    if file.model.path is not None:
        return load_tokenizer(file.model.path, file.model.revision)
    raise DataError(
        Problem(
            "data.tokenizer",
            f"is left out, and model.kind={file.model.kind} brings none",
            "give data.tokenizer.path, or data.tokenizer.train.vocab_size to train one on the corpus",
        )
    )


def _fingerprint(file: RunFile, sources: list[ListedSource], tokenizer: PreTrainedTokenizerFast | None) -> str:
    data = file.data
    digest = hashlib.sha256()

    def add(*values: Any) -> None:
        digest.update(json.dumps(values).encode() + b"\n")

    add("format", FORMAT_VERSION, data.sequence_length, data.validation_fraction, data.max_document_bytes, data.rows_per_shard)
    if tokenizer is None:
        assert data.tokenizer.train is not None
        add("trained tokenizer", data.tokenizer.train.model_dump())
    else:
        add("tokenizer", tokenizer_sha256(tokenizer))
    for source in sources:
        add("source", source.section.weight)
        for entry in source.files:
            content = None if entry.content is None else hashlib.sha256(entry.content).hexdigest()
            add(entry.name, entry.format, entry.text_column, entry.size_bytes, entry.mtime_ns, content)
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


def _write(file: RunFile, corpus: _Corpus, folder: Location, report: Callable[[str], None]) -> DataManifest:
    """Write everything but the manifest."""
    folder.make_dirs()  # a storage that cannot be written shows before the work
    tokenizer = corpus.tokenizer or _train_tokenizer(file, corpus.sources, report)
    row_format = RowFormat(
        tokenizer_json=backend_json(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        sequence_length=file.data.sequence_length,
        rows_per_shard=file.data.rows_per_shard,
        validation_fraction=file.data.validation_fraction,
        max_document_bytes=file.data.max_document_bytes,
    )
    groups = [group for index, source in enumerate(corpus.sources) for group in form_groups(index, source.files, row_format)]
    results = _tokenize(groups, row_format, folder, report)
    _refuse_empty_sources(corpus, results)
    save_tokenizer(tokenizer, folder / TOKENIZER_NAME)
    return _manifest(corpus, tokenizer, row_format, results)


def _train_tokenizer(file: RunFile, sources: list[ListedSource], report: Callable[[str], None]) -> PreTrainedTokenizerFast:
    train = file.data.tokenizer.train
    assert train is not None
    report("training the tokenizer")
    started = time.monotonic()
    tokenizer = train_tokenizer(_training_texts(file, sources), train.vocab_size)
    report(f"trained the tokenizer: {vocab_size_of(tokenizer)} entries in {time.monotonic() - started:.1f} s")
    return tokenizer


def _training_texts(file: RunFile, sources: list[ListedSource]) -> Iterator[str]:
    """Texts for the tokenizer's training: each source's share of the bytes, from pieces all over it."""
    assert file.data.tokenizer.train is not None
    total_weight = sum(source.section.weight for source in sources)
    for source in sources:
        budget_bytes = file.data.tokenizer.train.max_bytes * source.section.weight / total_weight
        pieces = [piece for entry in source.files for piece in cut_file(entry, TRAINING_PIECE_BYTES)]
        pieces.sort(key=lambda piece: hashlib.blake2b(f"{piece.file.name}/{piece.index}".encode()).digest())
        texts = (row for piece in pieces for row in read_piece(piece, file.data.max_document_bytes) if type(row) is str)
        for text in texts:
            yield text
            budget_bytes -= len(text.encode())
            if budget_bytes <= 0:
                break


def _tokenize(groups: list[Group], row_format: RowFormat, folder: Location, report: Callable[[str], None]) -> list[GroupResult]:
    """Prepare all groups with Ray Data; only their descriptions and counts travel, the shards are written where they are made."""
    started = reported = time.monotonic()
    results: list[GroupResult] = []
    num_tokens = 0
    items = ray.data.from_items([{"group": pickle.dumps(group)} for group in groups], override_num_blocks=len(groups))
    _configure(items.context)
    done = items.map(prepare_item, fn_kwargs={"row_format": row_format, "folder": folder})
    for row in _unwrapped(done.iter_rows()):
        result = GroupResult.model_validate_json(row["result"])
        results.append(result)
        num_tokens += result.train.num_tokens + result.validation.num_tokens
        if time.monotonic() - reported > REPORT_INTERVAL_S or len(results) == len(groups):
            reported = time.monotonic()
            report(f"tokenized {len(results)} of {len(groups)} groups, {num_tokens:,} tokens in {reported - started:.1f} s")
    return sorted(results, key=lambda result: (result.source, result.index))


def _configure(context: ray.data.DataContext) -> None:
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # one large compressed file is one group
    context.raise_original_map_exception = True


def _unwrapped(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows; what a task raised on purpose is raised as itself.

    Raises:
        StorageError: a task could not read or write.
    """
    try:
        yield from rows
    except ray.exceptions.RayError as error:
        cause: BaseException | None = error
        # Ray's wrapper is an instance of what it wraps too, so look behind every RayError
        while isinstance(cause, ray.exceptions.RayError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if isinstance(cause, RayappError):
            raise cause from error
        raise


def _refuse_empty_sources(corpus: _Corpus, results: list[GroupResult]) -> None:
    problems = []
    for index, source in enumerate(corpus.sources):
        own = [result for result in results if result.source == index]
        if any(result.train.shards for result in own):
            continue
        num_held_out = sum(result.validation.num_documents for result in own)
        problems.append(
            Problem(
                f"data.source={source.section.path!r}",
                f"gives no row to train on: {len(source.files)} files, {num_held_out} documents held out{_losses(own)}",
                "lower data.validation_fraction" if num_held_out else "check the files and text_column",
            )
        )
    if problems:
        raise DataError(*problems)


def _losses(results: list[GroupResult]) -> str:
    """What was left out, for people."""
    dropped = "".join(f", {number} {reason}" for reason, number in sorted(_dropped(results).items()))
    unreadable = _unreadable(results)
    files = f", {len(unreadable)} unreadable files (first: {unreadable[0].name}, {unreadable[0].reason})" if unreadable else ""
    return dropped + files


def _dropped(results: list[GroupResult]) -> Counter[str]:
    return sum((Counter(result.dropped) for result in results), Counter())


def _unreadable(results: list[GroupResult]) -> list[UnreadableFile]:
    """The defective files, each once, however many pieces of it met the defect."""
    first: dict[str, UnreadableFile] = {}
    for result in results:
        for found in result.unreadable_files:
            first.setdefault(found.name, found)
    return list(first.values())


def _manifest(corpus: _Corpus, tokenizer: PreTrainedTokenizerFast, row_format: RowFormat, results: list[GroupResult]) -> DataManifest:
    unreadable = _unreadable(results)
    return DataManifest(
        fingerprint=corpus.fingerprint,
        sequence_length=row_format.sequence_length,
        vocab_size=vocab_size_of(tokenizer),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        eos_token_id=row_format.eos_token_id,
        sources=[_source_entry(index, source, results) for index, source in enumerate(corpus.sources)],
        num_documents=sum(result.train.num_documents + result.validation.num_documents for result in results),
        num_validation_documents=sum(result.validation.num_documents for result in results),
        num_train_tokens=sum(result.train.num_tokens for result in results),
        num_validation_tokens=sum(result.validation.num_tokens for result in results),
        dropped=dict(sorted(_dropped(results).items())),
        num_unreadable_files=len(unreadable),
        unreadable_files=unreadable[:MAX_LISTED_FILES],
    )


def _source_entry(index: int, source: ListedSource, results: list[GroupResult]) -> SourceEntry:
    own = [result for result in results if result.source == index]
    train: list[ShardEntry] = [shard for result in own for shard in result.train.shards]
    validation = [shard for result in own for shard in result.validation.shards]
    return SourceEntry(path=source.section.path, weight=source.section.weight, train=train, validation=validation)


def _remove_leftovers(folder: Location, manifest: DataManifest) -> None:
    """Remove what an earlier prepare that did not finish has left among the shards."""
    named = {shard.name for shard in manifest.shards}
    for location in folder.files():
        name = location.path.removeprefix(f"{folder.path}/")
        if name.startswith("source-") and name not in named:
            location.delete()
