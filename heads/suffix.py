"""Suffix decoding: what followed the text's own ending where it stood before, by its counts.

Training-free; source: SuffixDecoding (2411.04975), over this request's own prompt and output. The
suffix tree is held as its dual, the suffix automaton (Blumer et al., 1985), which grows by one
token at a time and holds fewer than 2 states and 3 transitions a token.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
from heads.tree import DynamicTree, TokenTree, TreeShape
from heads.vocab import VocabMap


class SuffixConfig(DrafterConfig):
    """A match of m tokens drafts `spec_factor` * m at most, down to a probability of `min_prob`."""

    kind: Literal["suffix"] = "suffix"
    spec_factor: float = Field(default=1.0, gt=0)
    min_prob: float = Field(default=0.1, gt=0, le=1)


class Continuation(NamedTuple):
    """A token that stood behind a match: its state, how often, and where it last ended."""

    token: int
    state: int
    times: int
    latest: int


class Automaton:
    """All substrings of a text; those that end at the same places share a state.

    Of each state: the `length` of its longest substring, its `link` (the state of that substring's
    longest ending with more places), its transitions `after`, in how many places it ends (`count`)
    and the last of them (`latest`). State 0 is the empty substring.
    """

    def __init__(self) -> None:
        self.length, self.link, self.count, self.latest = [0], [-1], [0], [-1]
        self.after: list[dict[int, int]] = [{}]
        self.whole, self.size = 0, 0

    @property
    def matched(self) -> int:
        """The state of the text's longest ending that stood before; 0 for none."""
        return max(self.link[self.whole], 0)

    def append(self, token: int) -> None:
        """Add a token. Counts cost a step for each state of the text's endings.

        Those are few in prose; in a text that is one loop they are as many as its rounds.
        """
        state, above = self._new(self.length[self.whole] + 1), self.whole
        while above >= 0 and token not in self.after[above]:
            self.after[above][token] = state
            above = self.link[above]
        self.link[state] = 0 if above < 0 else self._ending(above, token)
        self.whole = state
        while state > 0:
            self.count[state] += 1
            self.latest[state] = self.size
            state = self.link[state]
        self.size += 1

    def _ending(self, above: int, token: int) -> int:
        """The state of the longest substring of `above` and `token`, split off if need be."""
        old = self.after[above][token]
        if self.length[old] == self.length[above] + 1:
            return old
        split = self._new(self.length[above] + 1)
        self.link[split], self.count[split] = self.link[old], self.count[old]
        self.after[split] = dict(self.after[old])
        self.link[old] = split
        while above >= 0 and self.after[above].get(token) == old:
            self.after[above][token] = split
            above = self.link[above]
        return split

    def _new(self, length: int) -> int:
        self.length.append(length)
        self.link.append(0)
        self.count.append(0)
        self.latest.append(-1)
        self.after.append({})
        return len(self.length) - 1

    def continuations(self, state: int) -> list[Continuation]:
        """What stood behind a state's substrings: the most frequent first, of equals the latest."""
        found = [
            Continuation(token, child, self.count[child], self.latest[child])
            for token, child in self.after[state].items()
        ]
        return sorted(found, key=lambda c: (c.times, c.latest), reverse=True)


class Draft(NamedTuple):
    """A draft token: its parent's index + 1 (0 is the root), its path's probability and depth."""

    parent: int
    token: int
    prob: float
    depth: int
    share: float
    """Its probability behind its parent."""


@dataclass
class _Memory:
    """One request's text so far; the rates are those of its tokens since the first proposal."""

    text: Automaton = field(default_factory=Automaton)
    rates: MatchRates = field(default_factory=MatchRates)

    def extend(self, tokens: list[int]) -> None:
        """Take in the tokens that were committed since."""
        text, generated = self.text, self.text.size > 0
        for token in tokens[text.size :]:
            matched = text.matched
            if generated and matched:
                self.rates.add(text.length[matched], token in text.after[matched])
            text.append(token)


class Suffix(Drafter):
    """The likeliest continuations of the text's ending, as a chain or a tree."""

    kind = "suffix"
    Config = SuffixConfig
    trainable = False
    can_grow = True

    config: SuffixConfig

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Suffix":
        """It needs nothing of the target."""
        return cls(config)

    @classmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "Suffix":
        """It has no tensors."""
        return cls(config)

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    @property
    def max_depth(self) -> None:
        """As long as the match allows."""
        return None

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """The drafts of the match whose expected acceptance, by counts, is the greatest."""
        memory = state.memory = state.memory or _Memory()
        memory.extend(state.tokens)
        match, drafts = self.best_drafts(memory.text, budget.shape)
        confidences = [1.0]
        for draft in drafts:
            rate = memory.rates.rate(match + draft.depth - 1)
            confidences.append(confidences[draft.parent] * rate * draft.share)
        return TokenTree(
            TreeShape((-1, *(draft.parent for draft in drafts))),
            torch.tensor([state.tokens[-1], *(draft.token for draft in drafts)]),
            confidences_N=torch.tensor(confidences),
        )

    def best_drafts(
        self, text: Automaton, shape: TreeShape | DynamicTree
    ) -> tuple[int, list[Draft]]:
        """The length of the match, and its drafts: of every ending that stood before the best.

        A longer match may draft more; where the sums of probabilities are equal it is taken. No
        sum passes the drafts' depth, so the search ends where none can be greater.
        """
        best, best_match, best_sum = list[Draft](), 0, 0.0
        ending = text.matched
        while ending > 0:
            match = text.length[ending]
            depth = min(shape.depth, int(self.config.spec_factor * match))
            if depth <= best_sum:
                break
            drafts = self.drafts(text, ending, depth, shape)
            total = sum(draft.prob for draft in drafts)
            if total > best_sum:
                best, best_match, best_sum = drafts, match, total
            ending = text.link[ending]
        return best_match, best

    def drafts(
        self, text: Automaton, ending: int, depth: int, shape: TreeShape | DynamicTree
    ) -> list[Draft]:
        """Best first: the likeliest paths behind a match, as many as the shape has nodes.

        Of equally likely ones the shallower, then the latest. A chain goes on by its likeliest
        token alone.
        """
        width = shape.top_k if isinstance(shape, DynamicTree) else len(shape)
        if shape.is_chain:
            width = 1
        found: list[Draft] = []
        heap: list[tuple[float, int, int, int, int, int, float]] = []

        def push(state: int, parent: int, prob: float, level: int) -> None:
            children = text.continuations(state)
            total = sum(child.times for child in children)
            for child in children[:width]:
                share = child.times / total
                if level <= depth and prob * share >= self.config.min_prob:
                    key = (-prob * share, level, -child.latest)
                    heapq.heappush(heap, (*key, parent, child.token, child.state, share))

        push(ending, 0, 1.0, 1)
        while heap and len(found) < len(shape) - 1:
            negated, level, _, parent, token, state, share = heapq.heappop(heap)
            found.append(Draft(parent, token, -negated, level, share))
            push(state, len(found), -negated, level + 1)
        return found
