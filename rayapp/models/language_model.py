"""A causal language model together with its loss: what every engine trains.

Shapes: B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayapp.models.loss import LossHead, logits_cross_entropy
from rayapp.models.transformer import SimpleTransformer

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
PROBE_RANGE = 100.0


class LanguageModel(nn.Module):
    """A network whose forward pass is the summed loss.

    Attributes:
        network: a transformers model whose output layer is a :class:`LossHead`, or a :class:`SimpleTransformer`.
        fused_loss: True while logits are never held whole. Set by :meth:`choose_loss`.
    """

    def __init__(self, network: nn.Module, *, chunk_tokens: int) -> None:
        super().__init__()
        self.network = network
        self.chunk_tokens = chunk_tokens
        self.fused_loss = True
        self._probing = False

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The sum of the cross-entropy over the valid labels, in nats.

        Args:
            input_ids: [B, S] int64.
            labels: [B, S] int64, shifted already.
            position_ids: [B, S] int64, starting anew at each document, or None.

        Returns:
            An fp32 scalar. A mixture of experts whose configuration asks for ``output_router_logits`` adds its balancing
            loss, times the number of valid labels.
        """
        if self._probing:
            return self._head_is_plain(input_ids)
        if isinstance(self.network, SimpleTransformer):
            return self._head_loss(self.network.lm_head, self.network.model(input_ids, position_ids), labels)
        if not self.fused_loss:
            output = cast("Any", self.network)(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            return self._with_balancing_loss(
                logits_cross_entropy(output.logits.flatten(0, 1), labels.flatten(), self.chunk_tokens), output, labels
            )
        wants_routers = {"output_router_logits": True} if self._balances_experts else {}
        output = cast("Any", self.network).base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **wants_routers)
        loss = self._head_loss(output_layer(self.network), output.last_hidden_state, labels)
        return self._with_balancing_loss(loss, output, labels)

    def _head_loss(self, head: LossHead, hidden: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = head(hidden, labels, self.chunk_tokens)
        return loss

    @property
    def _balances_experts(self) -> bool:
        return bool(getattr(self.network.config, "output_router_logits", False))

    def _with_balancing_loss(self, loss: Tensor, output: Any, labels: Tensor) -> Tensor:
        if not self._balances_experts or not self.training:
            return loss
        balancing = sys.modules[type(self.network).__module__].load_balancing_loss_func
        config: Any = self.network.config
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        auxiliary: Tensor = balancing(output.router_logits, experts, config.num_experts_per_tok, None)
        coefficient: float = config.router_aux_loss_coef
        return loss + coefficient * auxiliary.to(loss.device) * (labels >= 0).sum()

    @torch.no_grad()
    def choose_loss(self, forward: Callable[..., Tensor], device: torch.device | str) -> None:
        """Keep the fused loss only where the model's logits are its output layer's, unchanged.

        Some models scale or cap their logits after the output layer, or the hidden states before it; for those the
        model's own logits are used.

        Args:
            forward: this module's call, as the engine wraps it (it may gather weights); every rank calls it.
            device: where the probe runs.
        """
        if isinstance(self.network, SimpleTransformer):
            return
        tokens = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0) % output_layer(self.network).out_features
        was_training = self.training
        self.eval()
        self._probing = True
        try:
            self.fused_loss = bool(forward(tokens, tokens))
        finally:
            self._probing = False
            self.train(was_training)
        if not self.fused_loss:
            logger.info("the model changes its logits around the output layer: the loss holds the logits of a micro-batch")

    def _head_is_plain(self, input_ids: Tensor) -> Tensor:
        """1 if the output layer reads the body's last hidden state and its output is the model's logits; else 0."""
        seen: list[Tensor] = []

        def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            spread = torch.linspace(-PROBE_RANGE, PROBE_RANGE, output.numel(), device=output.device).view_as(output).to(output.dtype)
            seen.extend((inputs[0], spread))
            return spread

        handle = output_layer(self.network).register_forward_hook(replace)
        try:
            logits = self.network(input_ids=input_ids, use_cache=False).logits
        finally:
            handle.remove()
        hidden = cast("Any", self.network).base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        plain = torch.equal(logits, seen[1]) and torch.allclose(hidden, seen[0])
        return torch.tensor(float(plain), device=input_ids.device)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under its Hugging Face name."""
        yield from self.network.named_parameters()

    def named_kept_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that belong to the model's weights on disk."""
        kept = self.network.state_dict(keep_vars=True)
        for name, buffer in self.network.named_buffers():
            if name in kept:
                yield name, buffer


def output_layer(network: nn.Module) -> LossHead:
    """The network's output layer."""
    head = network.lm_head if isinstance(network, SimpleTransformer) else network.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, LossHead), "the output layer was not replaced"
    return head
