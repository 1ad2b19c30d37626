"""Rules over drafts drawn at random: their laws by enumeration, and what they keep."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from heads.tree import TokenTree, TreeShape, chain
from infer import rejection
from infer.sampling import Sampling
from infer.verdict import Choices, RandomChoices, TargetView, Verdict
from infer.verify import RULES, Rule
from tests.infer.worlds import (
    SHAPES,
    TWO_BY_TWO,
    Law,
    Text,
    VerdictLaw,
    World,
    assert_equals_ref,
    assert_same_law,
    draft_ranked,
    draft_sampled,
    emitted,
    logits_of,
    node_prefixes,
    outcomes,
    verdicts,
    view,
)

# Numbered depth first, which no rule and no drafter may take for granted not to happen.
THREE_DEEP = TreeShape((-1, 0, 1, 2, 1, 0, 5))
PAIRS = range(20)
CHAIN_RULES = ["token", "block", "recursive_with", "recursive_without", "traversal"]
TREE_RULES = ["recursive_with", "recursive_without", "traversal"]
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless and not rule.greedy_only]
CASES = [
    (name, shape)
    for name in LOSSLESS
    for shape in (chain(3), TWO_BY_TWO, THREE_DEEP)
    if shape.is_chain or not RULES[name].chains_only
]


def pair(seed: int) -> tuple[World, World]:
    """p and q of three tokens, or of four; some of their rows have zeros, some are one-hots."""
    target = World(4 if seed % 4 == 3 else 3, seed)
    return target, World(target.vocab_size, seed + 100, near=target)


def round_law(rule: Rule, target: World, drafter: World, shape: TreeShape) -> tuple[Law, float]:
    """One round's joint law, continued with the target up to depth + 1 tokens; tokens expected."""

    def draft(choices: Choices) -> TokenTree:
        if rule.needs_draft_probs:
            return draft_sampled(shape, drafter, (), choices, rule.replacement)
        return draft_ranked(shape, drafter, ())

    law: Law = defaultdict(float)
    expected = 0.0
    for tree, p_tree in outcomes(draft):
        seen = view(tree, target, ())
        for verdict, p_verdict in verdicts(rule.name, tree, seen):
            text = emitted(tree, verdict)
            expected += p_tree * p_verdict * len(text)
            for rest, p_rest in target.law(shape.depth + 1 - len(text), text).items():
                law[(*text, *rest)] += p_tree * p_verdict * p_rest
    return law, expected


@cache
def found(name: str, shape: TreeShape, seed: int) -> tuple[Law, float]:
    return round_law(RULES[name], *pair(seed), shape)


def test_the_pairs_hold_zeros_and_one_hots() -> None:
    rows = [w.after(t) for s in PAIRS for w in pair(s) for t in [(), (0,), (1,)]]
    assert sum(max(row) == 1 for row in rows) > 10
    assert sum(0 in row and max(row) < 1 for row in rows) > 5


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda value: str(value)[:60])
def test_a_lossless_rule_emits_the_targets_law(name: str, shape: TreeShape) -> None:
    for seed in PAIRS:
        assert_same_law(found(name, shape, seed)[0], pair(seed)[0].law(shape.depth + 1))


@pytest.mark.parametrize("shape", [TWO_BY_TWO, THREE_DEEP], ids=["2x2", "three levels"])
def test_the_rules_keep_drafts_in_their_known_order(shape: TreeShape) -> None:
    """For each pair, but that block can beat siblings drawn with replacement: those may be equal.

    The tree's rules stand against a chain of the tree's depth. In the mean the order is strict.
    """
    line, mean = chain(shape.depth), defaultdict(float)  # type: TreeShape, dict[str, float]
    for seed in PAIRS:
        kept = {name: found(name, shape, seed)[1] for name in TREE_RULES}
        kept |= {name: found(name, line, seed)[1] for name in ("block", "token")}
        assert kept["traversal"] >= kept["recursive_without"] - 1e-12
        assert kept["recursive_without"] >= kept["recursive_with"] - 1e-12
        assert kept["recursive_with"] >= kept["token"] - 1e-12
        assert kept["block"] >= kept["token"] - 1e-12
        for name, tokens in kept.items():
            mean[name] += tokens / len(PAIRS)
    order = [
        mean[n] for n in ("traversal", "recursive_without", "recursive_with", "block", "token")
    ]
    assert all(a > b + 1e-3 for a, b in itertools.pairwise(order)), dict(mean)


