"""What can be placed, node by node, and how this machine and Ray's nodes are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rayapp.cluster.inventory import ClusterInventory, NodeInventory, WorkerResources, inventory_of, local_inventory
from rayapp.cluster.machine import Gpu, accelerator_type_of, detect_gpus, detect_memory_bytes, detect_num_cpus, parse_gpus, visible
from rayapp.errors import PlacementError


def node(cpus: float, gpus: float = 0, kind: str | None = None, **labels: str) -> NodeInventory:
    return NodeInventory("id", "10.0.0.1", cpus, gpus, kind, 2**30, labels)


@pytest.mark.parametrize(
    ("nodes", "worker", "expected"),
    [
        ([node(3), node(3)], WorkerResources(2), 2),  # 6 CPUs would hold 3 if workers could spread
        ([node(1), node(1)], WorkerResources(2), 0),
        ([node(0.3)], WorkerResources(0.1), 3),  # 0.3 / 0.1 is 2.9999999999999996
        ([node(8, 4), node(64)], WorkerResources(1, 1), 4),
        ([node(2, 8)], WorkerResources(1, 1), 2),
        ([node(1, 1)], WorkerResources(0.5, 0.25), 2),
        ([node(8, 8, "H100"), node(8, 8, "A100")], WorkerResources(1, 1, "H100"), 8),
        ([node(8, 8, "H100")], WorkerResources(1, 1, "B200"), 0),
        ([node(4, zone="a"), node(4, zone="b"), node(4)], WorkerResources(1, labels={"zone": "b"}), 4),
        ([node(0), node(4)], WorkerResources(1), 4),  # a head that schedules nothing
        ([], WorkerResources(1), 0),
    ],
)
def test_max_workers(nodes: list[NodeInventory], worker: WorkerResources, expected: int) -> None:
    assert ClusterInventory(tuple(nodes)).max_workers(worker) == expected


def test_totals() -> None:
    cluster = ClusterInventory((node(8, 4, "H100"), node(2), node(8, 4, "A100")))
    assert (cluster.num_cpus, cluster.num_gpus, cluster.accelerator_types) == (18, 8, ("A100", "H100"))


def test_rays_nodes_are_read_without_the_dead() -> None:
    alive = {
        "NodeID": "ab12", "Alive": True, "NodeManagerAddress": "10.0.0.7",
        "Resources": {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H200": 1.0, "memory": 1e12, "node:10.0.0.7": 1.0},
        "Labels": {"ray.io/node-id": "ab12", "zone": "a"},
    }  # fmt: skip
    dead = {"NodeID": "cd34", "Alive": False, "NodeManagerAddress": "10.0.0.8", "Resources": {}, "Labels": {}}
    head = {"NodeID": "ef56", "Alive": True, "NodeManagerAddress": "10.0.0.9", "Resources": {"memory": 5.0}, "Labels": {}}
    assert inventory_of([alive, dead, head]).nodes == (
        NodeInventory("ab12", "10.0.0.7", 16.0, 8.0, "H200", 10**12, {"ray.io/node-id": "ab12", "zone": "a"}),
        NodeInventory("ef56", "10.0.0.9", 0.0, 0.0, None, 5, {}),
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, os.cpu_count()),
        ({"cpu.max": "100000000 100000\n"}, os.cpu_count()),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, os.cpu_count()),
        ({}, os.cpu_count()),
    ],
)
def test_cpus_of_a_container(tmp_path: Path, files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_MULTIPROCESSING_CPU_COUNT", raising=False)
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert detect_num_cpus(tmp_path) == expected


def test_memory_of_a_container(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert detect_memory_bytes(tmp_path) == pytest.approx(machine, rel=0.01)
    (tmp_path / "memory.max").write_text("max\n")
    assert detect_memory_bytes(tmp_path) == pytest.approx(machine, rel=0.01)
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert detect_memory_bytes(tmp_path) == 2**30


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"), ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
    ],
)  # fmt: skip
def test_accelerator_types_are_rays(name: str, kind: str) -> None:
    assert accelerator_type_of(name) == kind


def test_gpus_are_read_and_limited_to_the_visible() -> None:
    gpus = parse_gpus("NVIDIA H200, 143771\nNVIDIA H200, 143771\n")
    assert gpus == [Gpu("H200", 143771 * 2**20)] * 2
    assert visible(gpus, {}) == gpus
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": "1"}) == gpus[:1]
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": ""}) == []


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_program_that_lists_gpus_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "echo NVIDIA L4, 23034", monkeypatch)
    assert detect_gpus() == [Gpu("L4", 23034 * 2**20)]
    (only,) = local_inventory().nodes
    assert (only.num_gpus, only.accelerator_type, only.device_memory_bytes) == (1, "L4", 23034 * 2**20)


def test_a_driver_that_fails_is_no_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "echo Driver/library version mismatch; exit 18", monkeypatch)
    driver = tmp_path / "version"
    monkeypatch.setattr("rayapp.cluster.machine.NVIDIA_DRIVER", driver)
    assert detect_gpus() == []
    driver.touch()
    with pytest.raises(PlacementError, match="Driver/library version mismatch"):
        detect_gpus()


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("rayapp.cluster.machine.NVIDIA_DRIVER", tmp_path / "version")
    assert detect_gpus() == []
    (only,) = local_inventory().nodes
    assert (only.num_gpus, only.accelerator_type, only.device_memory_bytes) == (0, None, None)


def test_the_inventory_needs_neither_ray_nor_torch() -> None:
    import subprocess

    check = "import sys, rayapp.cluster.inventory as i; i.local_inventory(); assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
