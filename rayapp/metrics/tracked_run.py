"""A run as experiment trackers know it: by which id, under which name, with which parameters."""

from __future__ import annotations

import hashlib
from typing import Any

from rayapp.config.resolved import ResolvedRun

MOST_ID_CHARACTERS = 50


def tracked_id(run: ResolvedRun) -> str:
    """The same at every start of a run, another for a run elsewhere that has the same name."""
    digest = hashlib.sha256(run.run_dir.encode()).hexdigest()
    return f"{run.run_id[:MOST_ID_CHARACTERS]}-{digest[:12]}"


def tracked_name(run: ResolvedRun) -> str:
    """What people read: ``family/run id``."""
    return f"{run.file.name}/{run.run_id}"


def run_parameters(run: ResolvedRun) -> dict[str, Any]:
    """The resolved run file as plain nested values, and what it came to on this cluster.

    Of ``resources.env`` the names alone: a tracker's pages are read by more people than a run's folder.
    """
    tree = run.file.model_dump(mode="json")
    tree["resources"]["env"] = sorted(run.file.resources.env)
    return {
        **tree,
        "run_dir": run.run_dir,
        "strategy": run.strategy,
        "world_size": run.layout.world_size,
        "dp_size": run.layout.dp_size,
        "device_name": run.device.name,
        "num_parameters": run.num_parameters,
        "flops_per_token": run.flops_per_token,
        "data_fingerprint": run.data.fingerprint,
    }
