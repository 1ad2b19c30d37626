"""The loop: where it stops, what it counts, and that sampling leaves the target's law alone."""

from collections import Counter
from typing import Any

import pytest
import torch

from heads.base import DraftBudget, Drafter, DrafterConfig, DraftState, Needs
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.loop import GenerationSettings, speculative_generate
from infer.sampling import Sampling
from infer.target import TargetModel
from infer.verify import RULES
from tests.conftest import tiny_model, tiny_tokenizer

PROMPT = [1, 20, 21, 22]


class Scripted(Drafter):
    """Drafts a known continuation, right up to `correct` tokens of each proposal."""

    kind = "scripted"
    Config = DrafterConfig

    def __init__(self, text: list[int], correct: int = 99) -> None:
        super().__init__()
        self.text, self.correct = text, correct

    @classmethod
    def create(cls, *arguments: Any) -> "Scripted":
        raise NotImplementedError

    @classmethod
    def blank(cls, *arguments: Any) -> "Scripted":
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def max_depth(self) -> None:
        return None

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        done = len(state.tokens) - len(PROMPT)
        draft = self.text[done : done + budget.shape.depth]
        draft = [t if i < self.correct else (t + 1) % 160 for i, t in enumerate(draft)]
        return TokenTree(chain(len(draft)), torch.tensor([state.tokens[-1], *draft]))


class Growing(Scripted):
    """Shapes its tree by the text so far: wide, deep or small, right along a path of it."""

    kind = "growing"
    can_grow = True
    shapes = (
        TreeShape((-1, 0, 0, 1, 3)),
        TreeShape((-1, 0, 1, 2, 3)),
        TreeShape((-1, 0, 0)),
        TreeShape((-1, 0, 0, 2)),
    )

    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        assert isinstance(budget.shape, DynamicTree)
        shape = self.shapes[len(state.tokens) % len(self.shapes)]
        done = len(state.tokens) - len(PROMPT)
        right = shape.path(shape.depths.index(shape.depth))
        tokens = [state.tokens[-1], *[5] * (len(shape) - 1)]
        for node, token in zip(right[1:], self.text[done : done + shape.depth], strict=False):
            tokens[node] = token
        return TokenTree(shape, torch.tensor(tokens))


def plain_text(target: TargetModel, length: int = 40) -> list[int]:
    settings = GenerationSettings(max_new_tokens=length)
    return speculative_generate(target, None, PROMPT, settings).tokens


def with_end_token(target: TargetModel, token: int) -> TargetModel:
    """The same target for which one more id ends a response."""
    other = TargetModel(target.model, target.tokenizer, "tiny")
    other.model.generation_config.eos_token_id = [2, token]
    return other


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model(), tiny_tokenizer(), "tiny")


def test_counts_are_the_rules_own(target: TargetModel) -> None:
    text = plain_text(target)
    settings = GenerationSettings(max_new_tokens=21, shape=chain(4))
    result = speculative_generate(target, Scripted(text, correct=3), PROMPT, settings)
    assert result.tokens == text[:21]
    assert (result.rounds, result.drafted, result.accepted) == (5, 20, 15)
    assert result.proposed_per_position == [5, 5, 5, 5]
    assert result.accepted_per_position == [5, 5, 5]
    assert result.from_draft == [False] + [True, True, True, False] * 5


def test_a_drafters_own_trees_change_nothing_but_the_counts(target: TargetModel) -> None:
    text = plain_text(target)
    settings = GenerationSettings(max_new_tokens=40, shape=DynamicTree(5, depth=4, top_k=3))
    result = speculative_generate(target, Growing(text), PROMPT, settings)
    assert result.tokens == text
    proposed = result.proposed_per_position
    assert proposed[0] == result.rounds and len(proposed) in (3, 4)
    assert proposed == sorted(proposed, reverse=True) and proposed[-1] < proposed[0]
    assert result.drafted < 4 * result.rounds, "counted as they were drafted, not as allowed"
    assert result.accepted > result.rounds


def test_a_drafters_own_trees_keep_clear_of_the_contexts_end() -> None:
    target = TargetModel(tiny_model(max_position_embeddings=24), tiny_tokenizer(), "short")
    plain = speculative_generate(target, None, PROMPT, GenerationSettings(max_new_tokens=99))
    settings = GenerationSettings(max_new_tokens=99, shape=DynamicTree(5, depth=4))
    ours = speculative_generate(target, Growing(plain.tokens + [5] * 10), PROMPT, settings)
    assert ours.tokens == plain.tokens


def test_a_drafter_that_cannot_shape_a_tree_says_what_to_use(target: TargetModel) -> None:
    settings = GenerationSettings(shape=DynamicTree(5))
    with pytest.raises(UserError, match=r"kind 'scripted' does not shape .*--chain K.* static"):
        speculative_generate(target, Scripted([]), PROMPT, settings)


def test_a_dynamic_tree_deeper_than_the_drafter_is_refused(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growing, "max_depth", 4)
    settings = GenerationSettings(shape=DynamicTree(5, depth=5))
    with pytest.raises(UserError, match=r"5 draft tokens in a row .* at most 4"):
        speculative_generate(target, Growing([]), PROMPT, settings)


def test_the_limit_cuts_inside_an_accepted_path(target: TargetModel) -> None:
    text = plain_text(target)
    settings = GenerationSettings(max_new_tokens=8, shape=chain(5))
    result = speculative_generate(target, Scripted(text), PROMPT, settings)
    assert result.tokens == text[:8]
    assert result.accepted == 10, "counted before the cut, as engines count"


