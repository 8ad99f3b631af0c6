"""CPU seconds of a bf16 product and its gradients, as torch does it and through fp32, in one process on one core."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rayapp.models.cpu_products import speed_up_bf16_products

REPEATS = 3


def main() -> None:
    torch.set_num_threads(1)
    inputs = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4096, 256, dtype=torch.bfloat16, requires_grad=True)

    def product() -> None:
        torch.autograd.grad(torch.nn.functional.linear(inputs, weight).float().square().sum(), (inputs, weight))

    before = cpu_seconds(product)
    if not speed_up_bf16_products():
        print("this CPU has bf16 instructions: torch's products are used as they are")
        return
    after = cpu_seconds(product)
    print(f"torch {before:.3f} s, through fp32 {after:.3f} s: {before / after:.1f} times faster")


def cpu_seconds(work: Callable[[], None]) -> float:
    work()
    start = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - start) / REPEATS


if __name__ == "__main__":
    main()
