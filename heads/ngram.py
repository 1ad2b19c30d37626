"""Prompt lookup: the continuation of the last place where the newest n-gram stood before.

Training-free; the baseline of every comparison. Source: prompt lookup decoding (Saxena, 2023), as
in transformers' `prompt_lookup_num_tokens`.
"""

from typing import Any, Literal

import torch
from pydantic import Field

from heads.base import (
    DraftBudget,
    Drafter,
    DrafterConfig,
    DraftState,
    Needs,
    SharedWeights,
    TargetIdentity,
)
from heads.tree import TokenTree, chain
from heads.vocab import VocabMap


class NgramConfig(DrafterConfig):
    """N-grams of `max_ngram` tokens are looked up first, then shorter ones down to `min_ngram`."""

    kind: Literal["ngram"] = "ngram"
    max_ngram: int = Field(default=3, ge=1)
    min_ngram: int = Field(default=1, ge=1)


class Ngram(Drafter):
    """A chain copied from the text so far, or nothing when the n-gram is new."""

    kind = "ngram"
    Config = NgramConfig
    trainable = False

    config: NgramConfig

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config = config
        self.start()

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Ngram":
        """It needs nothing of the target."""
        return cls(config)

    @classmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "Ngram":
        """It has no tensors."""
        return cls(config)

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    @property
    def max_depth(self) -> None:
        """As long as the text so far allows."""
        return None

    def start(self) -> None:
        """Forget the last request's index."""
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """What stood behind the latest earlier occurrence of the longest n-gram at the end."""
        tokens = state.tokens
        draft: list[int] = []
        self._index(tokens)
        for size in range(
            min(self.config.max_ngram, len(tokens) - 1), self.config.min_ngram - 1, -1
        ):
            start = self._after.get(tuple(tokens[-size:]))
            if start is not None:
                draft = tokens[start : start + budget.shape.depth]
                break
        return TokenTree(chain(len(draft)), torch.tensor([tokens[-1], *draft]))

    def _index(self, tokens: list[int]) -> None:
        """Where each n-gram's continuation starts, for n-grams that end before the last token."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)
