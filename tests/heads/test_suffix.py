"""The suffix automaton against a search through the text, and what is drafted from it."""

import random
from collections import Counter

import pytest
import torch

from heads.base import DraftBudget, DraftState
from heads.lookup import MatchRates
from heads.suffix import Automaton, Suffix, SuffixConfig
from heads.tree import DynamicTree, TokenTree, TreeShape, chain

Text = list[int]


def random_text(seed: int, length: int = 40) -> Text:
    """Random tokens of a small alphabet, now and then a copy of what stands there."""
    draw = random.Random(seed)
    letters, text = draw.choice([1, 2, 3, 6]), [0]
    while len(text) < length:
        if draw.random() < 0.2:
            start = draw.randrange(len(text))
            text += text[start : start + draw.randrange(1, 9)]
        text.append(draw.randrange(letters))
    return text[:length]


def ends(text: Text, part: Text) -> list[int]:
    """Where `part` ends in the text."""
    size = len(part)
    return [i for i in range(size - 1, len(text)) if text[i - size + 1 : i + 1] == part]


def followers(text: Text, part: Text) -> Counter[int]:
    return Counter(text[end + 1] for end in ends(text, part) if end + 1 < len(text))


def longest_match(text: Text) -> int:
    return max(size for size in range(len(text)) if not size or len(ends(text, text[-size:])) > 1)


def grown(text: Text) -> Automaton:
    automaton = Automaton()
    for token in text:
        automaton.append(token)
    return automaton


def proposal(text: Text, shape: TreeShape | DynamicTree, **settings: float) -> TokenTree:
    drafter = Suffix(SuffixConfig(**settings))  # type: ignore[arg-type]
    return drafter.propose(DraftState(text), DraftBudget(shape))


def chain_by_search(text: Text, depth: int, factor: float, min_prob: float) -> Text:
    """The same chain by searching the text for every ending and every prefix again."""
    best, best_sum = list[int](), 0.0
    for size in range(len(text) - 1, 0, -1):
        ending, path, prob, total = text[-size:], list[int](), 1.0, 0.0
        while len(path) < min(depth, int(factor * size)):
            counts = followers(text, ending + path)
            if not counts:
                break
            token = max(counts, key=lambda t: (counts[t], ends(text, [*ending, *path, t])[-1]))
            prob *= counts[token] / counts.total()
            if prob < min_prob:
                break
            path.append(token)
            total += prob
        if total > best_sum:
            best, best_sum = path, total
    return best


@pytest.mark.parametrize("seed", range(40))
def test_every_substring_is_counted_where_it_stands_at_every_length(seed: int) -> None:
    text, automaton = random_text(seed, 24), Automaton()
    for size, token in enumerate(text, 1):
        automaton.append(token)
        so_far = text[:size]
        parts = {tuple(so_far[i:j]) for i in range(size) for j in range(i + 1, size + 1)}
        for part in parts:
            state = 0
            for letter in part:
                state = automaton.after[state][letter]
            where = ends(so_far, list(part))
            assert automaton.count[state] == len(where)
            assert automaton.latest[state] == where[-1]
            counts = followers(so_far, list(part))
            assert {c.token: c.times for c in automaton.continuations(state)} == dict(counts)
        assert automaton.length[automaton.matched] == longest_match(so_far)


