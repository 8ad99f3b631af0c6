"""A catalogue of accelerators: memory, FLOP/s, bytes/s, each with its source. What is not known is None, never a guess.

FLOP/s are dense: NVIDIA's data sheets print figures with 2:4 sparsity, which are twice as high. Memory is what the
driver leaves to programs, as ``torch.cuda.get_device_properties`` reports it with ECC on; it differs by some tens of MB
between drivers, so ask the device where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

MatrixPrecision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

GIB = 2**30
TORCH_REPORTED = "the capacity in torch's out-of-memory messages, the smallest that is common"


@dataclass(frozen=True)
class Accelerator:
    """One model of an accelerator, or a family whose members share a name.

    Attributes:
        name: the catalogue's name.
        aliases: what ``torch.cuda.get_device_name()`` and Ray's ``accelerator_type`` call it.
        memory_bytes: what the driver leaves to programs.
        fp32_flops: FLOP/s of fp32 outside the tensor cores, which is what torch uses unless TF32 is allowed.
        tf32_flops: dense FLOP/s in TF32.
        bf16_flops: dense FLOP/s in bf16 with fp32 accumulation.
        fp16_flops: dense FLOP/s in fp16.
        fp8_flops: dense FLOP/s in fp8.
        memory_bytes_per_s: bandwidth of its memory.
        link_bytes_per_s: NVLink to all other accelerators of the node, both directions together. None without NVLink,
            and where it is an optional bridge between two cards.
        source: the document of the figures above.
        memory_source: where ``memory_bytes`` comes from.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int | None
    fp32_flops: float | None
    tf32_flops: float | None
    bf16_flops: float | None
    fp16_flops: float | None
    fp8_flops: float | None
    memory_bytes_per_s: float | None
    link_bytes_per_s: float | None
    source: str
    memory_source: str

    def peak_flops(self, precision: MatrixPrecision) -> float | None:
        """Dense FLOP/s of matrix products at a precision; None where the hardware lacks it or it is not known."""
        peaks: dict[MatrixPrecision, float | None] = {
            "fp32": self.fp32_flops,
            "tf32": self.tf32_flops,
            "bf16": self.bf16_flops,
            "fp16": self.fp16_flops,
            "fp8": self.fp8_flops,
        }
        return peaks[precision]


def find_accelerator(name: str) -> Accelerator | None:
    """The catalogue's entry for a device name of torch, an accelerator type of Ray, or a catalogue name.

    Names are compared whole, so that a MIG slice or an unlisted variant is not taken for its bigger sibling. A name that
    several models share, such as Ray's ``H100``, gives an entry with the figures that all of them have in common.
    """
    return _by_name().get(name.strip().casefold())


@cache
def _by_name() -> dict[str, Accelerator]:
    entries = (*ACCELERATORS, *(_family(name) for name in FAMILIES))
    return {alias.casefold(): entry for entry in entries for alias in (entry.name, *entry.aliases)}


def _family(name: str) -> Accelerator:
    """What the members of a family have in common; None where they differ."""
    members = [accelerator for accelerator in ACCELERATORS if accelerator.name in FAMILIES[name]]
    figures = [field.name for field in fields(Accelerator) if field.name not in {"name", "aliases", "source", "memory_source"}]
    differing: dict[str, Any] = {figure: None for figure in figures if len({getattr(member, figure) for member in members}) > 1}
    sources = "; ".join(dict.fromkeys(member.source for member in members))
    family: Accelerator = replace(members[0], name=name, aliases=(), source=sources)
    return replace(family, **differing)