def test_on_a_chain_the_rules_are_two() -> None:
    for seed in PAIRS:
        tokens = {name: found(name, chain(3), seed)[1] for name in CHAIN_RULES}
        assert tokens["traversal"] == pytest.approx(tokens["block"], abs=1e-12)
        for name in ("recursive_with", "recursive_without"):
            assert tokens[name] == pytest.approx(tokens["token"], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "accepted"), [("token", 10 / 9), ("block", 11 / 9), ("traversal", 11 / 9)]
)
def test_expected_accepted_drafts_are_those_of_the_paper(name: str, accepted: float) -> None:
    target, drafter = World(2, 0), World(2, 1)
    for prefix in (t for n in range(4) for t in itertools.product(range(2), repeat=n)):
        target.tables[prefix], drafter.tables[prefix] = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    _, tokens = round_law(RULES[name], target, drafter, chain(2))
    assert tokens - 1 == pytest.approx(accepted, abs=1e-12)


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_a_drafter_equal_to_the_target_has_every_draft_accepted(name: str) -> None:
    target = World(4, 3)
    assert round_law(RULES[name], target, target, chain(3))[1] == pytest.approx(4, abs=1e-12)


# Faults of the kind that has been shipped.


@pytest.mark.parametrize(
    ("name", "part", "fault"),
    [
        *(
            (name, part, fault)
            for name in CHAIN_RULES
            for part, fault in (
                ("_rest", lambda weight, p, q: (weight * q - p).clamp(min=0)),
                ("_ratio", lambda p, q: q / max(p, 1e-9)),
                ("normalised", lambda weights_V, instead: weights_V),
                ("normalised", lambda weights_V, instead: instead),
            )
        ),
        ("recursive_without", "without", lambda probs_V, token: probs_V),
        ("traversal", "without", lambda probs_V, token: probs_V),
        ("traversal", "keep_chance", lambda rest, weight: weight),
        ("block", "keep_chance", lambda rest, weight: weight),
        ("block", "keep_chance", lambda rest, weight: rest),
    ],
)
def test_the_enumeration_catches_a_planted_fault(
    name: str, part: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, part, fault)
    shape = chain(3) if RULES[name].chains_only else TWO_BY_TWO
    with pytest.raises(AssertionError):
        for seed in PAIRS:
            target, drafter = pair(seed)
            law, _ = round_law(RULES[name], target, drafter, shape)
            assert_same_law(law, target.law(shape.depth + 1))


@pytest.mark.parametrize("name", ["recursive_without", "traversal"])
def test_siblings_drawn_with_replacement_are_noticed(name: str) -> None:
    q_NV = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    tree = TokenTree(TreeShape((-1, 0, 0)), torch.tensor([0, 1, 1]), q_NV)
    target = TargetView(logits_of([[1.0, 0.0]] * 3), Sampling(1.0))
    with pytest.raises(AssertionError, match="probability 0 in the q"):
        verdicts(name, tree, target)


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_deterministic_drafts_are_noticed(name: str) -> None:
    tree = TokenTree(chain(1), torch.tensor([0, 1]))
    target = TargetView(logits_of([[0.5, 0.5]] * 2), Sampling(1.0))
    with pytest.raises(AssertionError, match="without the q"):
        verdicts(name, tree, target)


# Each rule against its slow twin, written from the definition over plain floats: the law of
# (path, next token) for one given tree.

Row = list[float]


