"""The verification rules, proven by enumeration over every random choice they make."""

import itertools
import math
import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.sampling import Sampling
from infer.verdict import Choices, RandomChoices, TargetView, Verdict
from infer.verify import RULES, check_rule, rule_by_name, typical_threshold
from tests.infer.worlds import (
    ROOT_TOKEN,
    SHAPES,
    THREE_LEVELS,
    TWO_BY_TWO,
    Law,
    Text,
    VerdictLaw,
    World,
    assert_equals_ref,
    assert_same_law,
    draft_grown,
    draft_ranked,
    draft_sampled,
    emitted,
    logits_of,
    node_prefixes,
    one_round,
    outcomes,
    speculative_law,
    total_variation,
    verdicts,
    view,
)


def test_the_enumeration_covers_every_branch_once() -> None:
    def two_coins_or_a_die(choices: Choices) -> str:
        if choices.accept(0.25):
            return f"die {choices.draw(torch.tensor([0.5, 0.0, 0.5]))}"
        return f"coin {choices.accept(0.5)}"

    found = sorted(outcomes(two_coins_or_a_die))
    assert [name for name, _ in found] == ["coin False", "coin True", "die 0", "die 2"]
    assert [p for _, p in found] == [0.375, 0.375, 0.125, 0.125]


# The laws.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab_size", "length", "drafts"), [(3, 4, 3), (4, 4, 3), (8, 3, 2)])
def test_token_wise_rejection_emits_the_targets_joint_law(
    vocab_size: int, length: int, drafts: int, seed: int
) -> None:
    target = World(vocab_size, seed)
    drafter = World(vocab_size, seed + 100, near=target)
    found = speculative_law(RULES["token"], target, drafter, chain(drafts), length)
    assert_same_law(found, target.law(length))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} nodes")
@pytest.mark.parametrize(("vocab_size", "length"), [(3, 5), (5, 4), (8, 3)])
def test_topk_tree_emits_the_targets_joint_law(
    vocab_size: int, length: int, shape: TreeShape, seed: int
) -> None:
    target = World(vocab_size, seed)
    drafter = World(vocab_size, seed + 100, near=target)
    found = speculative_law(RULES["topk_tree"], target, drafter, shape, length)
    assert_same_law(found, target.law(length))


@pytest.mark.parametrize("seed", range(4))
def test_topk_tree_emits_the_targets_joint_law_along_the_drafters_own_trees(seed: int) -> None:
    target = World(4, seed)
    drafter = World(4, seed + 100, near=target)
    size = DynamicTree(5, depth=3, top_k=2)
    shapes = {draft_grown(size, drafter, prefix).shape for prefix in [(), (0,), (1,), (2,), (3,)]}
    assert len(shapes) > 1
    found = speculative_law(RULES["topk_tree"], target, drafter, size, 4)
    assert_same_law(found, target.law(4))


@pytest.mark.parametrize("seed", range(4))
def test_topk_tree_is_exact_for_a_drawn_chain_too(seed: int) -> None:
    target, drafter = World(4, seed), World(4, seed + 100)

    def run(choices: Choices) -> Text:
        tree = draft_sampled(chain(2), drafter, (), choices)
        return emitted(tree, RULES["topk_tree"].apply(tree, view(tree, target, ()), choices))

    found: Law = defaultdict(float)
    for text, p in outcomes(run):
        for rest, p_rest in target.law(3 - len(text), text).items():
            found[(*text, *rest)] += p * p_rest
    assert_same_law(found, target.law(3))


