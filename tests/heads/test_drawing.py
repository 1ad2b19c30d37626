"""Drafts drawn at random: the law of siblings, and trees where a q has too few tokens."""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from heads.base import DraftBudget, drafter_class
from heads.drawing import NONE_LEFT, draw_children, drawn_tree, parent_rows
from heads.tree import TreeShape, chain
from infer.sampling import Sampling
from infer.target import TargetModel
from tests.heads.test_drafters import KINDS, PROMPT, depth_of, new_drafter, state_of

DRAWING = [kind for kind in KINDS if drafter_class(kind).can_sample]


def law_of_siblings(q: list[float], count: int, replacement: bool) -> dict[tuple[int, ...], float]:
    law = {}
    for tokens in itertools.product(range(len(q)), repeat=count):
        chance, left = 1.0, list(q)
        for token in tokens:
            chance *= left[token] / sum(left) if sum(left) else 0.0
            if not replacement:
                left[token] = 0.0
        if chance > 0:
            law[tokens] = chance
    return law


@pytest.mark.parametrize("replacement", [True, False])
def test_siblings_are_drawn_one_after_another(replacement: bool) -> None:
    q, draws = [0.5, 0.0, 0.3, 0.2], 20_000
    generator = torch.Generator().manual_seed(0)
    drawn = draw_children(torch.tensor(q).expand(draws, -1), 3, replacement, generator)
    counts = Counter(map(tuple, drawn.tolist()))
    law = law_of_siblings(q, 3, replacement)
    assert counts.keys() <= law.keys()
    for tokens, p in law.items():
        assert abs(counts[tokens] - draws * p) < 5 * (draws * p) ** 0.5, tokens


@pytest.mark.parametrize("q", [[0.0, 1.0, 0.0], [0.4, 0.6, 0.0], [1e-30, 1.0, 0.0]])
def test_without_replacement_nothing_is_drawn_from_nothing(q: list[float]) -> None:
    drawn = draw_children(torch.tensor([q]), 5, False, torch.Generator().manual_seed(0))[0]
    possible = sum(value > 0 for value in q)
    assert sorted(drawn[:possible].tolist()) == [t for t, value in enumerate(q) if value > 0]
    assert drawn[possible:].tolist() == [NONE_LEFT] * (5 - possible)


def test_a_tree_leaves_out_what_could_not_be_drawn_and_what_hangs_below() -> None:
    shape = TreeShape((-1, 0, 0, 1, 2, 1, 3, 4))
    tokens = torch.tensor([9, 5, NONE_LEFT, 6, 7, NONE_LEFT, 8, 4])
    assert parent_rows(shape) == 5
    q_NV = torch.arange(5.0)[:, None].expand(-1, 3)
    tree = drawn_tree(shape, tokens, q_NV)
    assert tree.shape == TreeShape((-1, 0, 1, 2))
    assert tree.tokens_N.tolist() == [9, 5, 6, 8]
    assert tree.draft_probs_NV is not None and tree.draft_probs_NV[:, 0].tolist() == [0, 1, 3]


def q_rows(tokens: Tensor, shape: TreeShape, q_NV: Tensor) -> dict[tuple[int, ...], Tensor]:
    return {
        tuple(tokens[shape.path(node)[1:]].tolist()): q_NV[node]
        for node in range(len(shape))
        if shape.children[node]
    }


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("replacement", [True, False])
def test_a_drawn_tree_comes_with_the_distribution_of_every_parent(
    replacement: bool, kind: str, draft_vocab_size: int | None, tiny_target: TargetModel
) -> None:
    drafter, sampling = new_drafter(kind, tiny_target, draft_vocab_size), Sampling(2.0, top_k=3)
    shape = TreeShape((-1, 0, 1, 1, 0, 4, 0, 0))
    generator = torch.Generator().manual_seed(0)
    state = state_of(drafter, tiny_target, list(PROMPT))
    budget = DraftBudget(shape, sampling.probs, generator, replacement)
    tree = drafter.propose(state, budget)
    tokens, q_NV = tree.tokens_N, tree.draft_probs_NV
    assert q_NV is not None and len(q_NV) <= parent_rows(shape)
    possible = len(shape.children[0]) if replacement else int((q_NV[0] > 0).sum())
    assert len(tree.shape.children[0]) == min(len(shape.children[0]), possible)
    for node, children in enumerate(tree.shape.children):
        drawn = tokens[list(children)].tolist()
        assert all(q_NV[node, token] > 0 for token in drawn)
        assert replacement or len(set(drawn)) == len(drawn)
    # The q after a path is that of a chain which took the same path.
    wanted, seen = q_rows(tokens, tree.shape, q_NV), 0
    for _ in range(12):
        line = chain(depth_of(drafter, 2))
        state = state_of(drafter, tiny_target, list(PROMPT))
        other = drafter.propose(state, DraftBudget(line, sampling.probs, generator))
        assert other.draft_probs_NV is not None
        for path, q_V in q_rows(other.tokens_N, line, other.draft_probs_NV).items():
            if path in wanted:
                seen += len(path)
                torch.testing.assert_close(q_V, wanted[path], rtol=1e-4, atol=1e-5)
    assert seen > 0
