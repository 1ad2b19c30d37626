"""The target's states that drafters read, computed online and kept while they fit.

Each conversation is processed by itself, so that its states do not depend on what else is in its
row or batch: they are the same bits in every epoch, on every process and after a resume. It is
faster too than a row under a mask: attention is plainly causal and no two conversations meet.

Shapes: T positions of a row (padding left out), D hidden size, A captured layers.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.align import IGNORE, draft_targets
from heads.base import Needs
from infer.target import TargetModel


@dataclass(frozen=True)
class PackedRow:
    """Several conversations in a row of one length, padding behind them.

    `index`: its number among the rows of its set. `tokens_T` int64, `loss_mask_T` bool,
    `segments_T` int64 (the conversation from 1, 0 for padding), `positions_T` int64 (restarting
    with each conversation), `ids` the conversations' ids in order.
    """

    index: int
    tokens_T: Tensor
    loss_mask_T: Tensor
    segments_T: Tensor
    positions_T: Tensor
    ids: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments_T > 0).sum())

    @property
    def num_supervised(self) -> int:
        """Positions that carry a loss at the first draft step."""
        targets = draft_targets(
            self.tokens_T[None], self.loss_mask_T[None], self.segments_T[None], 0
        )
        return int((targets != IGNORE).sum())


@dataclass(frozen=True)
class RowStates:
    """The target's states at a row's tokens: `hidden_TD` after its final norm, `captured_TAD`.

    `row` is what may be learned: without the conversations whose states hold NaN or infinity
    (`dropped`, by id). The states are those of its tokens.
    """

    hidden_TD: Tensor
    captured_TAD: Tensor | None
    row: PackedRow
    dropped: tuple[str, ...] = ()


def features_gib(num_tokens: int, target: TargetModel, needs: Needs) -> float:
    """Memory of the states of `num_tokens` tokens."""
    layers = int(needs.final_hidden) + len(needs.captured_layers)
    width = int(target.config.hidden_size) * target.dtype.itemsize
    return float(num_tokens * layers * width) / 2**30


class FeatureSource:
    """States of packed rows, kept in main memory up to `cache_gib`; later rows are recomputed.

    Which conversations are dropped depends on their row alone, so every process, every epoch and a
    resumed run drop the same ones. `train.ledger.Ledger` counts them.
    """

    def __init__(self, target: TargetModel, needs: Needs, cache_gib: float) -> None:
        self.target, self.needs, self.cache_gib = target, needs, cache_gib
        self._kept: dict[int, RowStates] = {}
        self._kept_gib = 0.0

    def states(self, row: PackedRow) -> RowStates:
        """The row's states, from memory where they are kept."""
        kept = self._kept.get(row.index)
        if kept is not None:
            return kept
        states = self._compute(row)
        size = features_gib(row.num_tokens, self.target, self.needs)
        if self._kept_gib + size <= self.cache_gib:
            states = _to_memory(states)
            self._kept[row.index] = states
            self._kept_gib += size
        return states

    def changed(self, row: PackedRow, fresh: Collection[int], of: PackedRow) -> RowStates:
        """The states of `row`, which is `of` with other conversations at the numbers `fresh`.

        Those that did not change keep their states; nothing of a changed row is kept.
        """
        known = self.states(of)
        if known.dropped or not (self.needs.final_hidden or self.needs.captured_layers):
            return self._compute(row)
        captured, device = known.captured_TAD, self.target.device

        def alone(segment: int) -> tuple[Tensor, Tensor | None]:
            if segment in fresh:
                return self._forward(row, _place(row, segment))
            place = _place(of, segment)
            layers = None if captured is None else captured[place].to(device)
            return known.hidden_TD[place].to(device), layers

        return _joined(row, [alone(segment) for segment in _segments(row)])

    def _compute(self, row: PackedRow) -> RowStates:
        if not (self.needs.final_hidden or self.needs.captured_layers):
            empty = torch.empty(row.num_tokens, 0, dtype=self.target.dtype)
            return RowStates(empty, None, row)
        return _joined(row, [self._forward(row, _place(row, n)) for n in _segments(row)])

    def _forward(self, row: PackedRow, place: slice) -> tuple[Tensor, Tensor | None]:
        """States [T, D] and [T, A, D] of one conversation, plainly causal."""
        tokens_1T = row.tokens_T[None, place].to(self.target.device)
        states = self.target.forward(tokens_1T, needs=self.needs)
        captured = None if states.captured_BNAD is None else states.captured_BNAD[0]
        hidden = states.hidden_BND[0]
        return hidden if self.needs.final_hidden else hidden[:, :0], captured


def _joined(row: PackedRow, alone: list[tuple[Tensor, Tensor | None]]) -> RowStates:
    """A row's states out of those of each of its conversations, less the bad ones."""
    bad = {n for n, states in enumerate(alone, start=1) if not _finite(*states)}
    hidden_TD = torch.cat([hidden for hidden, _ in alone])
    layers = [captured for _, captured in alone if captured is not None]
    captured_TAD = torch.cat(layers) if layers else None
    if bad:
        return _without(row, bad, hidden_TD, captured_TAD)
    return RowStates(hidden_TD, captured_TAD, row)


def _segments(row: PackedRow) -> range:
    """The numbers of the row's conversations."""
    return range(1, len(row.ids) + 1)


def _place(row: PackedRow, segment: int) -> slice:
    """Where a conversation of the row stands."""
    (where,) = (row.segments_T == segment).nonzero(as_tuple=True)
    return slice(int(where[0]), int(where[-1]) + 1)


def _without(
    row: PackedRow, bad: set[int], hidden_TD: Tensor, captured_TAD: Tensor | None
) -> RowStates:
    """The row and its states without some conversations: the others close up, padding behind.

    segments 1 1 2 2 2 3 0, conversation 2 is bad  ->  1 1 2 0 0 0 0
    """
    good = [segment for segment in _segments(row) if segment not in bad]
    kept = torch.isin(row.segments_T, torch.tensor(good, dtype=torch.long)).nonzero()[:, 0]
    numbers = torch.zeros(len(row.ids) + 1, dtype=torch.long)
    numbers[good] = torch.arange(1, len(good) + 1)

    def closed_up(values_T: Tensor) -> Tensor:
        moved_T = torch.zeros_like(values_T)
        moved_T[: len(kept)] = values_T[kept]
        return moved_T

    learned = PackedRow(
        index=row.index,
        tokens_T=closed_up(row.tokens_T),
        loss_mask_T=closed_up(row.loss_mask_T),
        segments_T=closed_up(numbers[row.segments_T]),
        positions_T=closed_up(row.positions_T),
        ids=tuple(row.ids[segment - 1] for segment in good),
    )
    dropped = tuple(row.ids[segment - 1] for segment in sorted(bad))
    where = kept.to(hidden_TD.device)
    captured_TAD = None if captured_TAD is None else captured_TAD[where]
    return RowStates(hidden_TD[where], captured_TAD, learned, dropped)


def _finite(hidden_TD: Tensor, captured_TAD: Tensor | None) -> bool:
    return bool(torch.isfinite(hidden_TD).all()) and (
        captured_TAD is None or bool(torch.isfinite(captured_TAD).all())
    )


def _to_memory(states: RowStates) -> RowStates:
    captured = states.captured_TAD
    captured = None if captured is None else captured.cpu()
    return replace(states, hidden_TD=states.hidden_TD.cpu(), captured_TAD=captured)
