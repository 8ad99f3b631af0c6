"""Whether the cluster can take the workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayapp.cluster.inventory import ClusterInventory, NodeInventory, WorkerResources
from rayapp.config.schema import RunFile
from rayapp.errors import PlacementError, Problem
from rayapp.hardware import find_accelerator

DEFAULT_CPU_WORKERS = 2


@dataclass(frozen=True)
class Placement:
    """The workers of a run.

    Attributes:
        num_workers: how many.
        device: what each computes on.
        worker: what each asks of its node.
        device_name: Ray's name of the accelerator; `cpu` on CPUs.
        memory_bytes: of one worker's device; a share of the node's memory on CPUs; None where it is not known.
    """

    num_workers: int
    device: Literal["cuda", "cpu"]
    worker: WorkerResources
    device_name: str
    memory_bytes: int | None


def choose_device(file: RunFile, inventory: ClusterInventory) -> Literal["cuda", "cpu"]:
    """What the workers compute on: what the run file says, else GPUs where it names their type or the cluster has some."""
    wants_gpus = bool(inventory.num_gpus) or file.resources.gpu_type is not None
    return file.train.device or ("cuda" if wants_gpus else "cpu")


def place(file: RunFile, inventory: ClusterInventory) -> Placement:
    """Decide on workers and compare them with the nodes, one by one.

    Raises:
        PlacementError: with what was asked for and what the cluster has.
    """
    device = choose_device(file, inventory)
    worker = WorkerResources(
        num_cpus=file.resources.cpus_per_worker or 1,
        num_gpus=1 if device == "cuda" else 0,
        gpu_type=file.resources.gpu_type,
        labels=file.resources.labels,
    )
    most = inventory.max_workers(worker)
    wanted = file.train.num_workers or (most if device == "cuda" else min(most, DEFAULT_CPU_WORKERS))
    if wanted > most or wanted == 0:
        raise PlacementError(_too_many(file, inventory, worker, max(wanted, 1), most))
    nodes = [node for node in inventory.nodes if node.max_workers(worker)]
    name = next((node.accelerator_type for node in nodes if node.accelerator_type), "gpu") if device == "cuda" else "cpu"
    return Placement(wanted, device, worker, name, file.resources.memory_bytes or _memory(nodes, worker, wanted, device))


def _too_many(file: RunFile, inventory: ClusterInventory, worker: WorkerResources, wanted: int, most: int) -> Problem:
    if most == 0:
        subject = f"train.num_workers={wanted}" if file.train.num_workers else f"train.device={'cuda' if worker.num_gpus else 'cpu'}"
        remedy = "change train.device or the keys under resources, or add nodes"
        return Problem(subject, f"finds no node for a worker of {worker}: the cluster has {inventory}", remedy)
    rule = f"is more than the {most} workers of {worker} each that the cluster can place: it has {inventory}"
    return Problem(f"train.num_workers={wanted}", rule, f"use train.num_workers={most}, or add nodes")


def _memory(nodes: list[NodeInventory], worker: WorkerResources, wanted: int, device: str) -> int | None:
    """The least that one worker gets on any of the nodes."""
    if device == "cpu":
        return min(node.memory_bytes // min(node.max_workers(worker), wanted) for node in nodes)
    sizes = []
    for node in nodes:
        known = find_accelerator(node.accelerator_type) if node.accelerator_type else None
        sizes.append(node.device_memory_bytes or (known.memory_bytes if known else None))
    return None if None in sizes else min(size for size in sizes if size is not None)
