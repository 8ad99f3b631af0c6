"""Locations in a file tree and in other filesystems behave alike."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from pyarrow import fs

from rayapp.errors import StorageError
from rayapp.storage import COPY_CHUNK_BYTES, Location, open_location


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An existing folder; the remote one is no file tree for all that a Location knows."""
    if request.param == "local":
        return open_location(str(tmp_path))
    return Location(fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem()), tmp_path.name, "mock://bucket")


def names(folder: Location) -> list[str]:
    return [child.name for child in folder.children()]


def test_what_is_written_is_read(place: Location) -> None:
    file = place / "a.txt"
    assert not file.exists()
    file.write_text("grüße")
    assert file.exists()
    assert not file.is_dir()
    assert (file.read_text(), file.read_bytes(), file.size_bytes()) == ("grüße", "grüße".encode(), 7)
    file.write_bytes(b"shorter")
    assert file.read_bytes() == b"shorter"
    assert names(place) == ["a.txt"], "no partial file is left"
    assert (file.name, str(file).endswith("/a.txt")) == ("a.txt", True)


def test_large_files_are_copied_piece_by_piece(place: Location, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = os.urandom(COPY_CHUNK_BYTES + 17)
    source = tmp_path_factory.mktemp("source") / "big"
    source.write_bytes(content)
    file = place / "big"
    file.upload(source)
    assert file.sha256() == hashlib.sha256(content).hexdigest()
    target = source.parent / "deep" / "back"
    file.download(target)
    assert target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == ["back"]


def test_listing(place: Location) -> None:
    folder = place / "f"
    (folder / "sub").make_dirs()
    for name in ("b", "a", "sub/c"):
        (folder / name).write_text(name)
    assert names(folder) == ["a", "b", "sub"]
    assert [(str(file).removeprefix(f"{folder}/"), file.read_text()) for file in folder.files()] == [(n, n) for n in ("a", "b", "sub/c")]
    assert folder.is_dir()
    assert names(place / "nowhere") == list((place / "nowhere").files()) == []


def test_deleting(place: Location) -> None:
    folder = place / "f"
    (folder / "sub").make_dirs()
    (folder / "sub" / "c").write_text("c")
    (folder / "a").write_text("a")
    (folder / "a").delete()
    assert names(folder) == ["sub"]
    folder.delete()
    folder.delete()
    assert not folder.exists()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    target = open_location(str(tmp_path / "taken"))
    (target / "inside").write_text("kept")
    with pytest.raises(StorageError, match=f"storage {target} cannot be written: .*; check the path"):
        target.write_text("a file in place of a folder that is not empty")
    assert (target / "inside").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_below_a_file_is_refused(place: Location) -> None:
    (place / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be created"):
        (place / "file" / "below").make_dirs()
    with pytest.raises(StorageError, match="cannot be written"):
        (place / "file" / "below").write_text("x")


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs", "~/runs", str(tmp_path / "runs")):
        location = open_location(path)
        assert (location.uri, location.is_local) == (str(tmp_path / "runs"), True)


def test_uris(tmp_path: Path) -> None:
    local = open_location(f"file://{tmp_path}/")
    assert local.is_local
    assert local.uri == str(tmp_path)
    bucket = open_location("s3://bucket/runs/?region=us-east-1")
    assert not bucket.is_local
    assert bucket.path == "bucket/runs"


@pytest.mark.parametrize("path", ["nope://bucket/x", "://x"])
def test_a_scheme_that_is_unknown_is_refused(path: str) -> None:
    with pytest.raises(StorageError, match=r"location '.*' cannot be opened: .*; use a path, or s3://"):
        open_location(path)
