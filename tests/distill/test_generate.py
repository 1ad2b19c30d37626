from collections.abc import Callable
from typing import Any

import pytest
import torch

from distill.generate import batched_generate, choose
from infer.sampling import Sampling
from infer.target import TargetModel

PROMPTS = [
    [1, 85, 97, 40, 41, 42],
    [1, 85, 97],
    [1, 85, 97, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
    [1, 85, 97, 99],
    [1, 85, 97, 40, 41],
    [1, 85, 97, 60, 61, 62, 63, 64, 65],
    [1, 85, 97, 40, 41, 42, 43, 44, 45, 46, 47, 48],
    [1, 85, 97, 98, 97, 98, 97],
]
SAMPLED = Sampling(temperature=1.0, top_p=0.9)


def alone(target: TargetModel, sampling: Sampling, max_new: int) -> list[list[int]]:
    return [
        batched_generate(target, [prompt], max_new, sampling, [seed])[0]
        for seed, prompt in enumerate(PROMPTS)
    ]


def test_greedy_output_is_what_transformers_generates(tiny_target: TargetModel) -> None:
    for prompt in PROMPTS[:4]:
        ids = torch.tensor([prompt])
        expected = tiny_target.model.generate(ids, max_new_tokens=40, do_sample=False)[0]
        written = batched_generate(tiny_target, [prompt], 40, Sampling(), [0])[0]
        assert written == expected[len(prompt) :].tolist()


@pytest.mark.parametrize("prefix", [0, 3])
def test_greedy_output_at_batch_8_equals_batch_1(tiny_target: TargetModel, prefix: int) -> None:
    prompts = [prompt[3 - prefix :] for prompt in PROMPTS]
    prompts = prompts if prefix else [[30 + i, *p] for i, p in enumerate(prompts)]
    single = [batched_generate(tiny_target, [p], 60, Sampling(), [0])[0] for p in prompts]
    assert batched_generate(tiny_target, prompts, 60, Sampling(), [0] * 8) == single
    assert len({tuple(row) for row in single}) > 4


def test_sampled_output_depends_on_its_own_seed_only(tiny_target: TargetModel) -> None:
    single = alone(tiny_target, SAMPLED, 80)
    assert batched_generate(tiny_target, PROMPTS, 80, SAMPLED, list(range(8))) == single
    assert len({len(row) for row in single}) > 2, "rows should end at different steps"
    other = batched_generate(tiny_target, PROMPTS, 80, SAMPLED, list(range(8, 16)))
    assert all(a != b for a, b in zip(single, other, strict=True))


def test_a_prefill_in_pieces_changes_nothing(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batched_generate(tiny_target, PROMPTS, 30, Sampling(), [0] * 8)
    monkeypatch.setattr("distill.generate.CHUNK_TOKENS", {"cpu": 24})
    assert batched_generate(tiny_target, PROMPTS, 30, Sampling(), [0] * 8) == whole


def test_a_row_ends_with_its_end_token_and_nothing_follows(tiny_target: TargetModel) -> None:
    rows = alone(tiny_target, SAMPLED, 200)
    ended = [row for row in rows if row[-1] in tiny_target.end_tokens]
    assert ended
    assert all(not tiny_target.end_tokens & set(row[:-1]) for row in rows)
    assert all(len(row) == 200 for row in rows if row not in ended)


def test_a_row_stops_at_the_context_length_or_at_max_length(
    make_model: Callable[..., Any], tiny_target: TargetModel
) -> None:
    short = make_model(max_position_embeddings=24)
    target = TargetModel(short, tiny_target.tokenizer, "short")
    rows = batched_generate(target, PROMPTS, 30, Sampling(), [0] * 8)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert len(prompt) + len(row) <= 24
        assert len(prompt) + len(row) == 24 or row[-1] in target.end_tokens
    shorter = batched_generate(target, PROMPTS, 30, Sampling(), [0] * 8, max_length=20)
    assert shorter == [row[: 20 - len(p)] for p, row in zip(PROMPTS, rows, strict=True)]


def test_no_prompts_give_no_rows(tiny_target: TargetModel) -> None:
    assert batched_generate(tiny_target, [], 5, Sampling(), []) == []


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(1.3, top_p=0.05),
        Sampling(0.9, top_k=40, top_p=0.6),
    ],
)
@pytest.mark.parametrize("size", [7, 300])
def test_choose_draws_with_the_probabilities_of_sampling(sampling: Sampling, size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # Rounded, so that many tokens are equally likely.
    logits = (torch.randn(size, generator=generator) * 1.5).mul(4).round().div(4)
    count = 40_000
    uniforms = torch.rand(count, 9, generator=generator, dtype=torch.float64)
    tokens = choose(logits.expand(count, size), sampling, uniforms)
    probs = sampling.probs(logits)
    found = torch.bincount(tokens, minlength=size) / count
    assert not found[probs == 0].any()
    deviation = (probs * (1 - probs) / count).sqrt()
    assert ((found - probs).abs() <= 5 * deviation + 1e-6).all()


def test_drawing_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    choose(logits, Sampling(0.5, top_k=9, top_p=0.7), torch.rand(3, 9))
    assert torch.equal(logits, before)


def test_greedy_choice_is_the_first_of_the_largest_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 1.0, 3.0, 3.0]], dtype=torch.bfloat16)
    assert choose(logits, Sampling(), torch.empty(2, 0)).tolist() == [1, 0]
