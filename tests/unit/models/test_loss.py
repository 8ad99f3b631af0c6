"""The chunked loss against torch's own cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayapp.models.loss import LossHead, linear_cross_entropy, logits_cross_entropy


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 6, generator=generator, dtype=dtype)
    weight = torch.randn(50, 6, generator=generator, dtype=dtype)
    bias = torch.randn(50, generator=generator, dtype=dtype)
    labels = torch.randint(0, 50, (37,), generator=generator)
    labels[::5] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_are_torchs(chunk_tokens: int, with_bias: bool) -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    theirs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    loss = linear_cross_entropy(ours[0], ours[1], ours[2] if with_bias else None, labels, chunk_tokens)
    logits = nn.functional.linear(theirs[0], theirs[1], theirs[2] if with_bias else None)
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, expected)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_all_labels_ignored_gives_zero() -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, None, torch.full_like(labels, -100), 8)
    loss.backward()
    assert loss.item() == 0
    assert torch.count_nonzero(hidden.grad) == 0


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, bias, labels, 8)
    assert not loss.requires_grad


def test_no_more_than_a_chunk_of_logits_is_held() -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == 50:
                    largest = max(largest, tensor.shape[0])
            return result

    with Watch():
        linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), None, labels, 8).backward()
    assert largest == 8


def test_bf16_gradient_of_the_weight_is_summed_in_fp32() -> None:
    hidden = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, None, labels, 1).backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == -2048  # bf16 would stop growing at 128


def test_logits_path_equals_torch() -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    logits = hidden @ weight.T
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(logits_cross_entropy(logits, labels, 8), expected)


def test_head_gives_logits_without_labels() -> None:
    hidden, weight, bias, _ = inputs(torch.float32)
    head = LossHead(nn.Parameter(weight), nn.Parameter(bias))
    torch.testing.assert_close(head(hidden), nn.functional.linear(hidden, weight, bias))
    assert head.out_features == 50
