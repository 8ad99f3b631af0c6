"""bf16 products through fp32 against products in fp64. In processes of their own, because torch's kernels are replaced."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch

HAS_INSTRUCTIONS = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

SCRIPT = """
import json
import torch
from torch.nn import functional as F
from rayapp.models.cpu_products import speed_up_bf16_products

torch.manual_seed(0)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shapes():
    return {
        "mm": (lambda a, b: a @ b, [(33, 70), (70, 19)]),
        "linear": (F.linear, [(2, 17, 70), (19, 70), (19,)]),
        "addmm": (torch.addmm, [(19,), (33, 70), (70, 19)]),
        "addmm with factors": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(33, 19), (33, 70), (70, 19)]),
        "bmm": (torch.bmm, [(3, 33, 70), (3, 70, 19)]),
        "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 3, 24, 16)] * 3),
    }


def run(function, arguments):
    arguments = [argument.detach().clone().requires_grad_() for argument in arguments]
    output = function(*arguments)
    weights = torch.linspace(-1, 1, output.numel()).bfloat16().view_as(output)  # exact in every type
    output.backward(weights.to(output.dtype))
    return [output.detach(), *(argument.grad for argument in arguments)]


def error(found, exact):
    return float((found.double() - exact).abs().max() / exact.abs().max())


inputs = {name: [torch.randn(size) for size in sizes] for name, (_, sizes) in shapes().items()}
plain = {name: run(f, inputs[name]) for name, (f, _) in shapes().items()}
speeds_up = [speed_up_bf16_products(), speed_up_bf16_products()]
errors, types, same = {}, {}, {}
for name, (function, _) in shapes().items():
    low = [tensor.bfloat16() for tensor in inputs[name]]
    exact = run(function, [tensor.double() for tensor in low])
    found = run(function, low)
    errors[name] = [error(*pair) for pair in zip(found, exact)]
    types[name] = sorted({str(tensor.dtype) for tensor in found})
    same[name] = all(torch.equal(a, b) for a, b in zip(run(function, inputs[name]), plain[name]))
print(json.dumps({"speeds_up": speeds_up, "errors": errors, "types": types, "same": same}))
"""


@cache
def found() -> dict[str, dict[str, list[float]]]:
    import json

    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert "warn" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


NAMES = ["mm", "linear", "addmm", "addmm with factors", "bmm", "attention"]


def test_it_says_whether_it_helps_and_may_be_called_again() -> None:
    assert found()["speeds_up"] == [not HAS_INSTRUCTIONS] * 2


@pytest.mark.parametrize("name", NAMES)
def test_products_and_gradients_are_those_of_fp64_rounded_once(name: str) -> None:
    """bf16 has 8 bits: rounding once is off by 2^-8 of the element at most, so of the largest one too."""
    errors = found()["errors"][name]
    allowed = 2**-7 if name == "attention" else 2**-8 + 1e-5  # attention rounds its output before the gradient uses it
    assert max(errors) <= allowed
    assert max(errors) > 1e-4, "bf16 inputs and outputs cannot be this exact"
    assert found()["types"][name] == ["torch.bfloat16"]


@pytest.mark.parametrize("name", NAMES)
def test_fp32_products_stay_as_they_are(name: str) -> None:
    assert found()["same"][name]
