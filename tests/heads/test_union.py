"""A lookup and a drafter in one tree. The drafters' kinds are taken from the folder."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from heads.base import DraftBudget, Drafter, DraftState, drafter_class, drafter_kinds
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain, cut
from heads.union import Union, merged
from infer.loop import GenerationSettings, rule_for, speculative_generate
from infer.sampling import Sampling
from infer.target import TargetModel
from tests.heads.test_drafters import new_drafter, state_of
from tests.infer.test_loop import PROMPT, exact_law

FREE = [kind for kind in drafter_kinds() if not drafter_class(kind).trainable]
LEARNED = [kind for kind in drafter_kinds() if drafter_class(kind).trainable]
GROWS = [kind for kind in LEARNED if drafter_class(kind).can_grow]
TREE = TreeShape((-1, 0, 0, 1, 1, 2, 3))
NEW = list(range(20, 40))
REPEATED = [1, *[20, 21, 22, 23, 24, 25, 26] * 4, 20, 21, 22]


def union_of(
    lookup: str, learned: str, target: TargetModel, accuracies: Any = None
) -> tuple[Union, Drafter]:
    drafter = new_drafter(learned, target)
    size = target.identity.vocab_size
    union = Union(new_drafter(lookup, target), drafter, size, accuracies)
    union.bind(target.shared)
    return union.eval(), drafter


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], int]:
    tokens = tree.tokens_N.tolist()
    return {tuple(tokens[n] for n in tree.shape.path(node)): node for node in range(len(tokens))}


def random_tree(draw: random.Random, size: int) -> tuple[TokenTree, list[float]]:
    """Distinct siblings; values that fall along every path."""
    parents, tokens, values = [-1], [9], [1.0]
    while len(parents) < size:
        parent, token = draw.randrange(len(parents)), draw.randrange(4)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
            values.append(values[parent] * draw.choice([1.0, 0.5, draw.random()]))
    return TokenTree(TreeShape(tuple(parents)), torch.tensor(tokens)), values


@pytest.mark.parametrize("seed", range(50))
def test_the_merged_trees_paths_are_exactly_the_union(seed: int) -> None:
    draw = random.Random(seed)
    one, one_values = random_tree(draw, draw.randrange(1, 9))
    two, two_values = random_tree(draw, draw.randrange(1, 9))
    both = merged(one, two, one_values, two_values, 99)
    ours = paths_of(both)
    assert set(ours) == set(paths_of(one)) | set(paths_of(two))
    assert len(ours) == len(both.shape), "no path twice"
    assert both.confidences_N is not None
    for path, node in ours.items():
        found = [
            values[paths_of(tree)[path]]
            for tree, values in ((one, one_values), (two, two_values))
            if path in paths_of(tree)
        ]
        assert float(both.confidences_N[node]) == pytest.approx(max(found))


@pytest.mark.parametrize("seed", range(50))
def test_a_budget_keeps_the_nodes_of_the_greatest_values(seed: int) -> None:
    draw = random.Random(seed)
    one, one_values = random_tree(draw, 8)
    two, two_values = random_tree(draw, 8)
    whole = merged(one, two, one_values, two_values, 99)
    assert whole.confidences_N is not None
    values = sorted(whole.confidences_N.tolist()[1:], reverse=True)
    for size in range(1, len(whole.shape) + 1):
        kept = merged(one, two, one_values, two_values, size)
        assert len(kept.shape) == size
        assert set(paths_of(kept)) <= set(paths_of(whole))
        assert kept.confidences_N is not None
        assert sorted(kept.confidences_N.tolist()[1:], reverse=True) == values[: size - 1]


def test_a_cut_shape_keeps_what_is_not_deeper() -> None:
    assert cut(TreeShape((-1, 0, 0, 1, 3, 2)), 2) == TreeShape((-1, 0, 0, 1, 2))
    assert cut(chain(5), 2) == chain(2)
    assert cut(TreeShape((-1, 0, 0, 2), (0, 3, 1, 2)), 1).ranks == (0, 3, 1)


@pytest.mark.parametrize("lookup", FREE)
@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("shape", [chain(3), TREE], ids=["chain", "tree"])
def test_where_the_lookup_finds_nothing_the_tree_is_the_drafters(
    lookup: str, learned: str, shape: TreeShape, tiny_target: TargetModel
) -> None:
    union, drafter = union_of(lookup, learned, tiny_target)
    ours = union.propose(state_of(drafter, tiny_target, NEW), DraftBudget(shape))
    alone = drafter.propose(state_of(drafter, tiny_target, NEW), DraftBudget(shape))
    assert ours.shape == alone.shape
    assert ours.tokens_N.tolist() == alone.tokens_N.tolist()


@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("shape", [TREE, DynamicTree(12, 3, 4)], ids=["static", "dynamic"])
def test_the_trees_paths_are_the_lookups_and_the_drafters(
    learned: str, shape: TreeShape | DynamicTree, tiny_target: TargetModel
) -> None:
    union, drafter = union_of("suffix", learned, tiny_target)
    if isinstance(shape, DynamicTree) and not union.can_grow:
        pytest.skip("this kind does not shape trees")
    size = len(shape) - 1
    ours = union.propose(state_of(drafter, tiny_target, REPEATED), DraftBudget(shape))
    alone = drafter.propose(state_of(drafter, tiny_target, REPEATED), DraftBudget(shape))
    found = new_drafter("suffix", tiny_target).propose(
        DraftState(list(REPEATED)), DraftBudget(DynamicTree(size, size, size))
    )
    assert len(ours.shape) == len(shape), "the whole budget is used"
    assert set(paths_of(ours)) <= set(paths_of(alone)) | set(paths_of(found))
    assert tuple(REPEATED[-1:] + REPEATED[4:10]) in paths_of(ours), "deeper than the shape"
    assert ours.shape.depth > shape.depth


def test_a_chain_is_the_lookups_where_that_promises_more(tiny_target: TargetModel) -> None:
    weak, strong = [[0.05]], [[1.0]]
    for rates, from_lookup in ((weak, True), (strong, False)):
        union, drafter = union_of("suffix", LEARNED[0], tiny_target, rates)
        depth = drafter.max_depth or 3
        ours = union.propose(state_of(drafter, tiny_target, REPEATED), DraftBudget(chain(depth)))
        alone = drafter.propose(state_of(drafter, tiny_target, REPEATED), DraftBudget(chain(depth)))
        text = REPEATED[4 : 4 + depth]
        expected = text if from_lookup else alone.tokens_N[1:].tolist()
        assert ours.tokens_N[1:].tolist() == expected


@pytest.mark.parametrize("learned", LEARNED)
def test_a_chain_may_be_longer_than_the_drafter_can_draft(
    learned: str, tiny_target: TargetModel
) -> None:
    union, drafter = union_of("suffix", learned, tiny_target)
    tree = union.propose(state_of(drafter, tiny_target, REPEATED), DraftBudget(chain(9)))
    assert tree.tokens_N.tolist() == [*REPEATED[-1:], *[23, 24, 25, 26, 20, 21, 22, 23, 24]]
    new = union.propose(state_of(drafter, tiny_target, NEW), DraftBudget(chain(9)))
    assert new.shape == chain(min(9, drafter.max_depth or 9))


@pytest.mark.parametrize("lookup", FREE)
@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("shape", [chain(5), TREE, DynamicTree(8, 3, 3)], ids=str)
def test_greedy_text_is_the_targets_over_many_rounds(
    lookup: str, learned: str, shape: TreeShape | DynamicTree, tiny_target: TargetModel
) -> None:
    """Prompts that repeat and prompts that do not; random tiny models soon fall into loops."""
    union, _ = union_of(lookup, learned, tiny_target, [[0.02, 0.01]])
    if isinstance(shape, DynamicTree) and not union.can_grow:
        pytest.skip("this kind does not shape trees")
    settings = GenerationSettings(max_new_tokens=50, shape=shape)
    accepted = 0
    for start in range(4):
        for prompt in ([1, 30 + start, 40, 41, 30 + start, 40], NEW[start:], [1, 20 + start] * 9):
            plain = speculative_generate(tiny_target, None, prompt, settings)
            ours = speculative_generate(tiny_target, union, prompt, settings)
            assert ours.tokens == plain.tokens
            assert ours.drafted <= ours.rounds * (len(shape) - 1)
            accepted += ours.accepted
    assert accepted > 20, "not only rejected drafts are tested"


@pytest.mark.parametrize("learned", LEARNED)
def test_the_drafter_remembers_the_rounds_in_which_it_drafted_nothing(
    learned: str, tiny_target: TargetModel
) -> None:
    """After lookup rounds its proposal is that of a drafter that reads the text at once."""
    union, drafter = union_of("suffix", learned, tiny_target, [[0.3]])
    state = state_of(drafter, tiny_target, REPEATED)
    tokens, took = list(REPEATED), 0
    for more in ([23, 24, 25], [26, 20], [21, 22, 23, 24], [60], [61, 62]):
        tree = union.propose(state, DraftBudget(chain(3)))
        took += tree.tokens_N[1:].tolist()[:1] == more[:1]
        done, tokens = len(tokens), [*tokens, *more]
        whole = state_of(drafter, tiny_target, tokens)
        state.tokens = tokens
        state.hidden_TD = whole.hidden_TD[done - 1 :] if whole.hidden_TD is not None else None
        if whole.captured_TAD is not None:
            state.captured_TAD = whole.captured_TAD[done - 1 :]
    assert took >= 3, "the lookup drafted"
    ours = union.propose(state, DraftBudget(chain(3)))
    fresh = drafter.propose(state_of(drafter, tiny_target, tokens), DraftBudget(chain(3)))
    assert ours.tokens_N.tolist() == fresh.tokens_N.tolist()


@pytest.mark.parametrize("rule", ["token", "topk_tree"])
def test_sampled_text_has_the_targets_distribution(rule: str, tiny_target: TargetModel) -> None:
    """A prompt in which the lookup finds something, rates at which both draft (chi-square)."""
    sampling = Sampling(0.3, top_k=4)
    learned = next(kind for kind in LEARNED if drafter_class(kind).can_sample)
    union, _ = union_of("suffix", learned, tiny_target, [[0.1, 0.05]])
    shape = chain(2) if rule == "token" else TreeShape((-1, 0, 0, 1))
    prompt, draws = [*PROMPT, *PROMPT, *PROMPT[:-1]], 600
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        settings = GenerationSettings(3, sampling, rule, shape, seed)
        counts[tuple(speculative_generate(tiny_target, union, prompt, settings).tokens)] += 1
    law = exact_law(tiny_target, sampling, 3, prompt)
    assert set(counts) <= set(law)
    statistic = sum((counts[k] - draws * p) ** 2 / (draws * p) for k, p in law.items())
    freedom = len(law) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8, (statistic, freedom)


def test_a_lookups_chain_comes_with_its_true_distribution(tiny_target: TargetModel) -> None:
    learned = next(kind for kind in LEARNED if drafter_class(kind).can_sample)
    union, drafter = union_of("suffix", learned, tiny_target, [[0.1]])
    budget = DraftBudget(chain(2), Sampling(1.0).probs, torch.Generator().manual_seed(0))
    tree = union.propose(state_of(drafter, tiny_target, REPEATED), budget)
    assert tree.draft_probs_NV is not None
    assert tree.draft_probs_NV.shape == (3, tiny_target.identity.vocab_size)
    assert tree.draft_probs_NV[:2].argmax(-1).tolist() == tree.tokens_N[1:].tolist()
    assert tree.draft_probs_NV[:2].sum(-1).tolist() == [1.0, 1.0]


def test_trees_are_not_drawn_at_random(tiny_target: TargetModel) -> None:
    union, drafter = union_of("suffix", LEARNED[0], tiny_target)
    budget = DraftBudget(TREE, Sampling(1.0).probs, torch.Generator())
    with pytest.raises(UserError, match=r"draws no trees at random; use a chain .* topk_tree"):
        union.propose(state_of(drafter, tiny_target, REPEATED), budget)
    settings = GenerationSettings(4, Sampling(1.0), "traversal", TREE)
    with pytest.raises(UserError, match=r"gives none here; use one of: topk_tree"):
        rule_for(settings, union)


def test_a_deep_path_keeps_clear_of_the_contexts_end(make_model: Any, make_tokenizer: Any) -> None:
    target = TargetModel(make_model(max_position_embeddings=40), make_tokenizer(), "short")
    union, _ = union_of("suffix", LEARNED[0], target)
    wide = TreeShape((-1, *[0] * 12))
    prompt = [1, *[20, 21, 22] * 6]
    settings = GenerationSettings(max_new_tokens=99, shape=wide)
    plain = speculative_generate(target, None, prompt, settings)
    assert speculative_generate(target, union, prompt, settings).tokens == plain.tokens
