"""Token trees: what every drafter proposes and every verifier reads.

Node 0 is the root: the last committed token, which the target has not processed yet. Every
other node is a draft token; `parents[i] < i`. A chain is a tree of width 1.

Shapes: N nodes (root included), V target vocabulary.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from heads.errors import UserError


@dataclass(frozen=True)
class TreeShape:
    """The topology of a token tree.

    `parents[0]` is -1. `ranks[i]` says which of its parent's candidates node i is (0 is the
    drafter's first choice). Derived once: `depths` (root 0), `children`, and `ancestors_NN`,
    where [i, j] is true when j is i or an ancestor of i: row i is what node i may attend to.

        parents (-1, 0, 0, 1):  depths (0, 1, 1, 2), node 3 sees nodes 0, 1, 3
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(init=False, compare=False)
    children: tuple[tuple[int, ...], ...] = field(init=False, compare=False)
    ancestors_NN: Tensor = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the parents and derive what follows from them."""
        if not self.parents or self.parents[0] != -1:
            raise UserError(
                f"a tree starts with one root of parent -1, given parents {self.parents[:4]}"
            )
        depths, children = [0], [[] for _ in self.parents]  # type: tuple[list[int], list[list[int]]]
        ancestors = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise UserError(
                    f"tree node {node} has parent {parent}: a parent comes before its child "
                    "and there is one root (no cycles, no second root)"
                )
            depths.append(depths[parent] + 1)
            children[parent].append(node)
            ancestors[node] |= ancestors[parent]
        ranks = self.ranks or tuple(
            0 if node == 0 else children[self.parents[node]].index(node)
            for node in range(len(self.parents))
        )
        if min(ranks) < 0:
            raise UserError(f"tree ranks start at 0, given {min(ranks)}")
        if len(ranks) != len(self.parents):
            raise UserError(f"{len(ranks)} ranks given for a tree of {len(self.parents)} nodes")
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "children", tuple(tuple(c) for c in children))
        object.__setattr__(self, "ancestors_NN", ancestors)

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The greatest depth: how many draft tokens the longest path holds."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """Nodes from the root (included) down to `node` (included)."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]


@lru_cache(maxsize=256)
def chain(num_speculative_tokens: int) -> TreeShape:
    """A chain of `num_speculative_tokens` drafts below the root."""
    if num_speculative_tokens < 0:
        raise UserError(
            f"a chain of {num_speculative_tokens} drafts was asked for; expected 0 or more"
        )
    return TreeShape(tuple(range(-1, num_speculative_tokens)))


@lru_cache(maxsize=256)
def cut(shape: TreeShape, depth: int) -> TreeShape:
    """The nodes of a depth of `depth` at most."""
    kept = [node for node in range(len(shape)) if shape.depths[node] <= depth]
    number = {-1: -1} | {node: index for index, node in enumerate(kept)}
    return TreeShape(
        tuple(number[shape.parents[node]] for node in kept),
        tuple(shape.ranks[node] for node in kept),
    )


@dataclass(frozen=True)
class DynamicTree:
    """A tree that the drafter shapes anew every round by its own confidence (arXiv 2406.16858).

    Level by level the `top_k` likeliest nodes are expanded by their `top_k` candidates, down to
    `depth`; of all nodes the `num_drafts` with the greatest product of probabilities are kept.
    """

    num_drafts: int
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        """All at least 1, and no more drafts than the levels can hold."""
        if min(self.num_drafts, self.depth, self.top_k) < 1:
            raise UserError(
                f"a dynamic tree of {self.num_drafts} drafts, depth {self.depth}, top-k "
                f"{self.top_k} was asked for; expected at least 1 each"
            )
        possible = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_drafts > possible:
            raise UserError(
                f"a dynamic tree of {self.num_drafts} drafts was asked for; depth {self.depth} "
                f"and top-k {self.top_k} give {possible} candidates at most"
            )

    def __str__(self) -> str:
        """For people."""
        return f"dynamic tree of {self.num_drafts} (depth {self.depth}, top-k {self.top_k})"

    def __len__(self) -> int:
        """Number of nodes at most, root included."""
        return self.num_drafts + 1

    @property
    def is_chain(self) -> bool:
        """Whether no node can have two children."""
        return self.top_k == 1


@dataclass(frozen=True)
class TokenTree:
    """A proposal: the shape, `tokens_N` (int64, on the CPU; node 0 the root), and `draft_probs_NV`.

    Row i of `draft_probs_NV` is q, the distribution that the children of node i were drawn
    from (rows of leaves are never read). None says that the drafts are deterministic.
    `confidences_N` (float32, on the CPU) is how likely the drafter holds the whole path down to
    each node, the root's 1; None where it does not say. No rule reads it.
    """

    shape: TreeShape
    tokens_N: Tensor
    draft_probs_NV: Tensor | None = None
    confidences_N: Tensor | None = None

    def __post_init__(self) -> None:
        """Tokens fit the shape."""
        assert self.tokens_N.shape == (len(self.shape),), (self.tokens_N.shape, len(self.shape))
