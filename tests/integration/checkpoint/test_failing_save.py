"""When one rank cannot write, every rank hears of it, and what was complete stays."""

from __future__ import annotations

from pathlib import Path

from support.failing_save import save_with_a_failing_rank
from support.ranks import run_ranks


def test_every_rank_is_told_and_nothing_complete_is_lost(tmp_path: Path) -> None:
    for told, complete, files in run_ranks(save_with_a_failing_rank, 2, str(tmp_path / "checkpoints"), 1):
        assert "could not be written by rank 1: " in told
        assert complete == [1]
        assert files == ["rank-0", "rank-1"]
