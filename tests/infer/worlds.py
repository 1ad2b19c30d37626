"""Small worlds, and an enumeration over every random choice that a rule makes in them."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from heads.drawing import NONE_LEFT, drawn_tree
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.sampling import Sampling
from infer.verdict import Choices, TargetView, Verdict
from infer.verify import RULES, Rule

T = TypeVar("T")
Text = tuple[int, ...]
Law = dict[Text, float]
VerdictLaw = dict[tuple[Text, int], float]

ROOT_TOKEN = 0
TWO_BY_TWO = TreeShape((-1, 0, 0, 1, 1, 2, 2))
THREE_LEVELS = TreeShape((-1, 0, 0, 0, 1, 1, 2, 4, 4, 7), (0, 0, 1, 2, 0, 2, 1, 0, 1, 0))
BRANCHING = TreeShape((-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5))
SHAPES = [chain(0), chain(1), chain(3), TWO_BY_TWO, THREE_LEVELS, BRANCHING]


# Enumeration.


class ScriptedChoices:
    """Replays a prefix of decisions, then takes the first possible one and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.taken = script, ()  # type: tuple[int, ...], tuple[int, ...]
        self.probability = 1.0
        self.untried: list[tuple[int, ...]] = []

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self._choose([1 - probability, probability]) == 1

    def draw(self, probs_V: Tensor) -> int:
        probs = probs_V.double().tolist()
        assert min(probs) >= 0 and sum(probs) == pytest.approx(1, abs=1e-12)
        return self._choose(probs)

    def _choose(self, weights: list[float]) -> int:
        at = len(self.taken)
        possible = [option for option, weight in enumerate(weights) if weight > 0]
        if at < len(self.script):
            option = self.script[at]
        else:
            option = possible[0]
            self.untried += [(*self.taken, other) for other in possible[1:]]
        self.taken += (option,)
        self.probability *= weights[option]
        return option


