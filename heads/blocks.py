"""Layers that several drafters share.

Shapes: B rows, T positions, D hidden size, V (draft) vocabulary.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

R = TypeVar("R")


class OutputHead(nn.Linear):
    """An output matrix of its own, without bias.

    `apply_loss` runs a function of (hidden, weight) inside this module's forward: under ZeRO-3 the
    weight is whole only there.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(
        self, hidden: Tensor, apply_loss: Callable[[Tensor, Tensor], R] | None = None
    ) -> Tensor | R:
        """Logits, or what `apply_loss(hidden, weight)` gives."""
        if apply_loss is not None:
            return apply_loss(hidden, self.weight)
        return super().forward(hidden)


def narrowed(x: Tensor) -> Tensor:
    """x in autocast's dtype where it is on: cast once for all the products that read it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class ProductNorm(LlamaRMSNorm):
    """A norm whose values nothing but matrix products read."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The normed states [..., D], cast once."""
        return narrowed(super().forward(hidden_states))


class TiedEmbedding(nn.Embedding):
    """An embedding that is the output matrix too.

    `apply_loss` runs a function of (hidden, weight) inside this module's forward: under ZeRO-3 the
    weight is whole only there.
    """

    def forward(
        self, given: Tensor, apply_loss: Callable[[Tensor, Tensor], R] | None = None
    ) -> Tensor | R:
        """Embeddings of token ids, or what `apply_loss(hidden, weight)` gives of states."""
        if apply_loss is not None:
            return apply_loss(given, self.weight)
        return super().forward(given)


class ResidualStack(nn.Module):
    """`x <- x + SiLU(W x)` once a layer; W has no bias and starts at zero (2401.10774, 3.1)."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_layers)
        )
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """States [..., D] to states [..., D]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def fill_nan(module: nn.Module) -> None:
    """Overwrite every floating-point tensor with NaN, so that one that is never loaded shows."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
