"""Finding the runs of a family."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.runs import resolved

from rayapp.checkpoint.runs import RunFolder, named_run, new_run_id, newest_complete_run, newest_run, read_resolved, runs_of
from rayapp.errors import CheckpointError
from rayapp.storage import Location, open_location


@pytest.fixture
def storage(tmp_path: Path) -> Location:
    return open_location(str(tmp_path))


def make_run(storage: Location, run_id: str, *, exported: bool = False, name: str = "family") -> Location:
    run = storage / name / run_id
    run.make_dirs()
    RunFolder(run).resolved.write_text(resolved().model_dump_json())
    if exported:
        (RunFolder(run).model / "config.json").write_text("{}")
    return run


def test_ids_sort_by_age_and_differ() -> None:
    first = new_run_id()
    time.sleep(1.1)
    ids = [new_run_id() for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(first < later for later in ids)
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in ids)


def test_the_newest_run_and_the_newest_complete_one(storage: Location) -> None:
    make_run(storage, "20260101-000000-aaaa", exported=True)
    make_run(storage, "20260102-000000-aaaa", exported=True)
    make_run(storage, "20260103-000000-aaaa")
    make_run(storage, "20260104-000000-aaaa", exported=True, name="other")
    (storage / "family" / "no-run").make_dirs()
    assert [run.name[:8] for run in runs_of(storage, "family")] == ["20260101", "20260102", "20260103"]
    assert newest_run(storage, "family").name == "20260103-000000-aaaa"
    assert newest_complete_run(storage, "family").name == "20260102-000000-aaaa"
    assert newest_complete_run(storage, "family", "20260101-000000-aaaa").name == "20260101-000000-aaaa"


def test_what_is_not_there_is_refused_with_a_remedy(storage: Location) -> None:
    with pytest.raises(CheckpointError, match=r"family nobody in .* has no run to resume; start one: rayapp train FILE"):
        newest_run(storage, "nobody")
    with pytest.raises(CheckpointError, match="has no complete run; train one first"):
        newest_complete_run(storage, "nobody")
    with pytest.raises(CheckpointError, match=r"run 'x' of nobody in .* does not exist; the newest are none"):
        named_run(storage, "nobody", "x")
    for day in range(1, 8):
        make_run(storage, f"2026010{day}")
    with pytest.raises(CheckpointError, match=r"does not exist; the newest are 20260103, 20260104, 20260105, 20260106, 20260107$"):
        named_run(storage, "family", "20250101")
    with pytest.raises(CheckpointError, match="has no exported model; finish it with: rayapp train FILE --resume 20260101"):
        newest_complete_run(storage, "family", "20260101")


def test_a_resolved_run_comes_back(storage: Location) -> None:
    run = make_run(storage, "20260101")
    assert read_resolved(run) == resolved()
    RunFolder(run).resolved.write_text('{"run_id": 1}')
    with pytest.raises(CheckpointError, match=r"has a run\.json that this version cannot read"):
        read_resolved(run)
    with pytest.raises(CheckpointError, match=r"has no run\.json; give the folder of a run"):
        read_resolved(storage)


def test_the_newest_run_is_the_one_started_last_whatever_its_name(storage: Location) -> None:
    for run_id, created_at in (("baseline", 100.0), ("20260101-000000-aaaa", 200.0)):
        run = make_run(storage, run_id)
        resolved_run = read_resolved(run).model_copy(update={"created_at": created_at})
        RunFolder(run).resolved.write_text(resolved_run.model_dump_json())
    assert newest_run(storage, "family").name == "20260101-000000-aaaa"