_A100_SHEET = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_A100_40_SHEET = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, table 2 (https://resources.nvidia.com/en-us-tensor-core)"
_V100_SHEET = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"


def _a100(name: str, aliases: tuple[str, ...], gib: float, memory_bytes_per_s: float, link_bytes_per_s: float | None) -> Accelerator:
    return Accelerator(
        name=name,
        aliases=aliases,
        memory_bytes=int(gib * GIB),
        fp32_flops=19.5e12,
        tf32_flops=156e12,
        bf16_flops=312e12,
        fp16_flops=312e12,
        fp8_flops=None,
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        source=_A100_SHEET if gib > 40 else _A100_40_SHEET,
        memory_source=TORCH_REPORTED,
    )


def _v100(name: str, aliases: tuple[str, ...], gib: float, sxm: bool) -> Accelerator:
    return Accelerator(
        name=name,
        aliases=aliases,
        memory_bytes=int(gib * GIB),
        fp32_flops=15.7e12 if sxm else 14e12,
        tf32_flops=None,
        bf16_flops=None,
        fp16_flops=125e12 if sxm else 112e12,
        fp8_flops=None,
        memory_bytes_per_s=900e9,
        link_bytes_per_s=300e9 if sxm else None,
        source=_V100_SHEET,
        memory_source=TORCH_REPORTED,
    )


ACCELERATORS: tuple[Accelerator, ...] = (
    _a100("A100-SXM-40GB", ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), 39.38, 1555e9, 600e9),
    _a100("A100-SXM-80GB", ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), 79.14, 2039e9, 600e9),
    _a100("A100-PCIe-40GB", ("NVIDIA A100-PCIE-40GB",), 39.38, 1555e9, None),
    _a100("A100-PCIe-80GB", ("NVIDIA A100 80GB PCIe",), 79.14, 1935e9, None),
    Accelerator(
        name="H100-SXM",
        aliases=("NVIDIA H100 80GB HBM3",),
        memory_bytes=int(79.10 * GIB),
        fp32_flops=66.9e12,
        tf32_flops=494.7e12,
        bf16_flops=989.4e12,
        fp16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bytes_per_s=3350e9,
        link_bytes_per_s=900e9,
        source=_HOPPER_PAPER,
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="H100-PCIe",
        aliases=("NVIDIA H100 PCIe",),
        memory_bytes=int(79.10 * GIB),
        fp32_flops=51.2e12,
        tf32_flops=378e12,
        bf16_flops=756e12,
        fp16_flops=756e12,
        fp8_flops=1513e12,
        memory_bytes_per_s=2000e9,
        link_bytes_per_s=None,
        source=_HOPPER_PAPER,
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="H100-NVL",
        aliases=("NVIDIA H100 NVL",),
        memory_bytes=int(93.00 * GIB),
        fp32_flops=60e12,
        tf32_flops=417.5e12,
        bf16_flops=835.5e12,
        fp16_flops=835.5e12,
        fp8_flops=1670.5e12,
        memory_bytes_per_s=3900e9,
        link_bytes_per_s=None,
        source="NVIDIA H100 data sheet, halved for density (https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306)",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="H200-SXM",
        aliases=("NVIDIA H200", "H200"),  # Ray says H200 for the rarer H200 NVL too; torch tells them apart
        memory_bytes=150_109_880_320,
        fp32_flops=66.9e12,
        tf32_flops=494.7e12,
        bf16_flops=989.4e12,
        fp16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bytes_per_s=4800e9,
        link_bytes_per_s=900e9,
        source=f"{_HOPPER_PAPER} for FLOP/s, which the H200 shares; https://www.nvidia.com/en-us/data-center/h200/",
        memory_source="torch.cuda.get_device_properties, torch 2.11, driver 580.159",
    ),
    Accelerator(
        name="B200-SXM",
        aliases=("NVIDIA B200", "B200"),
        memory_bytes=int(178.35 * GIB),
        fp32_flops=80e12,
        tf32_flops=1100e12,
        bf16_flops=2250e12,
        fp16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes_per_s=8000e9,
        link_bytes_per_s=1800e9,
        source="NVIDIA Blackwell Architecture Technical Brief, HGX B200 (https://resources.nvidia.com/en-us-blackwell-architecture)",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="A40",
        aliases=("NVIDIA A40",),
        memory_bytes=int(44.34 * GIB),
        fp32_flops=37.4e12,
        tf32_flops=74.8e12,
        bf16_flops=149.7e12,
        fp16_flops=149.7e12,
        fp8_flops=None,
        memory_bytes_per_s=696e9,
        link_bytes_per_s=None,
        source="https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="A10",
        aliases=("NVIDIA A10",),
        memory_bytes=int(22.03 * GIB),
        fp32_flops=31.2e12,
        tf32_flops=62.5e12,
        bf16_flops=125e12,
        fp16_flops=125e12,
        fp8_flops=None,
        memory_bytes_per_s=600e9,
        link_bytes_per_s=None,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="A10G",
        aliases=("NVIDIA A10G",),
        memory_bytes=int(22.03 * GIB),
        fp32_flops=35e12,
        tf32_flops=35e12,
        bf16_flops=70e12,
        fp16_flops=70e12,
        fp8_flops=None,
        memory_bytes_per_s=600e9,
        link_bytes_per_s=None,
        source="https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="L4",
        aliases=("NVIDIA L4",),
        memory_bytes=int(22.03 * GIB),
        fp32_flops=30.3e12,
        tf32_flops=60e12,
        bf16_flops=121e12,
        fp16_flops=121e12,
        fp8_flops=242.5e12,
        memory_bytes_per_s=300e9,
        link_bytes_per_s=None,
        source="https://www.nvidia.com/en-us/data-center/l4/, halved for density",
        memory_source=TORCH_REPORTED,
    ),
    Accelerator(
        name="L40S",
        aliases=("NVIDIA L40S",),
        memory_bytes=int(44.39 * GIB),
        fp32_flops=91.6e12,
        tf32_flops=183e12,
        bf16_flops=362.05e12,
        fp16_flops=362.05e12,
        fp8_flops=733e12,
        memory_bytes_per_s=864e9,
        link_bytes_per_s=None,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
        memory_source=TORCH_REPORTED,
    ),
    _v100("V100-SXM-16GB", ("Tesla V100-SXM2-16GB",), 15.77, sxm=True),
    _v100("V100-SXM-32GB", ("Tesla V100-SXM2-32GB",), 31.73, sxm=True),
    _v100("V100-PCIe-16GB", ("Tesla V100-PCIE-16GB",), 15.77, sxm=False),
    _v100("V100-PCIe-32GB", ("Tesla V100-PCIE-32GB",), 31.73, sxm=False),
    Accelerator(
        name="T4",
        aliases=("Tesla T4", "NVIDIA T4"),
        memory_bytes=int(14.56 * GIB),
        fp32_flops=8.1e12,
        tf32_flops=None,
        bf16_flops=None,
        fp16_flops=65e12,
        fp8_flops=None,
        memory_bytes_per_s=300e9,
        link_bytes_per_s=None,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        memory_source=TORCH_REPORTED,
    ),
)

FAMILIES: dict[str, tuple[str, ...]] = {
    "A100": ("A100-SXM-40GB", "A100-SXM-80GB", "A100-PCIe-40GB", "A100-PCIe-80GB"),
    "A100-40G": ("A100-SXM-40GB", "A100-PCIe-40GB"),
    "A100-80G": ("A100-SXM-80GB", "A100-PCIe-80GB"),
    "H100": ("H100-SXM", "H100-PCIe", "H100-NVL"),
    "V100": ("V100-SXM-16GB", "V100-SXM-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB"),
}
"""Names of Ray that cover several models."""
