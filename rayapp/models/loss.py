"""Cross-entropy over a large vocabulary that never holds all logits.

Shapes: N positions, C positions of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayapp.engine import IGNORED_LABEL


class LossHead(nn.Module):
    """The output layer of a language model. It gives logits, or the loss without ever holding them all.

    It takes the place of the model's own output layer and keeps its parameters under the same names, so that the loss
    is computed inside the module that owns the weight: ZeRO-3 gathers a weight for its own module only.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, out_features: int | None = None) -> None:
        """Take over parameters; ``out_features`` is V, for a weight that is sharded already and has no rows."""
        super().__init__()
        self.bias: nn.Parameter | None
        self.out_features = out_features or int(weight.shape[0])
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor, labels: Tensor | None = None, chunk_tokens: int = 1024) -> Tensor:
        """Logits [..., V] of ``hidden`` [..., D]; with ``labels`` [...] the sum of the cross-entropy in nats, an fp32 scalar."""
        if labels is None:
            return nn.functional.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, self.bias, labels.flatten(), chunk_tokens)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Sum over the valid positions of -log softmax(hidden weight^T + bias)[label], in nats, as an fp32 scalar.

    Gradients are computed together with the loss, chunk by chunk, so that at most ``chunk_tokens`` x V logits exist at
    once. The gradient of the weight is summed in fp32.

    Args:
        hidden: [N, D].
        weight: [V, D].
        bias: [V] or None.
        labels: [N] int64; ``IGNORED_LABEL`` does not count.
        chunk_tokens: C.

    Source: with p = softmax(z), d loss / d z = p - onehot(label); the products with hidden and weight follow.
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, chunk_tokens
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk_tokens: int
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            piece = slice(start, start + chunk_tokens)
            logits = nn.functional.linear(hidden[piece], weight, bias).float()
            chunk_loss, grad_logits = _chunk_loss(logits, labels[piece], wants_hidden or wants_weight or wants_bias)
            loss += chunk_loss
            if grad_logits is None:
                continue
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[piece]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * scale).to(ctx.weight_dtype),
            None,
            None,
        )


def _chunk_loss(logits: Tensor, labels: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of [C, V] fp32 logits, and its gradient with respect to them (in place of the logits)."""
    valid = labels != IGNORED_LABEL
    targets = labels.clamp_min(0).unsqueeze(1)
    log_total = torch.logsumexp(logits, dim=1, keepdim=True)
    loss = ((log_total - logits.gather(1, targets)).squeeze(1) * valid).sum()
    if not wants_grad:
        return loss, None
    grad = logits.sub_(log_total).exp_()
    grad.scatter_add_(1, targets, -torch.ones_like(targets, dtype=grad.dtype))
    return loss, grad.mul_(valid.unsqueeze(1))


def logits_cross_entropy(logits: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """The same sum from logits [N, V] that a model insists on computing itself; the fp32 copy is made chunk by chunk."""
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for piece, target in zip(torch.split(logits, chunk_tokens), torch.split(labels, chunk_tokens), strict=True):
        total = total + nn.functional.cross_entropy(piece.float(), target, ignore_index=IGNORED_LABEL, reduction="sum")
    return total
