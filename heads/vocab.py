"""Draft vocabularies: a map between draft ids and target ids.

A draft vocabulary holds the tokens that the responses use most; logits are computed over those
only. Shapes: Vd draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.align import IGNORE
from heads.errors import UserError


@dataclass(frozen=True)
class VocabMap:
    """`target_ids_Vd` (int64, ascending, distinct): the target id of each draft id."""

    target_ids_Vd: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        """Ids are ascending, distinct and inside the target's vocabulary."""
        ids = self.target_ids_Vd
        if ids.ndim != 1 or not len(ids) or bool((ids[1:] <= ids[:-1]).any()):
            raise UserError(
                "a draft vocabulary is a non-empty list of ascending, distinct token ids"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(
                f"draft vocabulary ids run from {int(ids[0])} to {int(ids[-1])}, "
                f"outside the target's vocabulary of {self.vocab_size}"
            )

    def __len__(self) -> int:
        """The draft vocabulary's size Vd."""
        return len(self.target_ids_Vd)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return self.target_ids_Vd.to(draft_ids.device)[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, IGNORE where a token is outside (IGNORE stays IGNORE)."""
        table = torch.full((self.vocab_size,), IGNORE, dtype=torch.long, device=target_ids.device)
        table[self.target_ids_Vd.to(target_ids.device)] = torch.arange(
            len(self), device=target_ids.device
        )
        return torch.where(target_ids >= 0, table[target_ids.clamp(min=0)], IGNORE)

    @classmethod
    def from_counts(cls, counts_V: Tensor, size: int, always: Iterable[int] = ()) -> "VocabMap":
        """The `size` most frequent ids, `always` (special tokens) first; ties: the lowest id."""
        vocab_size = len(counts_V)
        if not 0 < size <= vocab_size:
            raise UserError(
                f"a draft vocabulary of {size} was asked for; "
                f"expected 1 to {vocab_size}, the target's size"
            )
        ranked = counts_V.double().clone()
        kept = [token for token in set(always) if 0 <= token < vocab_size]
        if len(kept) > size:
            raise UserError(
                f"a draft vocabulary of {size} was asked for, but {len(kept)} tokens are always "
                "kept (special tokens); ask for at least that many"
            )
        ranked[kept] = float("inf")
        order = torch.argsort(ranked, descending=True, stable=True)[:size]
        return cls(order.sort().values, vocab_size)
