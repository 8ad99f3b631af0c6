"""Tells which ranks hold a worker group up. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rayapp.train.group import RankView

SILENT_S = 10.0
"""A rank that beats every second and was not heard of for so long is stopped, gone, or cut off."""


def hung_ranks(views: Mapping[int, RankView], hang_timeout_s: float) -> dict[int, str]:
    """The ranks that hold the group up, and why; empty while it makes progress.

    As long as one rank makes progress the others wait for it, however long: for the end of its upload, say.
    Where ranks have gone silent, those are to blame: the others wait for them. Otherwise those that have entered fewer
    collectives than the rest; otherwise those outside of any; otherwise all, for they wait for each other.

    Args:
        views: of all ranks.
        hang_timeout_s: seconds without progress that are a hang.
    """
    watched = {rank: view for rank, view in views.items() if not view.has_left}
    unchanged_s = [view.unchanged_s for view in watched.values()]
    if not unchanged_s or max(unchanged_s) < hang_timeout_s or min(unchanged_s) < hang_timeout_s / 2:
        return {}
    silent = [rank for rank, view in watched.items() if view.silent_s >= min(SILENT_S, hang_timeout_s)]
    if silent:
        return {rank: _of_silent(watched[rank], _waiting(watched, silent)) for rank in silent}
    behind = _behind(watched)
    return {rank: _of_stuck(watched[rank], _waiting(watched, behind)) for rank in behind}


def _behind(stuck: Mapping[int, RankView]) -> list[int]:
    entered = {rank: view.beat.collective for rank, view in stuck.items() if view.beat.collective is not None}
    if entered and min(entered.values()) < max(entered.values()):
        return [rank for rank, number in entered.items() if number == min(entered.values())]
    outside = [rank for rank, view in stuck.items() if not (view.beat.inside or "").startswith("collective")]
    return outside or list(stuck)


def _of_silent(view: RankView, others: str) -> str:
    return (
        f"{view.worker} has not been heard of for {view.silent_s:.0f} s, since step {view.beat.step} ({view.beat.doing}): its process is "
        f"stopped, or its node is gone or cut off{others}"
    )


def _of_stuck(view: RankView, others: str) -> str:
    inside = f", inside {view.beat.inside}" if view.beat.inside else ""
    return f"{view.worker} made no progress for {view.unchanged_s:.0f} s after step {view.beat.step} ({view.beat.doing}{inside}){others}"


def _waiting(views: Mapping[int, RankView], blamed: list[int]) -> str:
    """Where the others are, for people."""
    places: dict[str, list[int]] = {}
    for rank, view in views.items():
        if rank not in blamed:
            places.setdefault(view.beat.inside or view.beat.doing, []).append(rank)
    if not places:
        return ""
    told = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} in {place}" for place, ranks in places.items()]
    return f"; waiting for it: {'; '.join(told)}"