def rest_ref(weight: float, p: Row, q: Row) -> tuple[float, Row]:
    """S = sum(max(w p - q, 0)) and max(w p - q, 0) / S."""
    rest = [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return sum(rest), [r / sum(rest) for r in rest] if sum(rest) > 0 else p


def less(q: Row, token: int) -> Row:
    left = [0.0 if t == token else value for t, value in enumerate(q)]
    return [value / sum(left) for value in left] if sum(left) > 0 else q


def verify_block_ref(shape: TreeShape, tokens: list[int], p: list[Row], q: list[Row]) -> VerdictLaw:
    """P(the greatest good i) = h_i * product over j > i of (1 - h_j)."""
    last, weights, law = len(tokens) - 1, [1.0], defaultdict(float)  # type: int, Row, VerdictLaw
    for i in range(last):
        x = tokens[i + 1]
        weights.append(min(weights[-1] * p[i][x] / q[i][x], 1.0))
    open_ = 1.0
    for i in range(last, -1, -1):
        total, row = (0.0, p[i]) if i == last else rest_ref(weights[i], p[i], q[i])
        good = weights[i] if i == last or weights[i] == 1 else total / (total + 1 - weights[i])
        for y, weight in enumerate(row):
            law[tuple(range(i + 1)), y] += open_ * good * weight
        open_ *= 1 - good
    return law


def verify_recursive_ref(
    shape: TreeShape, tokens: list[int], p: list[Row], q: list[Row], replacement: bool
) -> VerdictLaw:
    """Down from the root: each child takes its share of what its siblings before it left."""
    law: VerdictLaw = defaultdict(float)

    def visit(path: Text, reached: float) -> None:
        p_row, q_row = p[path[-1]], q[path[-1]]
        for child in shape.children[path[-1]]:
            x = tokens[child]
            good = min(1.0, p_row[x] / q_row[x])
            visit((*path, child), reached * good)
            reached *= 1 - good
            _, p_row = rest_ref(1.0, p_row, q_row)
            q_row = q_row if replacement else less(q_row, x)
        for y, weight in enumerate(p_row):
            law[path, y] += reached * weight

    visit((0,), 1.0)
    return law


def verify_traversal_ref(
    shape: TreeShape, tokens: list[int], p: list[Row], q: list[Row]
) -> VerdictLaw:
    """Up from the leaves: a node is tried after all that hang below it have failed."""
    law: VerdictLaw = defaultdict(float)

    def visit(path: Text, weight: float, reached: float) -> float:
        """Try all below a node, then itself; the probability that all of it fails."""
        p_row, q_row = p[path[-1]], q[path[-1]]
        for child in shape.children[path[-1]]:
            x = tokens[child]
            below = min(weight * p_row[x] / q_row[x], 1.0)
            reached = visit((*path, child), below, reached)
            total, p_row = rest_ref(weight, p_row, q_row)
            weight = 1.0 if weight == 1 else total / (total + 1 - weight)
            q_row = less(q_row, x)
        for y, share in enumerate(p_row):
            law[path, y] += reached * weight * share
        return reached * (1 - weight)

    visit((0,), 1.0, 1.0)
    return law


@pytest.mark.parametrize("name", ["block", "recursive_with", "recursive_without", "traversal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} nodes")
def test_rules_equal_their_slow_twins(name: str, shape: TreeShape) -> None:
    rule = RULES[name]
    if rule.chains_only and not shape.is_chain:
        shape = chain(len(shape) - 1)
    refs = {
        "block": verify_block_ref,
        "recursive_with": partial(verify_recursive_ref, replacement=True),
        "recursive_without": partial(verify_recursive_ref, replacement=False),
        "traversal": verify_traversal_ref,
    }
    for seed in range(12):
        target = World(6, seed)
        drafter = World(6, seed + 100, near=target)
        choices = RandomChoices(torch.Generator().manual_seed(seed))
        tree = draft_sampled(shape, drafter, (), choices, rule.replacement)
        tokens = tree.tokens_N.tolist()
        prefixes = node_prefixes(tree.shape, tokens, ())
        p, q = ([world.after(prefix) for prefix in prefixes] for world in (target, drafter))
        ref = refs[name](tree.shape, tokens, p, q)
        assert_equals_ref(name, tree, logits_of(p), Sampling(1.0), ref)


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_at_temperature_0_a_rule_over_drawn_drafts_is_greedy(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    greedy = Sampling(0.0)
    for _ in range(50):
        logits_NV = torch.randint(0, 4, (4, 4), generator=generator).double()
        q_NV = greedy.probs(logits_NV + torch.randint(0, 3, (4, 4), generator=generator))
        tokens = torch.cat([torch.tensor([0]), q_NV[:3].argmax(-1)])
        tree = TokenTree(chain(3), tokens, q_NV)
        target = TargetView(logits_NV, greedy)
        ((wanted, _),) = verdicts("greedy", tree, target)
        assert verdicts(name, tree, target) == [(wanted, 1.0)]


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_where_p_equals_q_up_to_rounding_a_rejection_draws_from_p(name: str) -> None:
    class RejectDrafts:
        """Rejects what a rule may reject: all but the certain."""

        def accept(self, probability: float) -> bool:
            return probability == 1

        def draw(self, probs_V: Tensor) -> int:
            assert bool(torch.isfinite(probs_V).all()) and float(probs_V.sum()) > 0
            return int(probs_V.argmax())

    q_NV = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    tree = TokenTree(chain(1), torch.tensor([0, 1]), q_NV * (1 + 1e-6))
    target = TargetView(q_NV.log(), Sampling(1.0))
    assert RULES[name].apply(tree, target, RejectDrafts()) == Verdict((0,), 1)
