"""Whole preparations with Ray Data: many formats, several filesystems, defects, and the same bytes every time."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from pyarrow import fs
from transformers import AutoTokenizer

from rayapp.config.schema import CacheSection, RunFile
from rayapp.data.loader import Loader
from rayapp.data.prepare import find_prepared, fingerprint, prepare, prepared_folder
from rayapp.data.shards import MANIFEST_NAME, PreparedData, ShardReader, open_prepared
from rayapp.data.tokenizer import load_tokenizer, tokenizer_sha256
from rayapp.errors import DataError, StorageError
from rayapp.storage import Location, open_location

pytestmark = pytest.mark.usefixtures("ray_of_two_cpus")
WORDS = "the of and to in is that it was for on are as with his they at be this from".split()  # noqa: SIM905 - prose


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(20, 400))) + f" {rng.random()} — déjà vu\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Every format, with defects, over several groups; and the texts that are good, in order."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(1)
    texts = [text(rng) for _ in range(2600)]
    (root / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:1800]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts[1800:2000]).encode()))
    pq.write_table(pa.table({"text": [*texts[2000:2500], None, " "]}), root / "c.parquet", row_group_size=50)
    (root / "d").mkdir()
    for i, t in enumerate(texts[2500:]):
        (root / "d" / f"{i:03d}.txt").write_text(t)
    (root / "e.jsonl").write_bytes(b'{"text": 7}\n{\n{"text": "\xff"}\n')
    (root / "f.jsonl.gz").write_bytes(gzip.compress(b'{"text": "lost"}\n')[:20])
    (root / "g.parquet").write_bytes(b"no parquet")
    return root, texts


def run_file(source: object, **data: object) -> RunFile:
    settings = {"source": source, "sequence_length": 64, "validation_fraction": 0.1, "rows_per_shard": 500}
    return RunFile.model_validate({"name": "x", "data": {**settings, "tokenizer": {"train": {"vocab_size": 600}}, **data}})


def quiet(line: str) -> None:
    """Takes a line of progress, and leaves it."""


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def documents_of(prepared: PreparedData, row_ids: range) -> set[str]:
    """The documents in rows of one split, read through the shards and decoded by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer.local_path)
    with ShardReader(prepared, CacheSection()) as reader:
        tokens = np.concatenate([reader[i].tokens[:-1] for i in row_ids] + [reader[row_ids[-1]].tokens[-1:]])
    pieces = np.split(tokens, np.flatnonzero(tokens == prepared.manifest.eos_token_id))
    return {tokenizer.decode(piece[piece != prepared.manifest.eos_token_id]) for piece in pieces}