def outcomes(run: Callable[[Choices], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of `run` with its exact probability, in float64."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        choices = ScriptedChoices(scripts.pop())
        yield run(choices), choices.probability
        scripts += choices.untried


def verdicts(rule: str, tree: TokenTree, target: TargetView) -> list[tuple[Verdict, float]]:
    """Every verdict of a rule on one tree with its probability."""
    return list(outcomes(lambda choices: RULES[rule].apply(tree, target, choices)))


# Small worlds: a distribution for every prefix.


class World:
    """Conditional tables: a distribution over V tokens after every prefix, made when asked for.

    Some are smooth, some sparse (zeros), some one-hots.
    """

    def __init__(self, vocab_size: int, seed: int, near: "World | None" = None) -> None:
        self.vocab_size, self.seed, self.near = vocab_size, seed, near
        self.tables: dict[Text, list[float]] = {}

    def after(self, prefix: Text) -> list[float]:
        if prefix not in self.tables:
            self.tables[prefix] = self._made(prefix)
        return self.tables[prefix]

    def _made(self, prefix: Text) -> list[float]:
        rng = random.Random(f"{self.seed} {prefix}")
        kind = rng.random()
        if self.near is not None and kind < 0.15:
            return self.near.after(prefix)
        weights = [rng.random() ** 3 for _ in range(self.vocab_size)]
        if kind > 0.85:
            weights = [0.0] * self.vocab_size
        elif kind > 0.6:
            weights = [w if rng.random() < 0.5 else 0.0 for w in weights]
        if sum(weights) == 0:
            weights[rng.randrange(self.vocab_size)] = 1.0
        return [w / sum(weights) for w in weights]

    def best(self, prefix: Text) -> list[int]:
        """Tokens by falling probability, the lowest first among ties."""
        probs = self.after(prefix)
        return sorted(range(self.vocab_size), key=lambda token: (-probs[token], token))

    def law(self, length: int, prefix: Text = ()) -> Law:
        """The joint law of the next `length` tokens."""
        if length == 0:
            return {(): 1.0}
        return {
            (token, *rest): p * p_rest
            for token, p in enumerate(self.after(prefix))
            if p > 0
            for rest, p_rest in self.law(length - 1, (*prefix, token)).items()
        }


def logits_of(probs_NV: list[list[float]]) -> Tensor:
    return torch.tensor(probs_NV, dtype=torch.float64).log()


def node_prefixes(shape: TreeShape, tokens: list[int], prefix: Text) -> list[Text]:
    """What stands before the token that each node predicts."""
    found = [prefix]
    for node, parent in enumerate(shape.parents[1:], start=1):
        found.append((*found[parent], tokens[node]))
    return found


def draft_ranked(shape: TreeShape, drafter: World, prefix: Text) -> TokenTree:
    """A deterministic tree: every node its parent's candidate of its rank."""
    tokens, prefixes = [ROOT_TOKEN], [prefix]
    for node, parent in enumerate(shape.parents[1:], start=1):
        tokens.append(drafter.best(prefixes[parent])[shape.ranks[node]])
        prefixes.append((*prefixes[parent], tokens[-1]))
    return TokenTree(shape, torch.tensor(tokens))


def draft_grown(size: DynamicTree, drafter: World, prefix: Text) -> TokenTree:
    """A tree of the drafter's likeliest paths, another one after every prefix."""
    levels: list[list[tuple[float, Text]]] = [[(1.0, ())]]
    for _ in range(size.depth):
        best = sorted(levels[-1], key=lambda node: -node[0])[: size.top_k]
        levels.append(
            [
                (value * drafter.after((*prefix, *path))[token], (*path, token))
                for value, path in best
                for token in drafter.best((*prefix, *path))[: size.top_k]
            ]
        )
    found = [node for level in levels[1:] for node in level if node[0] > 0]
    kept = sorted(found, key=lambda node: (-node[0], len(node[1])))[: size.num_drafts]
    paths = [(), *sorted((path for _, path in kept), key=len)]
    parents = tuple(paths.index(path[:-1]) if path else -1 for path in paths)
    return TokenTree(TreeShape(parents), torch.tensor([p[-1] if p else ROOT_TOKEN for p in paths]))


def draft_sampled(
    shape: TreeShape, drafter: World, prefix: Text, choices: Choices, replacement: bool = True
) -> TokenTree:
    """A tree drawn from the drafter, with its q."""
    tokens, prefixes = [ROOT_TOKEN] + [NONE_LEFT] * (len(shape) - 1), [prefix] * len(shape)
    for node, children in enumerate(shape.children):
        if tokens[node] == NONE_LEFT:
            continue
        left = list(drafter.after(prefixes[node]))
        for child in children:
            if sum(left) == 0:
                break
            q_V = torch.tensor(left, dtype=torch.float64)
            tokens[child] = choices.draw(q_V / q_V.sum())
            prefixes[child] = (*prefixes[node], tokens[child])
            if not replacement:
                left[tokens[child]] = 0.0
    q_NV = torch.tensor([drafter.after(p) for p in prefixes], dtype=torch.float64)
    return drawn_tree(shape, torch.tensor(tokens), q_NV)


def view(tree: TokenTree, target: World, prefix: Text) -> TargetView:
    prefixes = node_prefixes(tree.shape, tree.tokens_N.tolist(), prefix)
    return TargetView(logits_of([target.after(p) for p in prefixes]), Sampling(1.0))


def emitted(tree: TokenTree, verdict: Verdict) -> Text:
    tokens = tree.tokens_N.tolist()
    return (*(tokens[node] for node in verdict.path[1:]), verdict.next_token)


def one_round(
    rule: Rule,
    target: World,
    drafter: World,
    shape: TreeShape | DynamicTree,
    prefix: Text,
    choices: Choices,
) -> Text:
    """Draft, verify, and what is emitted."""
    if rule.needs_draft_probs:
        assert isinstance(shape, TreeShape)
        tree = draft_sampled(shape, drafter, prefix, choices, rule.replacement)
    elif isinstance(shape, DynamicTree):
        tree = draft_grown(shape, drafter, prefix)
    else:
        tree = draft_ranked(shape, drafter, prefix)
    return emitted(tree, rule.apply(tree, view(tree, target, prefix), choices))


def speculative_law(
    rule: Rule, target: World, drafter: World, shape: TreeShape | DynamicTree, length: int
) -> Law:
    """The joint law of the first `length` tokens, over as many rounds as they take."""
    laws: dict[Text, Law] = {}

    def after(prefix: Text) -> Law:
        if len(prefix) >= length:
            return {prefix[:length]: 1.0}
        if prefix not in laws:
            law: Law = defaultdict(float)
            for text, p in outcomes(
                lambda choices: one_round(rule, target, drafter, shape, prefix, choices)
            ):
                for whole, p_rest in after((*prefix, *text)).items():
                    law[whole] += p * p_rest
            laws[prefix] = dict(law)
        return laws[prefix]

    return after(())


def total_variation(a: Law, b: Law) -> float:
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys()) / 2


def assert_same_law(found: Law, expected: Law) -> None:
    for text in found.keys() | expected.keys():
        assert found.get(text, 0.0) == pytest.approx(expected.get(text, 0.0), abs=1e-9), text


def assert_equals_ref(
    rule: str, tree: TokenTree, logits_NV: Tensor, sampling: Sampling, ref: VerdictLaw
) -> None:
    found: VerdictLaw = defaultdict(float)
    for verdict, p in verdicts(rule, tree, TargetView(logits_NV, sampling)):
        found[verdict.path, verdict.next_token] += p
    for key in found.keys() | ref.keys():
        assert found.get(key, 0.0) == pytest.approx(ref.get(key, 0.0), abs=1e-12), key
