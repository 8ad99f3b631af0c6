"""How many workers a cluster takes, on what, and with how much memory each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.clusters import GIGABYTE, cluster, node

from rayapp.cluster.inventory import ClusterInventory
from rayapp.config.load import LoadedRunFile
from rayapp.errors import PlacementError
from rayapp.hardware import find_accelerator
from rayapp.preflight.placement import place

Load = Callable[..., LoadedRunFile]

GPU_NODES = cluster(node(16, 8, "H100"), node(16, 4, "A100"), node(64))
LABELLED = cluster(node(8, zone="a"), node(8, zone="b", disk="nvme"))


@pytest.mark.parametrize(
    ("overrides", "inventory", "expected"),
    [
        ([], cluster(node(16)), (2, "cpu", "cpu")),
        ([], cluster(node(1)), (1, "cpu", "cpu")),
        ([], cluster(node(1), node(1), node(1)), (2, "cpu", "cpu")),
        (["train.num_workers=16"], cluster(node(8), node(8)), (16, "cpu", "cpu")),
        (["train.num_workers=4", "resources.cpus_per_worker=0.5"], cluster(node(2)), (4, "cpu", "cpu")),
        ([], GPU_NODES, (12, "cuda", "H100")),
        (["resources.gpu_type=A100"], GPU_NODES, (4, "cuda", "A100")),
        (["resources.cpus_per_worker=4"], GPU_NODES, (8, "cuda", "H100")),  # 16 CPUs carry 4 workers on each of the two
        (["train.device=cpu"], GPU_NODES, (2, "cpu", "cpu")),
        (["train.num_workers=8", "resources.labels={zone: b}"], LABELLED, (8, "cpu", "cpu")),
    ],
)
def test_placed(load: Load, overrides: list[str], inventory: ClusterInventory, expected: tuple[int, str, str]) -> None:
    placement = place(load(*overrides).file, inventory)
    assert (placement.num_workers, placement.device, placement.device_name) == expected


@pytest.mark.parametrize(
    ("overrides", "inventory", "sentence"),
    [
        (
            ["train.num_workers=5"],
            cluster(node(2), node(2)),
            "train.num_workers=5 is more than the 4 workers of 1 CPU each that the cluster can place: it has 2 node(s) with 4 CPUs and "
            "0 GPUs; use train.num_workers=4, or add nodes",
        ),
        (  # 6 CPUs, but no worker spreads over nodes
            ["train.num_workers=3", "resources.cpus_per_worker=2"],
            cluster(node(3), node(3)),
            "train.num_workers=3 is more than the 2 workers of 2 CPU each that the cluster can place: it has 2 node(s) with 6 CPUs and "
            "0 GPUs; use train.num_workers=2, or add nodes",
        ),
        (
            ["train.num_workers=9", "resources.gpu_type=H100"],
            GPU_NODES,
            "train.num_workers=9 is more than the 8 workers of 1 CPU and 1 H100 GPU each that the cluster can place: it has 3 node(s) "
            "with 96 CPUs and 12 GPUs (A100, H100); use train.num_workers=8, or add nodes",
        ),
        (
            ["resources.gpu_type=B200"],
            GPU_NODES,
            "train.device=cuda finds no node for a worker of 1 CPU and 1 B200 GPU: the cluster has 3 node(s) with 96 CPUs and 12 GPUs "
            "(A100, H100); change train.device or the keys under resources, or add nodes",
        ),
        (
            ["train.num_workers=2", "resources.labels={zone: a, disk: nvme}"],
            LABELLED,
            "train.num_workers=2 finds no node for a worker of 1 CPU on a node labelled zone=a, disk=nvme: the cluster has 2 node(s) with "
            "16 CPUs and 0 GPUs; change train.device or the keys under resources, or add nodes",
        ),
        (
            [],
            cluster(node(0)),
            "train.device=cpu finds no node for a worker of 1 CPU: the cluster has 1 node(s) with 0 CPUs and 0 GPUs; "
            "change train.device or the keys under resources, or add nodes",
        ),
    ],
)
def test_refused(load: Load, overrides: list[str], inventory: ClusterInventory, sentence: str) -> None:
    with pytest.raises(PlacementError) as error:
        place(load(*overrides).file, inventory)
    assert str(error.value) == sentence


A40 = find_accelerator("A40")


@pytest.mark.parametrize(
    ("overrides", "inventory", "memory_bytes"),
    [
        (["train.num_workers=2"], cluster(node(8)), 32 * GIGABYTE),
        (["train.num_workers=4"], cluster(node(2), node(2)), 32 * GIGABYTE),
        (["train.num_workers=2"], cluster(node(1, memory_bytes=64 * GIGABYTE), node(1, memory_bytes=16 * GIGABYTE)), 16 * GIGABYTE),
        (["train.num_workers=2"], cluster(node(8), node(0, memory_bytes=GIGABYTE)), 32 * GIGABYTE),  # a head that takes no worker
        ([], cluster(node(8, 2, "A40")), A40 and A40.memory_bytes),
        ([], cluster(node(8, 2, "H100", gpu_memory_bytes=80 * GIGABYTE)), 80 * GIGABYTE),
        ([], cluster(node(8, 2, "A40"), node(8, 2, "X1", gpu_memory_bytes=GIGABYTE)), GIGABYTE),
        ([], cluster(node(8, 2, "A40"), node(8, 2, "GPU-of-tomorrow")), None),
        (["resources.memory_bytes=1000"], cluster(node(8, 2, "GPU-of-tomorrow")), 1000),
    ],
)
def test_memory_of_a_worker_is_the_least_that_one_may_get(
    load: Load, overrides: list[str], inventory: ClusterInventory, memory_bytes: int | None
) -> None:
    assert place(load(*overrides).file, inventory).memory_bytes == memory_bytes
