"""Which interface carries an address."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rayapp.cluster.interface import NodeInterfaceTorchConfig, interface_of


@dataclass
class Address:
    address: str


INTERFACES = {
    "lo": [Address("127.0.0.1"), Address("::1"), Address("00:00:00:00:00:00")],
    "eth1": [Address("10.0.0.1"), Address("fe80::a%eth1")],
    "eth10": [Address("10.0.0.10")],
}


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("10.0.0.1", "eth1"), ("10.0.0.10", "eth10"), ("fe80::a", "eth1"), ("10.0.0.2", None), ("10.0.0", None)],
)
def test_the_interface_that_carries_an_address(address: str, name: str | None) -> None:
    assert interface_of(address, INTERFACES) == name


def test_the_timeout_reaches_ray() -> None:
    assert NodeInterfaceTorchConfig(timeout_s=7).to_dict()["timeout_s"] == 7
