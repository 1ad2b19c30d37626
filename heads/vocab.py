"""Draft vocabularies: a map between draft ids and target ids.

A draft vocabulary holds the tokens that the responses use most; logits are computed over those
only. Shapes: Vd draft vocabulary, V target vocabulary.
"""

import hashlib
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

    @property
    def digest(self) -> str:
        """16 hex digits that two maps share only when their ids are the same."""
        return digest(self.target_ids_Vd)

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

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [..., Vd] over the target's vocabulary [..., V], minus infinity outside."""
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        full[..., self.target_ids_Vd.to(full.device)] = logits
        return full

    @classmethod
    def from_counts(cls, counts_V: Tensor, size: int, always: Iterable[int] = ()) -> "VocabMap":
        """The `size` most frequent ids, `always` (special tokens) first; ties: the lowest id.

        Where fewer ids occur than are asked for, the rest are therefore the lowest ids: in a BPE
        tokenizer the first merges, which are the most frequent in the text it was made from.
        """
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


def digest(ids_Vd: Tensor) -> str:
    """16 hex digits of the sha256 over ids [Vd] as little-endian int64."""
    data = ids_Vd.detach().cpu().numpy().astype("<i8").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def label(ids_Vd: Tensor | None) -> str:
    """What a contract says of draft ids [Vd]: `full` for None, else `reduced:<size>:<digest>`."""
    return "full" if ids_Vd is None else f"reduced:{len(ids_Vd)}:{digest(ids_Vd)}"
