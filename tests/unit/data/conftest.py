"""Prepared data written by hand, so that no test of a reader depends on the writer of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from rayapp.data.packing import Rows
from rayapp.data.shards import MANIFEST_NAME, DataManifest, PreparedData, ShardEntry, ShardWriter, SourceEntry, open_prepared
from rayapp.storage import Location, open_location

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

SEQUENCE_LENGTH = 8
EOS = 0


@dataclass(frozen=True)
class MadeData:
    """Prepared data, and what every row holds, by row id."""

    prepared: PreparedData
    tokens: np.ndarray
    loss_mask: np.ndarray
    document_starts: list[list[int]]


def random_rows(num_rows: int, rng: np.random.Generator) -> Rows:
    shape = (num_rows, SEQUENCE_LENGTH + 1)
    starts = [np.flatnonzero(rng.random(SEQUENCE_LENGTH + 1) < 0.2).astype(np.int32) for _ in range(num_rows)]
    return Rows(rng.integers(1, 1000, shape, dtype=np.int32), rng.random(shape) < 0.8, starts)


def write_split(folder: Location, stem: str, rows: Rows, rows_per_shard: int) -> list[ShardEntry]:
    writer = ShardWriter(folder, stem, sequence_length=SEQUENCE_LENGTH, rows_per_shard=rows_per_shard, writer_id="test")
    for start in range(0, len(rows), 3):
        writer.add(rows[start : start + 3])
    return writer.finish()


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., MadeData]:
    def make(
        train: tuple[int, ...] = (37,),
        validation: tuple[int, ...] = (11,),
        weights: tuple[float, ...] = (1.0,),
        rows_per_shard: int = 10,
        folder: Location | None = None,
    ) -> MadeData:
        rng = np.random.default_rng(7)
        folder = folder or open_location(str(tmp_path / "prepared"))
        train_rows = [random_rows(n, rng) for n in train]
        validation_rows = [random_rows(n, rng) for n in validation]
        sources = []
        for i, (t, v, weight) in enumerate(zip(train_rows, validation_rows, weights, strict=True)):
            (folder / f"source-{i}").make_dirs()
            entries = [write_split(folder, f"source-{i}/{name}", rows, rows_per_shard) for name, rows in (("t", t), ("v", v))]
            sources.append(SourceEntry(path=f"s{i}", weight=weight, train=entries[0], validation=entries[1]))
        manifest = DataManifest(
            fingerprint="f",
            sequence_length=SEQUENCE_LENGTH,
            vocab_size=1000,
            tokenizer_sha256="t",
            eos_token_id=EOS,
            sources=sources,
            num_documents=1,
            num_validation_documents=1,
            num_train_tokens=1,
            num_validation_tokens=1,
            dropped={},
            num_unreadable_files=0,
            unreadable_files=[],
        )
        (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
        everything = [*train_rows, *validation_rows]
        return MadeData(
            open_prepared(folder),
            np.concatenate([rows.tokens for rows in everything]),
            np.concatenate([rows.loss_mask for rows in everything]),
            [list(starts) for rows in everything for starts in rows.document_starts],
        )

    return make
