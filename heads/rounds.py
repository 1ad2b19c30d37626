"""One round of drafting step by step: chains, static and dynamic trees, drawn or by rank.

Shapes: R requests, N nodes (of all requests one after another), P nodes of a level a request,
K candidates, C candidates of all levels, D drafter's hidden size, V (draft) vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.base import DraftBudget, Drafter, DraftState
from heads.cache import TreeCache
from heads.drawing import draw_children, drawn_tree, parent_rows
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape
from heads.vocab import VocabMap

CACHE_CAPACITY = 512
MEASURED_STEPS = 6
"""Draft steps that an evaluation measures at least: drafts may go deeper than training did."""


class Step(NamedTuple):
    """One step's result: `output` feeds the output matrix, `state` the next step. Both [..., D]."""

    output: Tensor
    state: Tensor


class SteppingDrafter(Drafter):
    """What drafts a tree level by level, each level one step behind a cache of its own.

    A kind says how committed text gets into the cache (`absorb`), what one step over nodes does
    (`nodes_step`), and which output matrix it reads (`with_matrix`).
    """

    can_sample = True
    can_grow = True
    num_layers = 1
    vocab_size: int
    _vocab: VocabMap | None = None

    @abstractmethod
    def absorb(self, states: Sequence[DraftState]) -> Step:
        """Take what is new of each request's text into its cache; the last one's result [R, D]."""

    @abstractmethod
    def nodes_step(
        self,
        tokens: Sequence[int] | Tensor,
        states_ND: Tensor,
        positions: Sequence[int],
        memories: Sequence[TreeCache],
        counts: Sequence[int],
        visible: Sequence[Tensor | None],
        depth: int,
    ) -> Step:
        """Draft step `depth` over the nodes of several requests, one after another [N, D]."""

    @abstractmethod
    def with_matrix(self, output: Tensor, apply: Any) -> Any:
        """`apply(output, weight_VD)` of the output matrix, inside the module that owns it."""

    @property
    def max_depth(self) -> int | None:
        """It goes on from its own drafts, so there is no limit."""
        return None

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """A tree for one request."""
        return self.propose_batch([state], budget)[0]

    @torch.no_grad()
    def propose_batch(self, states: Sequence[DraftState], budget: DraftBudget) -> list[TokenTree]:
        """Absorb what the target has processed since, then draft: one forward a tree level."""
        for state in states:
            if state.memory is None:
                state.memory = TreeCache(self.num_layers, CACHE_CAPACITY)
        done = self.absorb(states)
        memories = [state.memory for state in states]
        bases = [memory.length for memory in memories]
        round_ = Round(self, memories, bases, states, done)
        try:
            if isinstance(budget.shape, DynamicTree):
                assert budget.probs is None, "a dynamic tree holds the best candidates"
                return round_.grown(budget.shape)
            return round_.filled(budget)
        finally:
            for memory, base in zip(memories, bases, strict=True):
                memory.commit(base, [])

    def logits(self, output: Tensor) -> Tensor:
        """Logits [..., V] over the (draft) vocabulary."""
        logits: Tensor = self.with_matrix(output, F.linear)
        return logits

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of rows of the output matrix."""
        return draft_ids if self._vocab is None else self._vocab.to_target(draft_ids)


class Round:
    """One round of drafting for R requests, all of the same number of nodes a level.

    `bases`: how many positions of each request its cache holds; nodes of depth 1 come next.
    """

    def __init__(
        self,
        drafter: SteppingDrafter,
        memories: Sequence[TreeCache],
        bases: Sequence[int],
        states: Sequence[DraftState],
        first: Step,
    ) -> None:
        self.drafter, self.memories, self.bases = drafter, memories, bases
        self.roots = [state.tokens[-1] for state in states]
        self.first = first
        self.device = first.state.device
        # Of each request: which of its expanded nodes each expanded node sees.
        self.seen = [torch.zeros(0, 0, dtype=torch.bool) for _ in states]

    def filled(self, budget: DraftBudget) -> list[TokenTree]:
        """The static tree: each node takes its parent's candidate of its rank, or one drawn."""
        shape, requests = budget.shape, len(self.roots)
        assert isinstance(shape, TreeShape), shape
        tokens_RN = torch.zeros(requests, len(shape)).long()
        tokens_RN[:, 0] = torch.tensor(self.roots)
        drawn: list[tuple[list[int], Tensor]] = []
        level, done, slots = [0], self.first, {0: -1}
        for depth in range(1, shape.depth + 1):
            nodes = [n for n in range(len(shape)) if shape.depths[n] == depth]
            places = torch.tensor([level.index(shape.parents[n]) for n in nodes])
            if budget.probs is None:
                ranks = torch.tensor([shape.ranks[n] for n in nodes])
                best = self._candidates(done.output, int(ranks.max()) + 1).cpu()
            else:
                ranks = torch.tensor([shape.children[shape.parents[n]].index(n) for n in nodes])
                best, probs = self._drawn(done.output, int(ranks.max()) + 1, budget)
                drawn.append((level, probs.view(requests, len(level), -1)))
            tokens_RN[:, nodes] = best.view(requests, len(level), -1)[:, places, ranks]
            inner = [n for n in nodes if shape.children[n]]
            if not inner:
                break
            states_RPD = done.state.view(requests, len(level), -1)
            parents = torch.tensor([level.index(shape.parents[n]) for n in inner])
            above = torch.tensor([slots[shape.parents[n]] for n in inner])
            slots |= {n: len(slots) - 1 + i for i, n in enumerate(inner)}
            done = self._expand(
                tokens_RN[:, inner].clamp(min=0),
                states_RPD[:, parents.to(self.device)].flatten(0, 1),
                above.expand(requests, -1),
                depth,
            )
            level = inner
        if not drawn:
            return [TokenTree(shape, tokens_N) for tokens_N in tokens_RN]
        q_RNV = torch.zeros(requests, parent_rows(shape), drawn[0][1].shape[-1])
        for level, q_RPV in drawn:
            q_RNV[:, level] = q_RPV
        return [drawn_tree(shape, *row) for row in zip(tokens_RN, q_RNV, strict=True)]

    def grown(self, tree: DynamicTree) -> list[TokenTree]:
        """The dynamic tree of arXiv 2406.16858, section 4: expand, then re-rank.

        Level by level the `top_k` nodes of the greatest product of probabilities are expanded by
        their `top_k` candidates; of all candidates the best `num_drafts` are kept, a parent before
        its children where products are equal.
        """
        requests = len(self.roots)
        width = min(tree.top_k, self.drafter.config.draft_vocab_size or self.drafter.vocab_size)
        found = _Candidates(requests)
        tokens_RK, values_RK = self._scored(self.first.output, torch.zeros(requests, 1), width)
        found.add(tokens_RK, values_RK, torch.full((requests, tokens_RK.shape[1]), -1))
        frontier_RK = torch.arange(tokens_RK.shape[1]).expand(requests, -1)
        states_RPD, above = (
            self.first.state.view(requests, 1, -1),
            -torch.ones(requests, width).long(),
        )
        places_RK = torch.zeros_like(frontier_RK)
        for depth in range(1, tree.depth):
            tokens_RK = found.tokens_RC.gather(1, frontier_RK)
            values_RK = found.values_RC.gather(1, frontier_RK)
            index = places_RK.to(self.device)[..., None].expand(-1, -1, states_RPD.shape[-1])
            fed = states_RPD.gather(1, index).flatten(0, 1)
            first_slot = self.seen[0].shape[0]
            done = self._expand(tokens_RK, fed, above, depth)
            new_tokens, new_values = self._scored(done.output, values_RK, width)
            start = found.count
            parents_RC = frontier_RK.repeat_interleave(width, dim=1)
            found.add(new_tokens, new_values, parents_RC)
            best_RK = new_values.topk(min(width, new_values.shape[1]), dim=1).indices
            best_RK = best_RK.sort(dim=1).values
            frontier_RK, places_RK = start + best_RK, best_RK // width
            states_RPD = done.state.view(requests, len(tokens_RK[0]), -1)
            above = first_slot + places_RK
        return [found.tree(row, root, tree.num_drafts) for row, root in enumerate(self.roots)]

    def _expand(self, tokens_RP: Tensor, states_ND: Tensor, above_RP: Tensor, depth: int) -> Step:
        """Run P nodes of depth `depth` a request; `above_RP` the expanded node over each, or -1."""
        count = tokens_RP.shape[1]
        visible: list[Tensor | None] = []
        for row, seen in enumerate(self.seen):
            old = len(seen)
            grown = torch.zeros(old + count, old + count, dtype=torch.bool)
            grown[:old, :old] = seen
            for place, parent in enumerate(above_RP[row].tolist()):
                if parent >= 0:
                    grown[old + place] = grown[parent]
                grown[old + place, old + place] = True
            self.seen[row] = grown
            text = torch.ones(count, self.bases[row], dtype=torch.bool)
            visible.append(torch.cat([text, grown[old:]], dim=1).to(self.device))
        positions = [base - 1 + depth for base in self.bases for _ in range(count)]
        return self.drafter.nodes_step(
            tokens_RP.flatten().to(self.device),
            states_ND,
            positions,
            self.memories,
            [count] * len(self.roots),
            visible,
            depth,
        )

    def _candidates(self, output_ND: Tensor, count: int) -> Tensor:
        """The `count` best target ids [N, count]."""
        logits_NV = self.drafter.logits(output_ND)
        if count > logits_NV.shape[-1]:
            raise UserError(
                f"the tree asks for candidate {count - 1} of {logits_NV.shape[-1]} tokens; "
                "its ranks are too large"
            )
        if count == 1:
            # Of equal logits the lowest id, as every engine's argmax; topk leaves that open.
            return self.drafter.to_target(logits_NV.float().argmax(-1, keepdim=True))
        return self.drafter.to_target(logits_NV.float().topk(count, dim=-1).indices)

    def _drawn(self, output_ND: Tensor, count: int, budget: DraftBudget) -> tuple[Tensor, Tensor]:
        """`count` target ids [N, count] a node, drawn from its q [N, target vocabulary]."""
        assert budget.probs is not None
        logits_NV, vocab = self.drafter.logits(output_ND), self.drafter._vocab
        logits_NV = logits_NV if vocab is None else vocab.spread(logits_NV)
        probs_NV = budget.probs(logits_NV).cpu()
        return draw_children(probs_NV, count, budget.replacement, budget.generator), probs_NV

    def _scored(self, output_ND: Tensor, values_RP: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Candidates [R, P * width] with the sum of log-probabilities along their paths."""
        requests, parents = values_RP.shape
        logits_NV = self.drafter.logits(output_ND).float()
        values, ids = logits_NV.log_softmax(-1).topk(width, dim=-1)
        scores = values.cpu().view(requests, parents, width) + values_RP[..., None]
        return (
            self.drafter.to_target(ids).cpu().view(requests, -1),
            scores.view(requests, -1),
        )


class _Candidates:
    """What a dynamic tree may keep, [R, C]: tokens, values (log), parents (-1 is the root)."""

    def __init__(self, requests: int) -> None:
        empty = torch.zeros(requests, 0)
        self.tokens_RC, self.values_RC, self.parents_RC = empty.long(), empty, empty.long()

    @property
    def count(self) -> int:
        """How many there are a request."""
        return self.tokens_RC.shape[1]

    def add(self, tokens_RC: Tensor, values_RC: Tensor, parents_RC: Tensor) -> None:
        """Candidates of the next level."""
        self.tokens_RC = torch.cat([self.tokens_RC, tokens_RC.cpu()], dim=1)
        self.values_RC = torch.cat([self.values_RC, values_RC.cpu()], dim=1)
        self.parents_RC = torch.cat([self.parents_RC, parents_RC.cpu()], dim=1)

    def tree(self, row: int, root: int, num_drafts: int) -> TokenTree:
        """The best `num_drafts` of one request, a parent always before its children."""
        # Candidates lie level by level, so a stable sort keeps a parent ahead of an equal child.
        order = torch.argsort(self.values_RC[row], descending=True, stable=True)[:num_drafts]
        kept = sorted(order.tolist())
        number = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
        parents = self.parents_RC[row].tolist()
        shape = TreeShape((-1, *(number[parents[candidate]] for candidate in kept)))
        tokens = torch.cat([torch.tensor([root]), self.tokens_RC[row, kept]])
        values = torch.cat([torch.zeros(1), self.values_RC[row, kept]])
        return TokenTree(shape, tokens, confidences_N=values.exp())
