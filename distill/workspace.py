"""Memory that losses keep from batch to batch.

Shapes: S positions of a block, D hidden, V (draft) vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill.losses import LossSettings
from heads.vocab import VocabMap

BLOCK_NUMBERS = 2**19
"""How many logits a block has on a processor: some float32 blocks of it stay in its cache."""

TEACHER_CACHE_MIB = 256.0
"""How much a batch's teacher distributions may take, to serve all its draft steps."""

GRADIENT_MIB = 128.0
"""How much the gradients at the logits may take that wait for one product into a trained matrix."""


@dataclass
class Workspace:
    """Buffers kept from batch to batch: fresh ones of this size cost as much as the arithmetic.

    `taught` is what `distill.teacher` keeps of the last batch that it served.
    """

    teacher_cache_mib: float = TEACHER_CACHE_MIB
    gradient_mib: float = GRADIENT_MIB
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rows: tuple[VocabMap, Tensor, Tensor] | None = None
    casts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    taught: Any = None

    def take(self, name: str, shape: tuple[int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that is valid until the same name is taken again."""
        size = shape[0] * shape[1]
        held = self.buffers.get(name)
        if held is None or held.dtype != dtype or held.device != like.device or len(held) < size:
            held = self.buffers[name] = torch.empty(size, dtype=dtype, device=like.device)
        return held[:size].view(shape)

    def take_like(self, like_SV: Tensor, name: str) -> Tensor:
        """The same in another tensor's shape and dtype."""
        return self.take(name, (like_SV.shape[0], like_SV.shape[1]), like_SV, like_SV.dtype)

    def widened(self, rows_SV: Tensor, name: str) -> Tensor:
        """The rows in at least float32: themselves, or a copy in a buffer."""
        if rows_SV.dtype in (torch.float32, torch.float64):
            return rows_SV
        shape = (rows_SV.shape[0], rows_SV.shape[1])
        return self.take(name, shape, rows_SV, torch.float32).copy_(rows_SV)

    def teacher_rows(self, lm_head_VD: Tensor, vocab: VocabMap | None) -> Tensor:
        """The rows of the target's output matrix that a draft vocabulary names."""
        if vocab is None:
            return lm_head_VD
        if self.rows is None or self.rows[0] is not vocab or self.rows[1] is not lm_head_VD:
            chosen = lm_head_VD[vocab.target_ids_Vd.to(lm_head_VD.device)]
            self.rows = (vocab, lm_head_VD, chosen)
        return self.rows[2]

    def matmul_weight(self, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix in the dtype of the products; of a frozen one the cast is kept."""
        assert weight_VD.dtype == dtype or not weight_VD.requires_grad
        if weight_VD.dtype == dtype:
            return weight_VD.detach()
        held = self.casts.get(id(weight_VD))
        if held is None or held[1].dtype != dtype:
            held = self.casts[id(weight_VD)] = (weight_VD, weight_VD.to(dtype))
        return held[1]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: where softmax and sums are computed."""
    return torch.promote_types(dtype, torch.float32)


def block_size(vocab_size: int, device: torch.device) -> int:
    """Positions of a block; on an accelerator a chunk is one block."""
    return max(8, BLOCK_NUMBERS // vocab_size) if device.type == "cpu" else 2**31


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`: (0, 7, 3) -> 0:3, 3:6, 6:7."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def loss_memory_gib(
    settings: LossSettings,
    *,
    num_positions: int,
    hidden_size: int,
    vocab_size: int,
    matmul_bytes: int = 2,
    trained_weight: bool = False,
) -> float:
    """Upper estimate of what one draft step's loss holds: its chunk, its blocks, its gradients.

    `num_positions` of one micro-batch; the output matrix's float32 gradient only when trained.
    """
    row, chunk = vocab_size * matmul_bytes, min(settings.chunk_size, num_positions)
    waiting = min(num_positions * row, GRADIENT_MIB * 2**20) if trained_weight else 0
    buffers = max(chunk * row, waiting)
    if settings.has_teacher:
        whole = num_positions * row
        buffers += whole if whole <= TEACHER_CACHE_MIB * 2**20 else chunk * row
    copies = 1 + 3 * settings.has_teacher + len(settings.vocabulary_terms)
    blocks = copies * min(max(8 * vocab_size, BLOCK_NUMBERS), chunk * vocab_size) * 4
    sides = 1 + settings.has_teacher + 3 * (settings.feature_weight > 0)
    states = (1 + sides) * num_positions * hidden_size * matmul_bytes
    weight = vocab_size * hidden_size * (4 + 2 * matmul_bytes) if trained_weight else 0
    return float(buffers + blocks + states + weight) / 2**30