@pytest.mark.parametrize("alphabet", [1, 2, 500])
def test_memory_is_linear_in_the_text(alphabet: int) -> None:
    draw = random.Random(0)
    automaton = grown([draw.randrange(alphabet) for _ in range(1000)])
    assert len(automaton.length) < 2 * 1000
    assert sum(map(len, automaton.after)) < 3 * 1000


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(("factor", "min_prob"), [(1.0, 0.1), (2.5, 0.4), (0.5, 0.01)])
def test_chain_is_the_one_that_a_search_finds(seed: int, factor: float, min_prob: float) -> None:
    text = random_text(seed)
    tree = proposal(text, chain(8), spec_factor=factor, min_prob=min_prob)
    assert tree.shape.is_chain
    assert tree.tokens_N.tolist() == [text[-1], *chain_by_search(text, 8, factor, min_prob)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("shape", [DynamicTree(6, 4, 6), TreeShape((-1, 0, 0, 1, 1, 2))])
def test_tree_holds_the_likeliest_paths_of_one_ending(
    seed: int, shape: TreeShape | DynamicTree
) -> None:
    """Against every path that a search finds behind that ending."""
    text = random_text(seed, 30)
    tree = proposal(text, shape)
    assert len(tree.shape) <= len(shape) and tree.shape.depth <= shape.depth
    tokens = tree.tokens_N.tolist()
    paths = {tuple(tokens[n] for n in tree.shape.path(node)[1:]) for node in range(len(tokens))}
    paths.remove(())
    assert len(paths) == len(tokens) - 1, "siblings are distinct tokens"
    best, reached = 0.0, 0.0
    for size in range(1, len(text)):
        probs = path_probs(text, text[-size:], min(shape.depth, size), 0.1)
        best = max(best, sum(sorted(probs.values(), reverse=True)[: len(shape) - 1]))
        if set(probs) >= paths:
            reached = max(reached, sum(probs[path] for path in paths))
    assert reached == pytest.approx(best)


def path_probs(text: Text, ending: Text, depth: int, least: float) -> dict[tuple[int, ...], float]:
    """Every path behind `ending` with a probability of `least` or more."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        below = {}
        for path, prob in level.items():
            counts = followers(text, [*ending, *path])
            for token, count in counts.items():
                if prob * count / counts.total() >= least:
                    below[(*path, token)] = prob * count / counts.total()
        found |= below
        level = below
    return found


@pytest.mark.parametrize("seed", range(20))
def test_growing_by_rounds_equals_reading_the_text_at_once(seed: int) -> None:
    text, draw = random_text(seed, 60), random.Random(seed)
    drafter, state = Suffix(SuffixConfig()), DraftState(text[:5])
    while len(state.tokens) < len(text):
        state.tokens = text[: len(state.tokens) + draw.randrange(1, 6)]
        for shape in (chain(6), DynamicTree(6, 4, 3)):
            ours = drafter.propose(state, DraftBudget(shape))
            fresh = proposal(state.tokens, shape)
            assert ours.tokens_N.tolist() == fresh.tokens_N.tolist()
            assert ours.shape == fresh.shape


def test_a_node_has_no_more_children_than_asked_for() -> None:
    text = [9, 1, 9, 2, 9, 3, 9]
    assert proposal(text, DynamicTree(2, 1, 2)).tokens_N.tolist() == [9, 3, 2]
    assert proposal(text, DynamicTree(1, 1, 1)).tokens_N.tolist() == [9, 3]


def test_new_text_and_a_single_token_draft_nothing() -> None:
    for text in ([7], [1, 2, 3, 4]):
        assert proposal(text, chain(5)).tokens_N.tolist() == [text[-1]]


def test_a_longer_match_is_trusted_more() -> None:
    short = proposal([1, 2, 9, 8, 2], chain(1)).confidences_N
    long = proposal([1, 2, 3, 4, 9, 1, 2, 3, 4], chain(1)).confidences_N
    assert short is not None and long is not None and short.tolist()[1] < long.tolist()[1]


def test_confidence_follows_what_held_in_this_request() -> None:
    """Two texts with the same match at the end; in one of them copies held, in one they broke."""
    block = [1, 2, 3, 4]

    def confidence(text: Text) -> float:
        drafter, state = Suffix(SuffixConfig()), DraftState([*block, 5])
        drafter.propose(state, DraftBudget(chain(4)))
        state.tokens = [*state.tokens, *text]
        values = drafter.propose(state, DraftBudget(chain(4))).confidences_N
        assert values is not None
        return float(values[1])

    kept = confidence([*[*block, 5] * 6, *block])
    broken = confidence([t for n in range(6) for t in (*block, 50 + n)] + block)
    assert kept > 0.9
    assert broken < 0.6


def test_rates_start_at_what_is_expected_and_move_to_what_is_seen() -> None:
    rates = MatchRates()
    assert rates.rate(3) == pytest.approx(MatchRates.expected(3))
    for _ in range(1000):
        rates.add(3, False)
    assert rates.rate(3) < 0.01
    assert rates.rate(2) == pytest.approx(MatchRates.expected(2))


def test_confidences_never_grow_along_a_path() -> None:
    for seed in range(20):
        tree = proposal(random_text(seed), DynamicTree(12, 8, 4))
        assert tree.confidences_N is not None and tree.confidences_N.dtype == torch.float32
        values = tree.confidences_N.tolist()
        assert values[0] == 1
        for node, parent in enumerate(tree.shape.parents[1:], 1):
            assert values[node] <= values[parent]
