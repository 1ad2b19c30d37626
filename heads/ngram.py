"""Prompt lookup: the continuation of the last place where the newest n-gram stood before.

Training-free; the baseline of every comparison. Source: prompt lookup decoding (Saxena, 2023), as
in transformers' `prompt_lookup_num_tokens`.
"""

from dataclasses import dataclass, field
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
from heads.lookup import MatchRates
from heads.tree import TokenTree, chain
from heads.vocab import VocabMap


class NgramConfig(DrafterConfig):
    """N-grams of `max_ngram` tokens are looked up first, then shorter ones down to `min_ngram`."""

    kind: Literal["ngram"] = "ngram"
    max_ngram: int = Field(default=3, ge=1)
    min_ngram: int = Field(default=1, ge=1)


@dataclass
class _Index:
    """Where each n-gram's latest continuation starts, the one at the very end left out."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    rates: MatchRates = field(default_factory=MatchRates)

    def extend(self, tokens: list[int], config: NgramConfig) -> None:
        """Take in the tokens that were committed since."""
        for end in range(max(self.indexed, 1), len(tokens)):
            if self.indexed:
                match, start = self.longest(tokens, end, config)
                if match:
                    self.rates.add(match, tokens[start] == tokens[end])
            for size in range(config.min_ngram, min(config.max_ngram, end) + 1):
                self.after[tuple(tokens[end - size : end])] = end
        self.indexed = len(tokens)

    def longest(self, tokens: list[int], end: int, config: NgramConfig) -> tuple[int, int]:
        """The size of the longest n-gram before `end` that stood before, and where it went on."""
        for size in range(min(config.max_ngram, end - 1), config.min_ngram - 1, -1):
            start = self.after.get(tuple(tokens[end - size : end]))
            if start is not None:
                return size, start
        return 0, end


class Ngram(Drafter):
    """A chain copied from the text so far, or nothing when the n-gram is new."""

    kind = "ngram"
    Config = NgramConfig
    trainable = False

    config: NgramConfig

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config = config

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

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """What stood behind the latest earlier occurrence of the longest n-gram at the end."""
        tokens = state.tokens
        index = state.memory = state.memory or _Index()
        index.extend(tokens, self.config)
        match, start = index.longest(tokens, len(tokens), self.config)
        draft = tokens[start : start + budget.shape.depth]
        confidences = [1.0]
        for depth in range(len(draft)):
            confidences.append(confidences[-1] * index.rates.rate(match + depth))
        return TokenTree(
            chain(len(draft)),
            torch.tensor([tokens[-1], *draft]),
            confidences_N=torch.tensor(confidences),
        )
