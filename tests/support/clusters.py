"""Clusters that nobody has."""

from __future__ import annotations

from rayapp.cluster.inventory import ClusterInventory, NodeInventory

GIGABYTE = 10**9


def node(
    cpus: float,
    gpus: float = 0,
    kind: str | None = None,
    *,
    memory_bytes: int = 64 * GIGABYTE,
    gpu_memory_bytes: int | None = None,
    **labels: str,
) -> NodeInventory:
    return NodeInventory("id", "10.0.0.1", cpus, gpus, kind, memory_bytes, labels, gpu_memory_bytes)


def cluster(*nodes: NodeInventory) -> ClusterInventory:
    return ClusterInventory(nodes)
