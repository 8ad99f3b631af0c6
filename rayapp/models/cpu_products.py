"""bf16 matrix products on CPUs without bf16 instructions.

There torch multiplies bf16 matrices element by element, seven times slower than fp32 ones. The same product is had by widening
the operands to fp32, which is exact, multiplying, and rounding the result: what hardware with bf16 instructions does too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu_backward")

_kept: list[torch.library.Library] = []  # torch takes the kernels back when the library is collected


def speed_up_bf16_products() -> bool:
    """Make torch's bf16 products on this process's CPU go through fp32, where that helps.

    Returns:
        True if they do from now on; False if the CPU has bf16 instructions.
    """
    return False if torch.ops.mkldnn._is_mkldnn_bf16_supported() else _install()


@functools.cache
def _install() -> bool:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        for name in PRODUCTS:
            library.impl(name, _widened(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", allow_override=True, with_keyset=True)
    _kept.append(library)
    return True


def _widened(kernel: Any) -> Callable[..., Any]:
    """A kernel that hands bf16 tensors to torch's own one in fp32 and rounds what comes back."""

    def call(keys: Any, *arguments: Any, **named: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in arguments):
            return kernel.call_boxed(keys, *arguments, **named)
        wide = [_wide(value) for value in arguments]
        result = kernel.call_boxed(keys, *wide, **{name: _wide(value) for name, value in named.items()})
        return tuple(part.bfloat16() for part in result) if isinstance(result, tuple | list) else result.bfloat16()

    return call


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
