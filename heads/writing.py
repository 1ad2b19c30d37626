"""A drafter that is a language model of its own, as the generator of responses drives one.

Shapes: B rows, N new positions, L cached and new positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.cache import TreeCache
from heads.decoder import BatchPlan, Plan


class Written(NamedTuple):
    """One forward's result: `hidden_BND` after the final norm."""

    hidden_BND: Tensor


class Decoder(Protocol):
    """What writes: layers with planned attention, and an output matrix."""

    num_layers: int
    max_positions: int

    def states(self, tokens_BT: Tensor, positions_BT: Tensor, plans: Sequence[Plan]) -> Tensor:
        """States [B, T, D] after the final norm."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """Logits [..., V]."""
        ...


@dataclass
class Writer:
    """Writes with a drafter on `device`, up to one of `end_tokens`."""

    drafter: Decoder
    end_tokens: frozenset[int]
    device: torch.device

    @property
    def max_positions(self) -> int:
        """The context length."""
        return self.drafter.max_positions

    def new_cache(self, capacity: int = 512) -> TreeCache:
        """An empty cache with room for `capacity` positions before it has to grow."""
        return TreeCache(self.drafter.num_layers, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens_BN: Tensor,
        cache: TreeCache,
        *,
        positions_BN: Tensor | None = None,
        visible_BNL: Tensor | None = None,
    ) -> Written:
        """Process new tokens behind the cache; the defaults are plainly causal."""
        base, (rows, count) = cache.length, tokens_BN.shape
        if positions_BN is None:
            positions_BN = torch.arange(base, base + count, device=tokens_BN.device)[None]
        if visible_BNL is None:
            ones = torch.ones(1, count, base + count, dtype=torch.bool, device=tokens_BN.device)
            visible_BNL = ones.tril(base)
        plans = [BatchPlan(layer, visible_BNL) for layer in cache.tree_layers]
        return Written(self.drafter.states(tokens_BN, positions_BN.expand(rows, -1), plans))

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of states [..., D]."""
        return self.drafter.logits(hidden)