@pytest.mark.parametrize("rule", ["token", "topk_tree"])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, top_k=3), Sampling(0.9, top_p=0.8), Sampling(0.0)]
)
def test_the_law_is_the_truncated_targets_when_the_sampling_truncates(
    rule: str, sampling: Sampling
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits_NV = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    q_NV = sampling.probs(torch.randn(3, 6, generator=generator, dtype=torch.float64))

    def run(choices: Choices) -> int:
        tokens = [ROOT_TOKEN, choices.draw(q_NV[0]), choices.draw(q_NV[1])]
        tree = TokenTree(chain(2), torch.tensor(tokens), q_NV)
        return emitted(tree, RULES[rule].apply(tree, TargetView(logits_NV, sampling), choices))[0]

    found = [0.0] * 6
    for token, p in outcomes(run):
        found[token] += p
    assert found == pytest.approx(sampling.probs(logits_NV[0]).tolist(), abs=1e-12)


@pytest.mark.parametrize("shape", [chain(3), TWO_BY_TWO])
def test_typical_acceptance_changes_the_law_and_says_so(shape: TreeShape) -> None:
    rule = RULES["typical"]
    assert not rule.lossless and "lossy" in rule.describe
    distances = []
    for seed in range(4):
        target = World(5, seed)
        drafter = World(5, seed + 100, near=target)
        found = speculative_law(rule, target, drafter, shape, 3)
        assert sum(found.values()) == pytest.approx(1)
        distances.append(total_variation(found, target.law(3)))
    assert min(distances) > 0.02


def test_expected_accepted_drafts_are_those_of_the_paper() -> None:
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    target, drafter = World(2, 0), World(2, 1)
    for prefix in (t for n in range(3) for t in itertools.product(range(2), repeat=n)):
        target.tables[prefix], drafter.tables[prefix] = p, q
    accepted = sum(
        probability * (len(text) - 1)
        for text, probability in outcomes(
            lambda choices: one_round(RULES["token"], target, drafter, chain(2), (), choices)
        )
    )
    assert accepted == pytest.approx(10 / 9, abs=1e-12)


def test_a_drafter_equal_to_the_target_has_every_draft_accepted() -> None:
    target = World(5, 3)
    accepted = sum(
        probability
        for text, probability in outcomes(
            lambda choices: one_round(RULES["token"], target, target, chain(3), (), choices)
        )
        if len(text) == 4
    )
    assert accepted == pytest.approx(1, abs=1e-12)


# Each rule against its slow twin, written from the definition over plain floats: the law of
# (path, next token) for one given tree.


def verify_greedy_ref(shape: TreeShape, tokens: list[int], p: list[list[float]]) -> VerdictLaw:
    """The longest path on which every token is its parent's argmax."""
    argmax = [row.index(max(row)) for row in p]
    good = [
        shape.path(node)
        for node in range(len(shape))
        if all(tokens[n] == argmax[shape.parents[n]] for n in shape.path(node)[1:])
    ]
    path = max(good, key=len)
    return {(tuple(path), argmax[path[-1]]): 1.0}


def verify_token_ref(
    tokens: list[int], p: list[list[float]], q: list[list[float]], num_drafts: int
) -> VerdictLaw:
    """P(accept i drafts, then y) = (product of min(1, p/q)) * (1 - min(1, p/q)) * residual(y)."""
    law: VerdictLaw = defaultdict(float)
    reached = 1.0
    for i in range(num_drafts):
        x = tokens[i + 1]
        keep = min(1.0, p[i][x] / q[i][x])
        rest = [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
        for y, weight in enumerate(rest):
            if weight > 0:
                law[tuple(range(i + 1)), y] += reached * (1 - keep) * weight / sum(rest)
        reached *= keep
    for y, weight in enumerate(p[num_drafts]):
        law[tuple(range(num_drafts + 1)), y] += reached * weight
    return law


def verify_topk_tree_ref(shape: TreeShape, tokens: list[int], p: list[list[float]]) -> VerdictLaw:
    """Draw a token from p at the root; go to the first child that bears it, or stop there."""
    law: VerdictLaw = defaultdict(float)

    def visit(node: int, path: Text, reached: float) -> None:
        for token, weight in enumerate(p[node]):
            bearing = [child for child in shape.children[node] if tokens[child] == token]
            if bearing:
                visit(bearing[0], (*path, bearing[0]), reached * weight)
            else:
                law[path, token] += reached * weight

    visit(0, (0,), 1.0)
    return law


def verify_typical_ref(shape: TreeShape, tokens: list[int], p: list[list[float]]) -> VerdictLaw:
    """The longest path of typical tokens, then the likeliest; the next token from p."""

    def typical(node: int) -> bool:
        row = p[shape.parents[node]]
        entropy = -sum(x * math.log(x) for x in row if x > 0)
        return row[tokens[node]] > min(0.09, 0.3 * math.exp(-entropy))

    def likelihood(path: list[int]) -> float:
        return math.prod(p[a][tokens[b]] for a, b in itertools.pairwise(path))

    paths = [shape.path(node) for node in range(len(shape))]
    good = [path for path in paths if all(typical(node) for node in path[1:])]
    path = max(good, key=lambda path: (len(path), likelihood(path)))
    return {(tuple(path), token): weight for token, weight in enumerate(p[path[-1]])}


@pytest.mark.parametrize("rule", ["greedy", "topk_tree", "typical"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} nodes")
def test_tree_rules_equal_their_slow_twins(rule: str, shape: TreeShape) -> None:
    refs = {
        "greedy": (verify_greedy_ref, Sampling(0.0)),
        "topk_tree": (verify_topk_tree_ref, Sampling(1.0)),
        "typical": (verify_typical_ref, Sampling(1.0)),
    }
    ref, sampling = refs[rule]
    for seed in range(8):
        target, drafter = World(6, seed), World(6, seed + 100)
        tree = draft_ranked(shape, drafter, ())
        tokens = tree.tokens_N.tolist()
        p = [target.after(prefix) for prefix in node_prefixes(shape, tokens, ())]
        assert_equals_ref(rule, tree, logits_of(p), sampling, ref(shape, tokens, p))


@pytest.mark.parametrize("drafts", range(4))
def test_token_wise_rejection_equals_its_slow_twin(drafts: int) -> None:
    for seed in range(12):
        target = World(6, seed)
        drafter = World(6, seed + 100, near=target)
        choices = RandomChoices(torch.Generator().manual_seed(seed))
        tree = draft_sampled(chain(drafts), drafter, (), choices)
        tokens = tree.tokens_N.tolist()
        prefixes = node_prefixes(tree.shape, tokens, ())
        p, q = ([world.after(prefix) for prefix in prefixes] for world in (target, drafter))
        ref = verify_token_ref(tokens, p, q, drafts)
        assert_equals_ref("token", tree, logits_of(p), Sampling(1.0), ref)


@pytest.mark.parametrize("rule", ["greedy", "topk_tree", "typical"])
def test_siblings_with_the_same_token_do_no_harm(rule: str) -> None:
    shape, tokens = TreeShape((-1, 0, 0, 1, 2)), [0, 1, 1, 2, 0]
    p = [[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.3, 0.4, 0.3]]
    refs = {
        "greedy": verify_greedy_ref(shape, tokens, p),
        "topk_tree": verify_topk_tree_ref(shape, tokens, p),
        "typical": verify_typical_ref(shape, tokens, p),
    }
    tree = TokenTree(shape, torch.tensor(tokens))
    sampling = Sampling(0.0 if rule == "greedy" else 1.0)
    assert_equals_ref(rule, tree, logits_of(p), sampling, refs[rule])


# Greedy decoding.


class NoChoices:
    """Greedy verification has nothing to choose."""

    def accept(self, probability: float) -> bool:
        raise AssertionError("greedy verification asked for randomness")

    def draw(self, probs_V: Tensor) -> int:
        raise AssertionError("greedy verification asked for randomness")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} nodes")
@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_is_argmax_decoding_with_ties_to_the_lowest_id(
    shape: TreeShape, seed: int
) -> None:
    def logits_after(prefix: Text) -> list[float]:
        rng = random.Random(f"{seed} {prefix[-2:]}")
        return [float(rng.randrange(3)) for _ in range(5)]

    expected: Text = ()
    for _ in range(20):
        row = logits_after(expected)
        expected = (*expected, row.index(max(row)))
    text: Text = ()
    accepted = 0
    drafter = World(5, seed)
    while len(text) < 20:
        tree = draft_ranked(shape, drafter, text[-3:])
        tokens = tree.tokens_N.tolist()
        logits_NV = torch.tensor([logits_after(t) for t in node_prefixes(shape, tokens, text)])
        verdict = RULES["greedy"].apply(tree, TargetView(logits_NV, Sampling()), NoChoices())
        accepted += len(verdict.path) - 1
        text += emitted(tree, verdict)
    assert text[:20] == expected
    assert len(shape) <= 4 or accepted > 0


@pytest.mark.parametrize("rule", ["token", "topk_tree", "typical"])
def test_at_temperature_zero_every_rule_becomes_greedy_verification(rule: str) -> None:
    greedy = Sampling(0.0)
    generator = torch.Generator().manual_seed(1)
    for shape in [chain(3)] if rule == "token" else SHAPES:
        for _ in range(10):
            logits_NV = torch.randint(0, 4, (len(shape), 4), generator=generator).double()
            tokens = torch.randint(0, 4, (len(shape),), generator=generator)
            q_NV = torch.zeros(len(shape), 4)
            q_NV[range(len(shape) - 1), tokens[1:]] = 1.0
            tree = TokenTree(shape, tokens, q_NV if rule == "token" else None)
            target = TargetView(logits_NV, greedy)
            wanted = RULES["greedy"].apply(tree, target, NoChoices())
            found = verdicts(rule, tree, target)
            assert [p for _, p in found] == [1.0]
            assert emitted(tree, found[0][0]) == emitted(tree, wanted)


# What a rule sees and what it may not do.


def test_rejected_node_prunes_its_subtree() -> None:
    # Node 3 bears the target's token, but its parent, node 1, does not.
    tree = TokenTree(TreeShape((-1, 0, 0, 1)), torch.tensor([0, 1, 2, 3]))
    logits_NV = torch.eye(5)[[2, 3, 4, 0]]
    verdict = RULES["greedy"].apply(tree, TargetView(logits_NV, Sampling()), NoChoices())
    assert verdict == Verdict(path=(0, 2), next_token=4)


def test_probabilities_are_computed_for_visited_nodes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = TreeShape((-1, 0, 0, 1, 2))
    tree = TokenTree(shape, torch.tensor([0, 1, 2, 3, 4]))
    logits_NV = torch.log(torch.eye(6)[[2, 0, 5, 0, 0]])
    seen: list[Tensor] = []
    real = Sampling.probs

    def counted(sampling: Sampling, logits: Tensor) -> Tensor:
        seen.append(logits)
        return real(sampling, logits)

    monkeypatch.setattr(Sampling, "probs", counted)
    choices = RandomChoices(torch.Generator().manual_seed(0))
    verdict = RULES["topk_tree"].apply(tree, TargetView(logits_NV, Sampling(1.0)), choices)
    assert verdict == Verdict(path=(0, 2), next_token=5)
    assert [logits.shape for logits in seen] == [(6,), (6,)]


def test_no_rule_changes_what_it_was_given() -> None:
    p_NV = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q_NV = torch.tensor([[0.1, 0.8, 0.1], [0.4, 0.3, 0.3]], dtype=torch.float64)
    tree = TokenTree(chain(1), torch.tensor([0, 1]), q_NV.clone())
    target = TargetView(p_NV.log(), Sampling(1.0))
    before = [target.probs(0).clone(), target.probs(1).clone()]
    for rule in RULES:
        verdicts(rule, tree, target)
    assert torch.equal(torch.stack(before), torch.stack([target.probs(0), target.probs(1)]))
    assert tree.draft_probs_NV is not None and torch.equal(tree.draft_probs_NV, q_NV)


def test_the_paths_of_a_verdict_start_at_the_root_and_follow_parents() -> None:
    for rule in ("greedy", "topk_tree", "typical"):
        target, drafter = World(5, 7), World(5, 8)
        tree = draft_ranked(THREE_LEVELS, drafter, ())
        for verdict, _ in verdicts(rule, tree, view(tree, target, ())):
            assert list(verdict.path) == THREE_LEVELS.path(verdict.path[-1])


def test_token_wise_rejection_takes_a_root_alone_without_probabilities() -> None:
    tree = TokenTree(chain(0), torch.tensor([3]))
    target = TargetView(torch.tensor([[-math.inf, 0.0]]), Sampling(1.0))
    choices = RandomChoices(torch.Generator().manual_seed(0))
    assert RULES["token"].apply(tree, target, choices) == Verdict((0,), 1)


def test_rejection_without_a_residual_draws_from_the_target() -> None:
    # p sums to a little less than q does: no token has p above q, yet a draft can be rejected.
    class Reject:
        def accept(self, probability: float) -> bool:
            return False

        def draw(self, probs_V: Tensor) -> int:
            assert bool(torch.isfinite(probs_V).all())
            return int(probs_V.argmax())

    q_NV = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    tree = TokenTree(chain(1), torch.tensor([0, 1]), q_NV * (1 + 1e-6))
    target = TargetView(q_NV.log(), Sampling(1.0))
    assert RULES["token"].apply(tree, target, Reject()) == Verdict((0,), 1)
    sure = TokenTree(chain(1), torch.tensor([0, 1]))
    target = TargetView(torch.tensor([[-math.inf, 0.0], [0.0, 0.0]]), Sampling(1.0))
    assert RULES["topk_tree"].apply(sure, target, Reject()) == Verdict((0,), 1)


def test_the_law_stays_close_in_float32_over_a_wide_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(2, 2_000, generator=generator) * 4
    q_NV = (logits_NV + torch.randn(2, 2_000, generator=generator)).softmax(-1)
    p_V = logits_NV[0].double().softmax(-1)
    found = torch.zeros(2_000, dtype=torch.float64)

    class RejectAndNote:
        """Rejects every draft, and notes how likely it was kept and what would follow it."""

        kept = 0.0
        rest_V = torch.empty(0)

        def accept(self, probability: float) -> bool:
            self.kept = probability
            return False

        def draw(self, probs_V: Tensor) -> int:
            self.rest_V = probs_V.double()
            return 0

    for token, q in enumerate(q_NV[0].tolist()):
        noted = RejectAndNote()
        tree = TokenTree(chain(1), torch.tensor([0, token]), q_NV)
        RULES["token"].apply(tree, TargetView(logits_NV, Sampling(1.0)), noted)
        found[token] += q * noted.kept
        found += q * (1 - noted.kept) * noted.rest_V / noted.rest_V.sum()
    assert float((found - p_V).abs().sum()) / 2 < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_lowest_id_among_ties(dtype: torch.dtype) -> None:
    logits_NV = torch.zeros(3, 1000, dtype=dtype)
    logits_NV[1, [17, 400, 999]] = 2.0
    logits_NV[2, 999] = 1.0
    target = TargetView(logits_NV, Sampling())
    assert [target.argmax(node) for node in range(3)] == [0, 17, 999]
    assert [int(target.probs(node).argmax()) for node in range(3)] == [0, 17, 999]


# Typical acceptance.


def test_typical_threshold_falls_with_the_entropy() -> None:
    certain = torch.tensor([1.0, 0.0, 0.0])
    flat = torch.full((1000,), 0.001)
    assert typical_threshold(certain) == pytest.approx(0.09)
    assert typical_threshold(flat) == pytest.approx(0.3 / 1000)


def test_the_same_probability_is_typical_in_a_flat_law_only() -> None:
    flat, peaked = [0.07, *[0.186] * 5], [0.07, 0.93, 0.0, 0.0, 0.0, 0.0]
    tree = TokenTree(chain(1), torch.tensor([5, 0]))
    choices = RandomChoices(torch.Generator().manual_seed(0))
    paths = []
    for row in (flat, peaked):
        target = TargetView(logits_of([row, row]), Sampling(1.0))
        paths.append(RULES["typical"].apply(tree, target, choices).path)
    assert paths == [(0, 1), (0,)]


def test_typical_acceptance_prefers_the_longer_path_then_the_likelier() -> None:
    p = [[0.1, 0.6, 0.3], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.2, 0.2, 0.6]]
    longer = TokenTree(TreeShape((-1, 0, 0, 2)), torch.tensor([0, 1, 2, 0]))
    likelier = TokenTree(TreeShape((-1, 0, 0)), torch.tensor([0, 2, 1]))
    choices = RandomChoices(torch.Generator().manual_seed(0))
    target = TargetView(logits_of(p), Sampling(1.0))
    assert RULES["typical"].apply(longer, target, choices).path == (0, 2, 3)
    assert RULES["typical"].apply(likelier, target, choices).path == (0, 2)


# Random choices.


def test_random_choices_repeat_with_the_seed_and_keep_the_probabilities() -> None:
    def run(seed: int) -> list[int]:
        choices = RandomChoices(torch.Generator().manual_seed(seed))
        probs_V = torch.tensor([0.2, 0.0, 0.5, 0.3])
        return [choices.draw(probs_V) + 4 * choices.accept(0.25) for _ in range(4000)]

    first = run(0)
    assert first == run(0) and first != run(1)
    shares = [sum(value % 4 == token for value in first) / 4000 for token in range(4)]
    assert shares == pytest.approx([0.2, 0.0, 0.5, 0.3], abs=0.03) and shares[1] == 0
    assert sum(value >= 4 for value in first) / 4000 == pytest.approx(0.25, abs=0.03)


def test_what_is_impossible_never_happens_and_what_is_certain_always_does() -> None:
    choices = RandomChoices(torch.Generator().manual_seed(0))
    assert not any(choices.accept(0.0) for _ in range(500))
    assert all(choices.accept(1.0) for _ in range(500))


# Names and fitness.


def test_rules_are_found_by_name_and_an_unknown_one_names_the_nearest() -> None:
    assert sorted(RULES) == [
        *("block", "greedy", "recursive_with", "recursive_without"),
        *("token", "topk_tree", "traversal", "typical"),
    ]
    for name, rule in RULES.items():
        assert rule.name == name and rule_by_name(name) is rule
    with pytest.raises(UserError, match="did you mean 'topk_tree'"):
        rule_by_name("topk-tree")
    with pytest.raises(UserError, match="did you mean 'recursive_without'"):
        rule_by_name("recursive-without")


def test_only_typical_acceptance_is_labelled_lossy() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical"]


@pytest.mark.parametrize(
    ("rule", "sampling", "shape", "has_probs", "complaint"),
    [
        (
            "greedy",
            Sampling(0.7),
            chain(3),
            True,
            r"temperature 0\.7 .* token, block, .*typical",
        ),
        (
            "token",
            Sampling(0.7),
            TWO_BY_TWO,
            True,
            r"chains only, .* 7 nodes; use one of: recursive_with, recursive_without, trav",
        ),
        ("block", Sampling(0.7), TWO_BY_TWO, False, r"chains only, .* 7 nodes; use one of: topk_"),
        (
            "block",
            Sampling(0.7),
            chain(2),
            False,
            r"probabilities, this drafter gives none here; .*top",
        ),
        ("recursive_with", Sampling(0.7), TWO_BY_TWO, False, r"with their prob.* one of: topk_tr"),
        ("traversal", Sampling(0.7), DynamicTree(9), True, r"at random, .* use one of: topk_tree"),
        (
            "token",
            Sampling(0.7),
            chain(3),
            False,
            r"with their probabilities, .* typical \(lossy\)",
        ),
        ("token", Sampling(0.0), chain(3), False, r"probabilities, .* use one of: greedy, topk_"),
        ("token", Sampling(0.7), DynamicTree(60), True, r"chains only, given a dynamic tree of 60"),
        ("token", Sampling(0.7), DynamicTree(5, 6, 1), True, r"at random, those of a dynamic tree"),
    ],
)
def test_a_rule_that_does_not_fit_names_those_that_do(
    rule: str,
    sampling: Sampling,
    shape: TreeShape | DynamicTree,
    has_probs: bool,
    complaint: str,
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        check_rule(RULES[rule], sampling, shape, has_probs)
    assert rule not in str(error.value).split("use one of: ")[1].split(", ")


def test_rules_that_fit_pass() -> None:
    check_rule(RULES["greedy"], Sampling(), TWO_BY_TWO, False)
    check_rule(RULES["token"], Sampling(1.0), chain(3), True)
    check_rule(RULES["block"], Sampling(1.0), chain(3), True)
    for rule in ("recursive_with", "recursive_without", "traversal"):
        check_rule(RULES[rule], Sampling(1.0), TWO_BY_TWO, True)
        check_rule(RULES[rule], Sampling(0.0), chain(3), True)
    check_rule(RULES["topk_tree"], Sampling(1.0), TWO_BY_TWO, False)
    check_rule(RULES["typical"], Sampling(0.5), TWO_BY_TWO, False)
    check_rule(RULES["topk_tree"], Sampling(), chain(3), False)
    check_rule(RULES["topk_tree"], Sampling(1.0), DynamicTree(60), False)
    check_rule(RULES["greedy"], Sampling(), DynamicTree(60), False)
