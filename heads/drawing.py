"""Drafts drawn at random: the children of a node, and a tree of what could be drawn.

Shapes: P parents, K children of each, N tree nodes, V target vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.tree import TokenTree, TreeShape

NONE_LEFT = -1


def draw_children(
    probs_PV: Tensor, count: int, replacement: bool, generator: torch.Generator | None
) -> Tensor:
    """Tokens [P, count] (int64), drawn one after another from each row of q [P, V] on the CPU.

    Without replacement each is drawn from what the earlier ones left, NONE_LEFT where that is
    nothing: the order of q / Exp(1), largest first (arXiv 1903.06059, section 2.2).
    """
    if replacement or count == 1:
        return torch.multinomial(probs_PV, count, replacement=True, generator=generator)
    races_PV = torch.empty(probs_PV.shape, dtype=torch.float64).exponential_(generator=generator)
    best = (probs_PV / races_PV).topk(min(count, probs_PV.shape[-1]), dim=-1)
    drawn = best.indices.masked_fill(best.values == 0, NONE_LEFT)
    return F.pad(drawn, (0, count - drawn.shape[-1]), value=NONE_LEFT)


def drawn_tree(shape: TreeShape, tokens_N: Tensor, probs_NV: Tensor) -> TokenTree:
    """The tree without the nodes for which no token was left, and without what hangs below them."""
    missing_N = tokens_N == NONE_LEFT
    if not bool(missing_N.any()):
        return TokenTree(shape, tokens_N, probs_NV)
    kept = (~(shape.ancestors_NN & missing_N).any(1)).nonzero()[:, 0].tolist()
    number = {node: place for place, node in enumerate([-1, *kept], start=-1)}
    parents = tuple(number[shape.parents[node]] for node in kept)
    rows = [node for node in kept if node < len(probs_NV)]
    return TokenTree(TreeShape(parents), tokens_N[kept], probs_NV[rows])


def parent_rows(shape: TreeShape) -> int:
    """How many rows the q of a tree needs: up to the last node that has children."""
    return max(shape.parents) + 1