def test_an_end_token_inside_an_accepted_path_ends_the_text_there(target: TargetModel) -> None:
    text = plain_text(target)
    index = next(i for i in range(2, 30) if text[i] not in text[:i])
    ending = with_end_token(target, text[index])
    settings = GenerationSettings(max_new_tokens=40, shape=chain(6))
    result = speculative_generate(ending, Scripted(text), PROMPT, settings)
    assert result.ended and result.tokens == text[: index + 1]
    assert result.tokens == speculative_generate(ending, None, PROMPT, settings).tokens


def test_an_end_token_as_the_first_one_needs_no_round(target: TargetModel) -> None:
    text = plain_text(target)
    ending = with_end_token(target, text[0])
    result = speculative_generate(ending, Scripted(text), PROMPT, GenerationSettings())
    assert result.ended and result.tokens == text[:1] and result.rounds == 0


def test_the_end_of_the_context_is_reached_and_not_passed() -> None:
    target = TargetModel(tiny_model(max_position_embeddings=24), tiny_tokenizer(), "short")
    plain = speculative_generate(target, None, PROMPT, GenerationSettings(max_new_tokens=99))
    text = plain.tokens + [5] * 10
    settings = GenerationSettings(max_new_tokens=99, shape=chain(6))
    ours = speculative_generate(target, Scripted(text), PROMPT, settings)
    assert ours.tokens == plain.tokens
    if not plain.ended:
        assert len(plain.tokens) == 24 - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "no tokens"), ([5] * 600, "takes 512")], ids=["empty", "long"]
)
def test_a_prompt_without_room_is_refused(
    prompt: list[int], message: str, target: TargetModel
) -> None:
    with pytest.raises(UserError, match=message):
        speculative_generate(target, None, prompt, GenerationSettings())


def test_streaming_hands_over_every_token_once(target: TargetModel) -> None:
    text = plain_text(target)
    seen: list[int] = []
    settings = GenerationSettings(max_new_tokens=17, shape=chain(3))
    result = speculative_generate(
        target,
        Scripted(text, correct=2),
        PROMPT,
        settings,
        on_tokens=lambda tokens, from_draft: seen.extend(tokens),
    )
    assert seen == result.tokens


def test_the_same_seed_gives_the_same_sample(target: TargetModel) -> None:
    def sample(seed: int) -> list[int]:
        settings = GenerationSettings(
            30, Sampling(1.0), rule="topk_tree", shape=chain(3), seed=seed
        )
        return speculative_generate(target, Scripted(plain_text(target)), PROMPT, settings).tokens

    assert sample(1) == sample(1) != sample(2)


SAMPLED = [name for name, rule in RULES.items() if rule.lossless and not rule.greedy_only]

SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("rule", "kind", "draws"),
    [
        *((rule, "medusa", 600) for rule in SAMPLED),
        *(pytest.param(rule, "medusa", 20_000, marks=SLOW) for rule in SAMPLED),
        pytest.param("traversal", "draft_model", 20_000, marks=SLOW),
    ],
)
def test_sampled_text_has_the_targets_distribution(rule: str, kind: str, draws: int) -> None:
    """The first three new tokens, over many seeds, against their exact law (chi-square)."""
    from tests.heads.test_drafters import new_drafter

    model = tiny_model(vocab_size=16, num_hidden_layers=2)
    target, sampling = TargetModel(model, tiny_tokenizer(), "tiny"), Sampling(0.8, top_k=6)
    drafter, prompt = new_drafter(kind, target), [1, 5, 6, 7]
    shape = chain(2) if RULES[rule].chains_only else TreeShape((-1, 0, 0, 1, 1, 2))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(draws):
        settings = GenerationSettings(3, sampling, rule, shape, seed)
        result = speculative_generate(target, drafter, prompt, settings)
        counts[tuple(result.tokens)] += 1
        accepted += result.accepted
    law = exact_law(target, sampling, 3, prompt)
    assert set(counts) <= set(law) and accepted > draws / 5
    chance = chi_square_chance(counts, law)
    assert chance > 0.001, chance


def chi_square_chance(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How likely counts are at least this far from the law; texts expected under 5 times are one.

    The upper tail of Pearson's statistic.
    """
    draws, statistic, cells = counts.total(), 0.0, 0
    rare_found, rare_expected = 0, 0.0
    for text, p in law.items():
        if draws * p < 5:
            rare_found, rare_expected = rare_found + counts[text], rare_expected + draws * p
        else:
            statistic, cells = statistic + (counts[text] - draws * p) ** 2 / (draws * p), cells + 1
    if rare_expected >= 5:
        statistic += (rare_found - rare_expected) ** 2 / rare_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_chi_square_test_tells_a_wrong_law() -> None:
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.1999, (3,): 0.0001}
    right = Counter({(0,): 10_050, (1,): 5_950, (2,): 3_999, (3,): 1})
    assert chi_square_chance(right, law) == pytest.approx(0.707, abs=0.02)
    wrong = Counter({(0,): 10_300, (1,): 5_700, (2,): 3_998, (3,): 2})
    assert chi_square_chance(wrong, law) < 0.001


def exact_law(
    target: TargetModel, sampling: Sampling, length: int, prompt: list[int] = PROMPT
) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in law.items():
            if text and text[-1] in target.end_tokens:
                longer[text] = probability
                continue
            states = target.forward(torch.tensor([[*prompt, *text]]))
            probs = sampling.probs(target.logits(states.hidden_BND[0, -1]))
            for token in probs.nonzero()[:, 0].tolist():
                longer[(*text, token)] = probability * float(probs[token])
        law = longer
    return law
