"""What a run ran with: package versions, git state, hardware."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rayapp.cluster.inventory import ClusterInventory

PACKAGES = (
    "rayapp",
    "ray",
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
    "pydantic",
)
GIT_TIMEOUT_S = 10


def describe_environment(inventory: ClusterInventory) -> dict[str, Any]:
    """A JSON object for `environment.json`; what is not there is null."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git_state(Path.cwd()),
        "nodes": [asdict(node) for node in inventory.nodes],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and changed files of the checkout that the command was started in."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain") or ""
    return {"commit": commit, "changed_files": [line[3:] for line in changed.splitlines()]}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
