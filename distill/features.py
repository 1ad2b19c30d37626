"""The target's states that drafters read, computed online and kept while they fit.

A packed row is processed by itself, each of its conversations seeing only itself, so that its
states do not depend on what else is in a batch: they are the same bits in every epoch, on every
process and after a resume.

Shapes: T positions of a row (padding left out), D hidden size, A captured layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.align import IGNORE, draft_targets
from heads.base import Needs
from heads.errors import UserError
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
    """The target's states at a row's tokens: `hidden_TD` after its final norm, `captured_TAD`."""

    hidden_TD: Tensor
    captured_TAD: Tensor | None


def visibility(segments_T: Tensor) -> Tensor:
    """Which positions each one attends to [1, T, T]: those before it in its own conversation."""
    same = segments_T[:, None] == segments_T[None]
    return same.tril()[None]


def features_gib(num_tokens: int, target: TargetModel, needs: Needs) -> float:
    """Memory of the states of `num_tokens` tokens."""
    layers = int(needs.final_hidden) + len(needs.captured_layers)
    width = int(target.config.hidden_size) * target.dtype.itemsize
    return float(num_tokens * layers * width) / 2**30


class FeatureSource:
    """States of packed rows, kept in main memory up to `cache_gib`; later rows are recomputed.

    Raises UserError, naming the row, when a state is NaN or infinite.
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

    def _compute(self, row: PackedRow) -> RowStates:
        if not (self.needs.final_hidden or self.needs.captured_layers):
            return RowStates(torch.empty(row.num_tokens, 0, dtype=self.target.dtype), None)
        states = self._forward(row, slice(0, row.num_tokens))
        if not _finite(states):
            self._refuse_nan(row)
        return states

    def _forward(self, row: PackedRow, place: slice) -> RowStates:
        """States of a stretch of whole conversations."""
        device = self.target.device
        states = self.target.forward(
            row.tokens_T[None, place].to(device),
            positions_BN=row.positions_T[None, place].to(device),
            visible_BNL=visibility(row.segments_T[place]).to(device),
            needs=self.needs,
        )
        captured = None if states.captured_BNAD is None else states.captured_BNAD[0]
        hidden = states.hidden_BND[0]
        return RowStates(hidden if self.needs.final_hidden else hidden[:, :0], captured)

    def _refuse_nan(self, row: PackedRow) -> None:
        """Name the conversations at fault; a masked NaN spreads, so each is run alone."""
        bad = []
        for segment, name in enumerate(row.ids, start=1):
            (where,) = (row.segments_T == segment).nonzero(as_tuple=True)
            if not _finite(self._forward(row, slice(int(where[0]), int(where[-1]) + 1))):
                bad.append(name)
        raise UserError(
            f"the target's states of conversation {', '.join(bad or row.ids)} hold NaN or "
            "infinity; drop it from the data, or run the target in float32 (target.dtype=float32)"
        )


def _finite(states: RowStates) -> bool:
    captured = states.captured_TAD
    return bool(torch.isfinite(states.hidden_TD).all()) and (
        captured is None or bool(torch.isfinite(captured).all())
    )


def _to_memory(states: RowStates) -> RowStates:
    captured = states.captured_TAD
    return RowStates(states.hidden_TD.cpu(), None if captured is None else captured.cpu())
