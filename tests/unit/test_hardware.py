from __future__ import annotations

import pytest

from rayapp.hardware import ACCELERATORS, FAMILIES, find_accelerator


@pytest.mark.parametrize(
    ("device_name", "bf16_flops", "gigabytes_on_the_box"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 40),
        ("NVIDIA A100 80GB PCIe", 312e12, 80),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 80),
        ("NVIDIA H100 PCIe", 756e12, 80),
        ("NVIDIA H100 NVL", 835.5e12, 94),
        ("NVIDIA H200", 989.4e12, 141),
        ("NVIDIA B200", 2250e12, 192),
        ("NVIDIA A10G", 70e12, 24),
        ("NVIDIA L40S", 362.05e12, 48),
        ("Tesla V100-SXM2-16GB", None, 16),
        ("Tesla T4", None, 16),
    ],
)
def test_names_that_torch_reports(device_name: str, bf16_flops: float | None, gigabytes_on_the_box: int) -> None:
    accelerator = find_accelerator(device_name)
    assert accelerator is not None
    assert accelerator.peak_flops("bf16") == bf16_flops
    assert accelerator.memory_bytes is not None
    assert 0.85 * 2**30 < accelerator.memory_bytes / gigabytes_on_the_box < 1.07 * 2**30


@pytest.mark.parametrize("ray_name", ["V100", "T4", "A10G", "L4", "L40S", "A100", "A100-40G", "A100-80G", "H100", "H200", "B200"])
def test_names_that_ray_uses(ray_name: str) -> None:
    accelerators = pytest.importorskip("ray.util.accelerators.accelerators")
    assert ray_name in {value for key, value in vars(accelerators).items() if key.isupper()}
    assert find_accelerator(ray_name) is not None


def test_a_slice_or_an_unlisted_variant_is_not_taken_for_its_sibling() -> None:
    assert find_accelerator("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is None
    assert find_accelerator("NVIDIA H200 NVL") is None
    assert find_accelerator("NVIDIA L40") is None
    assert find_accelerator("cpu") is None


def test_names_are_compared_without_case_and_blanks() -> None:
    assert find_accelerator(" nvidia h200 ") is find_accelerator("H200-SXM")


def test_a_family_has_only_what_its_members_share() -> None:
    a100, h100 = find_accelerator("A100"), find_accelerator("H100")
    assert a100 is not None
    assert h100 is not None
    assert a100.peak_flops("bf16") == 312e12
    assert a100.memory_bytes is None
    assert h100.peak_flops("bf16") is None
    a100_80 = find_accelerator("A100-80G")
    assert a100_80 is not None
    assert a100_80.memory_bytes == find_accelerator("NVIDIA A100-SXM4-80GB").memory_bytes  # type: ignore[union-attr]
    assert a100_80.link_bytes_per_s is None


def test_names_are_unique_and_families_exist() -> None:
    names = [alias.casefold() for accelerator in ACCELERATORS for alias in (accelerator.name, *accelerator.aliases)]
    assert len(names) == len(set(names))
    members = {name for family in FAMILIES.values() for name in family}
    assert members <= {accelerator.name for accelerator in ACCELERATORS}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_figures_are_dense_and_sourced(accelerator: object) -> None:
    """Halving the width of a number at least doubles the rate; a figure with sparsity in between would break this."""
    known = [peak for precision in ("fp32", "tf32", "bf16", "fp8") if (peak := accelerator.peak_flops(precision))]  # type: ignore[attr-defined]
    assert known == sorted(known)
    bf16, tf32, fp8 = (accelerator.peak_flops(precision) for precision in ("bf16", "tf32", "fp8"))  # type: ignore[attr-defined]
    if tf32:
        assert bf16 == pytest.approx(2 * tf32, rel=0.03)
    if fp8:
        assert fp8 == pytest.approx(2 * bf16, rel=0.02)
    assert accelerator.source  # type: ignore[attr-defined]
    assert accelerator.memory_source  # type: ignore[attr-defined]
