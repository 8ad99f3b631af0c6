"""The nodes of a cluster, or of this machine, and how many workers they can take. Needs no Ray until it asks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayapp.cluster.machine import detect_gpus, detect_memory_bytes, detect_num_cpus

ACCELERATOR_PREFIX = "accelerator_type:"
RESOURCE_UNIT = 10_000
"""Ray counts resources in ten-thousandths. Source: src/ray/common/scheduling/fixed_point.h"""


@dataclass(frozen=True)
class NodeInventory:
    """One node.

    Attributes:
        node_id: Ray's id of the node; ``local`` where Ray was not asked.
        address: its IP address.
        num_cpus: CPUs that Ray schedules there, in use or not.
        num_gpus: GPUs that Ray schedules there, in use or not.
        accelerator_type: Ray's name of them, such as ``H100``; None without GPUs.
        memory_bytes: host memory that Ray schedules there; all of the machine's where Ray was not asked.
        labels: the node's labels.
        device_memory_bytes: memory of one of its GPUs; None without GPUs, and where Ray was asked, which does not know.
    """

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float
    accelerator_type: str | None
    memory_bytes: int
    labels: Mapping[str, str] = field(default_factory=dict)
    device_memory_bytes: int | None = None

    def max_workers(self, worker: WorkerResources) -> int:
        """How many such workers the node takes while nothing else runs on it."""
        if worker.gpu_type is not None and worker.gpu_type != self.accelerator_type:
            return 0
        if any(self.labels.get(key) != value for key, value in worker.labels.items()):
            return 0
        asked = ((self.num_cpus, worker.num_cpus), (self.num_gpus, worker.num_gpus))
        return min(_units(has) // _units(needs) for has, needs in asked if needs > 0)


@dataclass(frozen=True)
class WorkerResources:
    """What one worker asks of its node.

    Attributes:
        num_cpus: CPUs, above zero where no GPU is asked for.
        num_gpus: GPUs.
        gpu_type: Ray's name of an accelerator type; None takes any.
        labels: labels that the node must carry.
    """

    num_cpus: float
    num_gpus: float = 0
    gpu_type: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.num_cpus > 0 or self.num_gpus > 0, "a worker needs CPUs or GPUs"

    def __str__(self) -> str:
        gpu = f" and 1 {f'{self.gpu_type} ' if self.gpu_type else ''}GPU" if self.num_gpus else ""
        labels = f" on a node labelled {', '.join(f'{key}={value}' for key, value in self.labels.items())}" if self.labels else ""
        return f"{self.num_cpus:g} CPU{gpu}{labels}"


@dataclass(frozen=True)
class ClusterInventory:
    """All nodes that are alive."""

    nodes: tuple[NodeInventory, ...]

    @property
    def num_cpus(self) -> float:
        return sum(node.num_cpus for node in self.nodes)

    @property
    def num_gpus(self) -> float:
        return sum(node.num_gpus for node in self.nodes)

    @property
    def accelerator_types(self) -> tuple[str, ...]:
        """The types of GPU, sorted."""
        return tuple(sorted({node.accelerator_type for node in self.nodes if node.accelerator_type is not None}))

    def __str__(self) -> str:
        types = f" ({', '.join(self.accelerator_types)})" if self.accelerator_types else ""
        return f"{len(self.nodes)} node(s) with {self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs{types}"

    def max_workers(self, worker: WorkerResources) -> int:
        """How many such workers can be placed at once. A worker does not spread over nodes, so each node is asked on its own."""
        return sum(node.max_workers(worker) for node in self.nodes)


def read_inventory() -> ClusterInventory:
    """The nodes of the Ray cluster that this process is connected to. Dead nodes are left out."""
    import ray

    return inventory_of(ray.nodes())


def inventory_of(nodes: list[dict[str, Any]]) -> ClusterInventory:
    """What ``ray.nodes()`` returns, as an inventory."""
    return ClusterInventory(tuple(_node(node) for node in nodes if node["Alive"]))


def local_inventory() -> ClusterInventory:
    """What a Ray started on this machine would offer. Starts nothing."""
    gpus = detect_gpus()
    return ClusterInventory(
        (
            NodeInventory(
                node_id="local",
                address="127.0.0.1",
                num_cpus=detect_num_cpus(),
                num_gpus=len(gpus),
                accelerator_type=gpus[0].accelerator_type if gpus else None,
                memory_bytes=detect_memory_bytes(),
                device_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=None),
            ),
        )
    )


def _node(node: Mapping[str, Any]) -> NodeInventory:
    resources: Mapping[str, float] = node["Resources"]
    types = [name.removeprefix(ACCELERATOR_PREFIX) for name in resources if name.startswith(ACCELERATOR_PREFIX)]
    return NodeInventory(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        accelerator_type=types[0] if types else None,
        memory_bytes=int(resources.get("memory", 0)),
        labels=dict(node["Labels"]),
    )


def _units(amount: float) -> int:
    return round(amount * RESOURCE_UNIT)
