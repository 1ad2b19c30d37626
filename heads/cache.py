"""Keys and values of a decoder over trees: written in place, and cut back to the accepted path.

Shapes: B rows, N new positions, L positions after a forward.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class TreeCacheLayer(DynamicLayer):
    """One layer's keys and values in a buffer that grows by doubling.

    New states are written in place behind the `length` that are kept; `keep` then compacts the
    accepted ones. Nothing is concatenated, so a step costs what it adds.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states [B, heads, N, head_dim]; the kept and new ones [B, heads, L, head_dim]."""
        end = self.length + key_states.shape[-2]
        if self.key_buffer is None or self.value_buffer is None or end > self.key_buffer.shape[-2]:
            size = max(self.capacity, 2 * end if self.length else end)
            self.key_buffer = self._grown(self.key_buffer, key_states, size)
            self.value_buffer = self._grown(self.value_buffer, value_states, size)
            self.is_initialized = True
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def _grown(self, buffer: Tensor | None, like: Tensor, size: int) -> Tensor:
        grown = like.new_empty(*like.shape[:2], size, like.shape[-1])
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def keep(self, base: int, offsets: Tensor | None, count: int) -> None:
        """Of the positions from `base` on, keep `count`: those at `offsets`, or the first ones."""
        if offsets is not None and self.key_buffer is not None and self.value_buffer is not None:
            for buffer in (self.key_buffer, self.value_buffer):
                kept = buffer[:, :, (base + offsets).to(buffer.device)]
                buffer[:, :, base : base + count] = kept
        self.length = base + count

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        if self.key_buffer is not None and self.value_buffer is not None:
            self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]


class TreeCache(Cache):
    """Keys and values of every layer; `length` positions are processed and kept."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.tree_layers = [TreeCacheLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))

    @property
    def length(self) -> int:
        """Positions held."""
        return self.tree_layers[0].length

    def commit(self, base: int, path: list[int]) -> None:
        """Keep exactly the nodes `path` (ascending) of the tree that was processed at `base`."""
        contiguous = path == list(range(len(path)))
        offsets = None if contiguous else torch.tensor(path)
        for layer in self.tree_layers:
            layer.keep(base, offsets, len(path))

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        for layer in self.tree_layers:
            layer.select_rows(rows)