@pytest.fixture(scope="module")
def prepared(ray_of_two_cpus: None, corpus: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    lines: list[str] = []
    made = prepare(run_file(str(corpus[0])), open_location(str(tmp_path_factory.mktemp("storage"))), lines.append)
    assert any("trained the tokenizer" in line for line in lines)
    assert any("groups" in line for line in lines)
    return made


def test_all_good_documents_are_there_and_the_others_are_counted(prepared: PreparedData, corpus: tuple[Path, list[str]]) -> None:
    manifest = prepared.manifest
    assert not prepared.reused
    assert len(manifest.sources[0].train) > 3
    assert manifest.num_documents == 2600
    assert manifest.dropped == {"missing": 1, "empty": 1, "not_a_string": 1, "invalid_json": 1, "invalid_utf8": 1}
    assert [Path(file.name).name for file in manifest.unreadable_files] == ["f.jsonl.gz", "g.parquet"]
    assert manifest.num_unreadable_files == 2
    train = documents_of(prepared, range(prepared.num_train_rows))
    held_out = documents_of(prepared, range(prepared.num_train_rows, prepared.num_train_rows + prepared.num_validation_rows))
    assert set(corpus[1]) <= train | held_out
    assert len(set(corpus[1]) & held_out) == manifest.num_validation_documents > 200
    assert len(set(corpus[1]) & train & held_out) == 0
    prepared.verify(deep=True)


def test_it_is_found_and_reused(prepared: PreparedData, corpus: tuple[Path, list[str]]) -> None:
    storage = open_location(str(prepared.folder.local_path.parent.parent))
    before = files_below(prepared.folder.local_path)
    for found in (find_prepared(run_file(str(corpus[0])), storage), prepare(run_file(str(corpus[0])), storage, quiet)):
        assert found is not None
        assert found.reused
        assert found.manifest == prepared.manifest
    assert files_below(prepared.folder.local_path) == before
    assert find_prepared(run_file(str(corpus[0]), sequence_length=32), storage) is None


def test_other_parallelism_makes_the_same_bytes(prepared: PreparedData, corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    """One task at a time, as on one CPU, while the fixture's run had two."""

    @ray.remote(num_cpus=1)
    class Occupied:
        def ready(self) -> bool:
            return True

    occupied = Occupied.remote()
    assert ray.get(occupied.ready.remote())
    again = prepare(run_file(str(corpus[0])), open_location(str(tmp_path)), quiet)
    ray.kill(occupied)
    assert files_below(again.folder.local_path) == files_below(prepared.folder.local_path)


def test_a_half_written_folder_is_not_used_and_is_mended(prepared: PreparedData, corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder = prepared_folder(open_location(str(tmp_path)), prepared.manifest.fingerprint).local_path
    (folder / "source-000").mkdir(parents=True)
    (folder / "source-000" / "train-000000-000.arrow").write_bytes(b"half")
    (folder / "source-000" / "train-000000-000.arrow.abc.partial").write_bytes(b"half")
    file = run_file(str(corpus[0]))
    assert find_prepared(file, open_location(str(tmp_path))) is None
    prepare(file, open_location(str(tmp_path)), quiet).verify(deep=True)
    assert files_below(folder) == files_below(prepared.folder.local_path)


def test_two_at_once(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    file = run_file(str(corpus[0] / "d"))
    made: list[PreparedData] = []
    threads = [threading.Thread(target=lambda: made.append(prepare(file, open_location(str(tmp_path)), quiet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert made[0].manifest == made[1].manifest
    made[0].verify(deep=True)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_storage_that_is_not_a_local_folder(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    storage = Location(fs.SubTreeFileSystem(str(tmp_path / "bucket"), fs.LocalFileSystem()), "runs", "mock://runs")
    made = prepare(run_file(str(corpus[0] / "d")), storage, quiet)
    made.verify(deep=True)
    cache = CacheSection(path=str(tmp_path / "cache"))
    settings = {"seed": 0, "shuffle": True, "reset_attention": True, "pin_memory": False, "cache": cache, "dp_rank": 0, "dp_size": 1}
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    with Loader(open_prepared(made.folder), **settings, **sizes) as loader:
        batches = loader.train_batches(0)
        rows = [row for step in islice(batches, made.num_train_rows // 4) for batch in step for row in batch.row_ids]
        batches.close()
    assert len(set(rows)) == len(rows) == made.num_train_rows // 4 * 4
    assert list((tmp_path / "cache").glob("*.arrow"))


def test_a_mixture_and_a_given_tokenizer(prepared: PreparedData, corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    root, _ = corpus
    sources = [{"path": str(root / "d"), "weight": 3.0}, {"path": f"{root}/c.*", "weight": 1.0}]
    file = run_file(sources, tokenizer={"path": str(prepared.tokenizer.local_path)})
    made = prepare(file, open_location(str(tmp_path)), quiet)
    assert [source.weight for source in made.manifest.sources] == [3.0, 1.0]
    assert made.manifest.tokenizer_sha256 == prepared.manifest.tokenizer_sha256
    assert made.manifest.tokenizer_sha256 == tokenizer_sha256(load_tokenizer(str(made.tokenizer.local_path)))
    assert made.manifest.num_documents == 600


def test_a_pretrained_model_brings_its_tokenizer(prepared: PreparedData, corpus: tuple[Path, list[str]]) -> None:
    base = run_file(str(corpus[0] / "d"), tokenizer={}).model_dump()
    path = str(prepared.tokenizer.local_path)
    file = RunFile.model_validate({**base, "model": {"kind": "pretrained", "path": path}})
    assert fingerprint(file) == fingerprint(run_file(str(corpus[0] / "d"), tokenizer={"path": path}))
    with pytest.raises(DataError, match=r"data\.tokenizer is left out.*vocab_size"):
        fingerprint(RunFile.model_validate(base))


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 65},
        {"validation_fraction": 0.2},
        {"rows_per_shard": 501},
        {"max_document_bytes": 5000},
        {"tokenizer": {"train": {"vocab_size": 601}}},
        {"tokenizer": {"train": {"vocab_size": 600, "max_bytes": 5}}},
    ],
)
def test_the_fingerprint_tells_what_makes_other_rows(corpus: tuple[Path, list[str]], change: dict[str, object]) -> None:
    source = str(corpus[0])
    assert fingerprint(run_file(source)) == fingerprint(run_file(source, shuffle=False, reset_attention=True))
    assert fingerprint(run_file(source, **change)) != fingerprint(run_file(source))


def test_the_fingerprint_follows_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("one")
    file = run_file(str(tmp_path / "a"))
    first = fingerprint(file)
    (tmp_path / "a" / "y.txt").write_text("two")
    second = fingerprint(file)
    (tmp_path / "a" / "y.txt").write_text("too")
    assert len({first, second, fingerprint(file)}) == 3
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint(run_file(str(tmp_path / "b"))) == fingerprint(run_file(str(tmp_path / "b")))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda root: (root / "x.txt").write_text(" "),
            r"gives no row to train on: 1 files, 0 documents held out, 1 empty; check",
        ),
        (lambda root: (root / "x.jsonl").write_text('{"body": "a"}\n' * 3), r"3 missing; check the files and text_column"),
        (lambda root: (root / "x.jsonl.gz").write_bytes(b"no"), r"1 unreadable files \(first: .*x\.jsonl\.gz"),
    ],
)
def test_an_empty_corpus_is_refused_and_says_why(tmp_path: Path, make: Callable[[Path], object], match: str) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    make(root)
    with pytest.raises(DataError, match=match):
        prepare(run_file(str(root)), open_location(str(tmp_path / "storage")), quiet)
    assert not list((tmp_path / "storage").rglob(MANIFEST_NAME))


def test_an_unwritable_storage_is_refused_before_the_work(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    with pytest.raises(StorageError, match="cannot be created"):
        prepare(run_file(str(corpus[0] / "d")), open_location(str(tmp_path / "file")), lines.append)
    assert lines == []


def test_what_a_worker_raises_comes_without_ray_around_it(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    file = run_file(str(corpus[0] / "d"))
    folder = prepared_folder(open_location(str(tmp_path)), fingerprint(file)).local_path
    folder.mkdir(parents=True)
    (folder / "source-000").write_text("a file where the shards' folder should be")
    with pytest.raises(StorageError, match="cannot be created") as error:
        prepare(file, open_location(str(tmp_path)), quiet)
    assert type(error.value) is StorageError
    assert len(str(error.value).splitlines()) == 1
