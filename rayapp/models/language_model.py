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

from rayapp.errors import ModelError, Problem
from rayapp.models.loss import LossHead, logits_cross_entropy
from rayapp.models.transformer import SimpleTransformer, document_mask

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
PROBE_RANGE = 100.0
LARGEST_LEAK = 1e-3  # a mask that works leaks nothing at all


class LanguageModel(nn.Module):
    """A network whose forward pass is the summed loss.

    Attributes:
        network: a transformers model whose output layer is a :class:`LossHead`, or a :class:`SimpleTransformer`.
        fused_loss: True while logits are never held whole. Set by :meth:`choose_loss`.
        resets_attention: True where batches come with ``position_ids``, so that documents that share a row are kept apart.
        passes_mask: True where the network is given a mask that keeps documents apart. Set by :meth:`choose_mask`.
    """

    def __init__(self, network: nn.Module, *, chunk_tokens: int) -> None:
        super().__init__()
        self.network = network
        self.chunk_tokens = chunk_tokens
        self.fused_loss = True
        self.resets_attention = False
        self.passes_mask = False
        self._probe: Callable[[Tensor], Tensor] | None = None

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
        if self._probe is not None:
            return self._probe(input_ids)
        if isinstance(self.network, SimpleTransformer):
            return self._head_loss(self.network.lm_head, self.network.model(input_ids, position_ids), labels)
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if position_ids is not None and self.passes_mask:
            arguments["attention_mask"] = self._additive_mask(position_ids)
        if not self.fused_loss:
            output = cast("Any", self.network)(**arguments)
            return self._with_balancing_loss(
                logits_cross_entropy(output.logits.flatten(0, 1), labels.flatten(), self.chunk_tokens), output, labels
            )
        wants_routers = {"output_router_logits": True} if self._balances_experts else {}
        output = cast("Any", self.network).base_model(**arguments, **wants_routers)
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
        self.fused_loss = self._ask(forward, self._head_is_plain, device) > 0
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

    @torch.no_grad()
    def choose_mask(self, forward: Callable[..., Tensor], device: torch.device | str) -> None:
        """Where attention is reset, make sure that documents that share a row do not see each other.

        Most networks of transformers make their mask from the positions. To one that does not, the mask is passed.

        Args:
            forward: see :meth:`choose_loss`.
            device: where the probe runs.

        Raises:
            ModelError: the documents cannot be kept apart.
        """
        if not self.resets_attention or isinstance(self.network, SimpleTransformer):
            return
        config: Any = self.network.config
        takes_mask = config._attn_implementation in {"sdpa", "eager"} and not getattr(config, "sliding_window", None)
        for self.passes_mask in (False, True) if takes_mask else (False,):
            if self._ask(forward, self._leak, device) <= LARGEST_LEAK:
                return
        raise ModelError(
            Problem(
                "data.reset_attention=True",
                f"is not something that {config.model_type} can do: what a row's first document holds changes its second one",
                "set data.reset_attention=false, or take another model",
            )
        )

    def _leak(self, input_ids: Tensor) -> Tensor:
        """How much a document changes by the one before it in its row: as a share of what it changes by where it may see it."""
        half = input_ids.shape[1] // 2
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        other = input_ids[:, half:].repeat(1, 2)

        def change(position_ids: Tensor, mask: Tensor | None) -> Tensor:
            body = cast("Any", self.network).base_model
            hidden, changed = (
                body(input_ids=ids, position_ids=position_ids, attention_mask=mask, use_cache=False).last_hidden_state[:, half:].float()
                for ids in (input_ids, other)
            )
            return torch.dist(hidden, changed)

        apart = positions % half
        return change(apart, self._additive_mask(apart) if self.passes_mask else None) / change(positions, None)

    def _additive_mask(self, position_ids: Tensor) -> Tensor:
        """[B, 1, S, S]: 0 where a position may look, and the least number of the network's type elsewhere."""
        dtype = next(self.network.parameters()).dtype
        allowed = document_mask(position_ids)
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    def _ask(self, forward: Callable[..., Tensor], probe: Callable[[Tensor], Tensor], device: torch.device | str) -> float:
        """What a probe finds in evaluation mode on two short rows: some networks treat a single row differently."""
        tokens = torch.arange(2 * PROBE_TOKENS, device=device).view(2, -1) % output_layer(self.network).out_features
        was_training = self.training
        self.eval()
        self._probe = probe
        try:
            return float(forward(tokens, tokens))
        finally:
            self._probe = None
            self.train(was_training)

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
