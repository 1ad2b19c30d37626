"""From conversations to batches: packed once, shuffled by epoch, shared out among processes.

Shapes: B rows, T positions (the sequence length), D hidden size, A captured layers.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distill.features import PackedRow, RowStates
from heads.base import TrainingBatch


class Conversation(Protocol):
    """What is packed: an id, token ids, and a mask that is true where a token is supervised."""

    @property
    def id(self) -> str:
        """Its name in messages."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids."""
        ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """One flag a token."""
        ...


@dataclass(frozen=True)
class Packing:
    """Packed rows, and how many conversations were longer than a row and lost their end."""

    rows: list[PackedRow]
    num_conversations: int
    num_cut: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_supervised(self) -> int:
        """Positions that carry a loss at the first draft step."""
        return sum(row.num_supervised for row in self.rows)


def derive(seed: int, *parts: int) -> int:
    """A seed for one purpose: the same on every machine, unrelated to its neighbours."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def shuffled(count: int, *seeds: int) -> list[int]:
    """0..count-1 in an order that the seeds decide."""
    generator = torch.Generator().manual_seed(derive(*seeds))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def pack(conversations: Sequence[Conversation], sequence_length: int, seed: int) -> Packing:
    """First fit: in an order by `seed`, each conversation goes into the first row with room."""
    groups: list[list[int]] = []
    room = np.zeros(len(conversations), dtype=np.int64)
    for number in shuffled(len(conversations), seed):
        length = min(len(conversations[number].tokens), sequence_length)
        fits = np.flatnonzero(room[: len(groups)] >= length)
        place = int(fits[0]) if len(fits) else len(groups)
        if place == len(groups):
            groups.append([])
            room[place] = sequence_length
        groups[place].append(number)
        room[place] -= length
    rows = [
        _packed(index, [conversations[number] for number in group], sequence_length)
        for index, group in enumerate(groups)
    ]
    cut = sum(len(conversation.tokens) > sequence_length for conversation in conversations)
    return Packing(rows, len(conversations), cut)


def _packed(index: int, group: list[Conversation], sequence_length: int) -> PackedRow:
    """One row: conversations [a b], [c d e] -> tokens a b c d e 0, segments 1 1 2 2 2 0."""
    tokens, mask, segments, positions = (
        torch.zeros(sequence_length, dtype=torch.long) for _ in range(4)
    )
    start = 0
    for segment, conversation in enumerate(group, start=1):
        length = min(len(conversation.tokens), sequence_length)
        place = slice(start, start + length)
        tokens[place] = torch.as_tensor(conversation.tokens, dtype=torch.long)[:length]
        mask[place] = torch.as_tensor(conversation.loss_mask, dtype=torch.long)[:length]
        segments[place] = segment
        positions[place] = torch.arange(length)
        start += length
    ids = tuple(conversation.id for conversation in group)
    return PackedRow(index, tokens, mask.bool(), segments, positions, ids)


@dataclass(frozen=True)
class RowStream:
    """The endless order in which packed rows are learned: one shuffled epoch after another.

    Step s takes rows s * per_step to (s + 1) * per_step - 1 of it, so the data position is the
    step alone, and a run's last step is filled from the epoch that would come next.
    """

    num_rows: int
    per_step: int
    seed: int

    def rows(self, step: int) -> list[int]:
        """Indices of the packed rows of one step, over all processes."""
        first = step * self.per_step
        orders: dict[int, list[int]] = {}
        picked = []
        for place in range(first, first + self.per_step):
            epoch, offset = divmod(place, self.num_rows)
            if epoch not in orders:
                orders[epoch] = shuffled(self.num_rows, self.seed, epoch)
            picked.append(orders[epoch][offset])
        return picked


def share(rows: Sequence[int], process: int, processes: int, micro_batch: int) -> list[list[int]]:
    """A process's micro-batches of a step: micro-batch a of process r is number a * processes + r.

    So the step's rows are the same for 1 process x accumulation 8 and 2 processes x 4.
    """
    micro = [list(rows[i : i + micro_batch]) for i in range(0, len(rows), micro_batch)]
    return micro[process::processes]


def collate(
    states: Sequence[RowStates],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> TrainingBatch:
    """One micro-batch of rows and their states, padded with zeros, in `dtype` where one is given.

    What was dropped of a row is not in it.
    """
    rows = [state.row for state in states]
    length = len(rows[0].tokens_T)
    captured = _captured(states, length)
    hidden = _stacked([state.hidden_TD for state in states], length)
    return TrainingBatch(
        tokens_BT=torch.stack([row.tokens_T for row in rows]).to(device),
        loss_mask_BT=torch.stack([row.loss_mask_T for row in rows]).to(device),
        segments_BT=torch.stack([row.segments_T for row in rows]).to(device),
        positions_BT=torch.stack([row.positions_T for row in rows]).to(device),
        hidden_BTD=hidden.to(device, dtype),
        captured_BTAD=None if captured is None else captured.to(device, dtype),
        rows=tuple(name for row in rows for name in row.ids),
    )


def _captured(states: Sequence[RowStates], length: int) -> Tensor | None:
    layers = [state.captured_TAD for state in states if state.captured_TAD is not None]
    return _stacked(layers, length) if layers else None


def _stacked(parts: list[Tensor], length: int) -> Tensor:
    """Tensors [T_i, ...] as one [B, length, ...], zeros behind."""
    stacked = parts[0].new_zeros(len(parts), length, *parts[0].shape[1:])
    for row, part in enumerate(parts):
        stacked[row, : len(part)] = part
    return stacked
