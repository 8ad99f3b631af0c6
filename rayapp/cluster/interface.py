"""Keeps collectives on the network that the cluster runs on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import psutil
import ray
from ray.train.torch.config import TorchConfig, _TorchBackend
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"

logger = logging.getLogger(__name__)


class InterfaceAddress(Protocol):
    """An address of a network interface, as psutil lists them."""

    @property
    def address(self) -> str: ...


class _NodeInterfaceBackend(_TorchBackend):  # type: ignore[misc]
    """Ray's torch backend, with each worker's interface named before its process group starts."""

    def on_start(self, worker_group, backend_config) -> None:  # type: ignore[no-untyped-def]
        try:
            worker_group.execute(name_interface)
            super().on_start(worker_group, backend_config)
        except ray.exceptions.RayTaskError as error:  # a rank whose peer died on the way; Ray Train tries this error again
            raise WorkerGroupStartupFailedError(f"the process group could not be set up: {error}") from error


@dataclass
class NodeInterfaceTorchConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's torch setup over the interface that carries the node's Ray address.

    Gloo and NCCL guess an interface otherwise, which is wrong on nodes with several. The train function would be too late
    to name it, for the group is up by then. NCCL is used where workers have GPUs, gloo on CPUs; ``timeout_s`` bounds each
    collective.
    """

    @property
    def backend_cls(self) -> type[_NodeInterfaceBackend]:
        return _NodeInterfaceBackend


def name_interface() -> None:
    """Set the variables of gloo and NCCL for this process, where the user did not."""
    address = ray.util.get_node_ip_address()
    name = interface_of(address, psutil.net_if_addrs())
    if name is None:
        logger.warning("No interface of this node carries its Ray address %s; gloo and NCCL choose one themselves", address)
        return
    os.environ.setdefault(GLOO_VARIABLE, name)
    os.environ.setdefault(NCCL_VARIABLE, f"={name}")  # a bare name is a prefix to NCCL: eth1 would also take eth10


def interface_of(address: str, interfaces: Mapping[str, Iterable[InterfaceAddress]]) -> str | None:
    """The interface that carries an IP address; None where no interface does."""
    for name, addresses in interfaces.items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):  # fe80::1%eth0
            return name
    return None
