"""A lookup and a drafter as one drafter: what the text repeats, and what it does not.

A tree holds the paths of both, shared prefixes once, and of all nodes the likeliest; a chain is the
one of the two that is expected to be the longer.

Shapes: H draft steps, K ranks, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.base import DraftBudget, Drafter, DraftState, Needs
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain, cut

UNKNOWN_HK = ((0.4, 0.15, 0.08, 0.05, 0.03),)
"""How often a candidate of each rank holds, for a drafter of which nothing was measured."""


@dataclass
class _Memory:
    """Each of the two keeps its own record of the request."""

    lookup: DraftState
    drafter: DraftState


class Union(Drafter):
    """`lookup`, which needs nothing of the target, beside `drafter`; checkpoints are the latter's.

    `accuracies_HK` are the drafter's measured ones (`heads.base.Checkpoint`), where there are any.
    A lookup's path may be as deep as the budget has nodes, deeper than the drafter's.

    It is as lossless as its parts: which drafts are kept depends on the committed text and on
    deterministic drafts. Random ones are drawn in chains only, and which of the two drafts is known
    before they are; the lookup's then come with their true distributions, which are one-hot.
    """

    kind = "joined"
    draws_trees = False

    def __init__(
        self,
        lookup: Drafter,
        drafter: Drafter,
        vocab_size: int,
        accuracies_HK: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        assert lookup.needs == Needs(), f"a lookup of kind {lookup.kind!r} needs the target"
        self.lookup, self.drafter, self.config = lookup, drafter, drafter.config
        self.vocab_size, self.accuracies_HK = vocab_size, accuracies_HK or UNKNOWN_HK
        for name, value in {
            "kind": f"{lookup.kind}+{drafter.kind}",
            "can_sample": drafter.can_sample,
            "can_grow": drafter.can_grow,
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, *arguments: Any) -> "Union":
        """No kind of its own."""
        raise AssertionError("a union is made of drafters that are there already")

    @classmethod
    def blank(cls, *arguments: Any) -> "Union":
        """No checkpoint of its own."""
        raise AssertionError("a union is made of drafters that are there already")

    @property
    def core(self) -> Drafter:
        """The drafter whose forwards take the time."""
        return self.drafter.core

    @property
    def needs(self) -> Needs:
        """What the drafter needs."""
        return self.drafter.needs

    @property
    def max_depth(self) -> None:
        """As long as the lookup's."""
        return None

    @torch.no_grad()
    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """The drafter's own proposal where the lookup finds nothing."""
        if state.memory is None:
            state.memory = _Memory(DraftState(state.tokens), DraftState(state.tokens))
        memory: _Memory = state.memory
        memory.lookup.tokens = memory.drafter.tokens = state.tokens
        memory.drafter.hidden_TD = state.hidden_TD
        memory.drafter.captured_TAD = state.captured_TAD
        if budget.shape.is_chain:
            return self._chain(memory, budget)
        if budget.probs is not None:
            raise UserError(
                f"a drafter of kind {self.kind!r} draws no trees at random; "
                "use a chain (--chain K) or the rule topk_tree"
            )
        size = len(budget.shape) - 1
        found = self.lookup.propose(
            memory.lookup, DraftBudget(DynamicTree(size, depth=size, top_k=size))
        )
        drafted = self.drafter.propose(memory.drafter, self._within_depth(budget))
        if len(found.shape) == 1:
            return drafted
        return merged(drafted, found, self._values(drafted), self._values(found), len(budget.shape))

    def _chain(self, memory: _Memory, budget: DraftBudget) -> TokenTree:
        """The lookup's chain where its expected length is the greater, else the drafter's.

        The drafter then takes in what is new, but drafts nothing.
        """
        shape = chain(min(budget.shape.depth, len(budget.shape) - 1))
        found = self.lookup.propose(memory.lookup, DraftBudget(shape))
        own = self._within_depth(replace(budget, shape=shape))
        expected = _by_rank(own.shape, self.accuracies_HK)
        if sum(self._values(found)) <= sum(expected):
            return self.drafter.propose(memory.drafter, own)
        self.drafter.propose(memory.drafter, DraftBudget(chain(0)))
        return (
            found if budget.probs is None else replace(found, draft_probs_NV=self._certain(found))
        )

    def _certain(self, found: TokenTree) -> Tensor:
        """q [N, V] of a deterministic chain: all on the token that was drafted."""
        return F.one_hot(found.tokens_N.roll(-1), self.vocab_size).float()

    def _values(self, tree: TokenTree) -> list[float]:
        """How likely each node's path is to hold: the drafter's own word, else as measured."""
        if tree.confidences_N is not None:
            return tree.confidences_N.tolist()
        return _by_rank(tree.shape, self.accuracies_HK)

    def _within_depth(self, budget: DraftBudget) -> DraftBudget:
        """What the drafter is asked for: no deeper than it can draft."""
        shape, limit = budget.shape, self.drafter.max_depth
        if limit is None or shape.depth <= limit:
            return budget
        if isinstance(shape, DynamicTree):
            return replace(budget, shape=replace(shape, depth=limit))
        return replace(budget, shape=cut(shape, limit))


def merged(
    first: TokenTree,
    second: TokenTree,
    first_values: Sequence[float],
    second_values: Sequence[float],
    num_nodes: int,
) -> TokenTree:
    """The union of two trees of one root, cut to its `num_nodes` of the greatest values.

    A value is how likely the path down to a node is to hold, so that the sum over a tree is its
    expected accepted length; it never grows along a path. A node of both has the greater of its
    two. Of equal values `first`'s come first.

        paths a b, a c of values .5 .2, .5 .1 with a d of .6 .4, 4 nodes -> a b, a d
    """
    assert first.tokens_N[0] == second.tokens_N[0], "two trees of one round have one root"
    numbers: dict[tuple[int, int], int] = {}
    values, parents, tokens = [1.0], [-1], [int(first.tokens_N[0])]
    for tree, tree_values in ((first, first_values), (second, second_values)):
        placed = [0]
        pairs = zip(
            tree.shape.parents[1:], tree.tokens_N[1:].tolist(), tree_values[1:], strict=True
        )
        for parent, token, value in pairs:
            node = numbers.setdefault((placed[parent], token), len(values))
            if node == len(values):
                values.append(value)
                parents.append(placed[parent])
                tokens.append(token)
            values[node] = max(values[node], value)
            placed.append(node)
    # The sort is stable and a parent comes before its children, also where values are equal.
    order = sorted(range(1, len(values)), key=lambda node: -values[node])[: num_nodes - 1]
    kept = [0, *sorted(order)]
    number = {-1: -1} | {node: index for index, node in enumerate(kept)}
    return TokenTree(
        TreeShape(tuple(number[parents[node]] for node in kept)),
        torch.tensor([tokens[node] for node in kept]),
        confidences_N=torch.tensor([values[node] for node in kept]),
    )


def _by_rank(
    shape: TreeShape | DynamicTree, accuracies_HK: Sequence[Sequence[float]]
) -> list[float]:
    """The product of rates by step and rank along each node's path; the last ones go on."""
    assert isinstance(shape, TreeShape)
    values = [1.0]
    for node, parent in enumerate(shape.parents[1:], start=1):
        row = accuracies_HK[min(shape.depths[node], len(accuracies_HK)) - 1]
        values.append(values[parent] * row[min(shape.ranks[node], len(row) - 1)])
    return values
