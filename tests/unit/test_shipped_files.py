"""What the repository ships for users is valid by other people's schemas."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import ray.autoscaler
import yaml

ROOT = Path(__file__).parents[2]


def test_the_cluster_file_passes_rays_own_schema() -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    assert cluster["available_node_types"]["gpu"]["min_workers"] == 2


def test_the_cluster_installs_the_versions_that_the_package_asks_for() -> None:
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    (command,) = cluster["setup_commands"]
    for requirement in command.split('"')[1::2]:
        assert f'"{requirement}"' in project, requirement
