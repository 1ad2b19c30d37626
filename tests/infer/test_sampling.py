"""From logits to probabilities, and from probabilities to a token."""

import math
import random

import pytest
import torch
from torch import Tensor

from heads.errors import UserError
from infer.sampling import Sampling, draw

SETTINGS = [
    Sampling(1.0),
    Sampling(0.3),
    Sampling(2.5),
    Sampling(1.0, top_k=1),
    Sampling(0.8, top_k=4),
    Sampling(1.0, top_p=0.5),
    Sampling(1.2, top_p=0.95),
    Sampling(0.9, top_k=5, top_p=0.7),
    Sampling(0.9, top_k=50, top_p=1e-9),
]


def probs_ref(logits: list[float], sampling: Sampling) -> list[float]:
    """By the definition, over floats: temperature, the k largest, then the smallest set of mass p.

    Tokens as likely as the k-th stay; of equally likely ones the nucleus takes the lowest id first.
    """
    if sampling.greedy:
        best = logits.index(max(logits))
        return [float(token == best) for token in range(len(logits))]
    kept = set(range(len(logits)))
    if 0 < sampling.top_k < len(logits):
        kth = sorted(logits, reverse=True)[sampling.top_k - 1]
        kept = {token for token in kept if logits[token] >= kth}
    top = max(logits)
    weights = {token: math.exp((logits[token] - top) / sampling.temperature) for token in kept}
    total = sum(weights.values())
    if sampling.top_p < 1:
        nucleus, mass = set(), 0.0
        for token in sorted(kept, key=lambda token: (-weights[token], token)):
            if mass >= sampling.top_p:
                break
            nucleus.add(token)
            mass += weights[token] / total
        kept = nucleus
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(0.0)])
def test_probabilities_equal_their_slow_twin(sampling: Sampling) -> None:
    rng = random.Random(0)
    for vocab_size in (1, 2, 7, 8):
        rows = [[rng.gauss(0, 3) for _ in range(vocab_size)] for _ in range(6)]
        found = sampling.probs(torch.tensor(rows, dtype=torch.float64))
        for row, probs in zip(rows, found.tolist(), strict=True):
            assert probs == pytest.approx(probs_ref(row, sampling), abs=1e-12)


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probabilities_are_a_distribution_in_at_least_float32(
    sampling: Sampling, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 3, 5_000, generator=generator) * 5).to(dtype)
    before = logits.clone()
    probs = sampling.probs(logits)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert probs.shape == logits.shape and torch.equal(logits, before)
    assert bool((probs >= 0).all()) and bool((probs <= 1).all())
    assert torch.allclose(probs.double().sum(-1), torch.ones(2, 3).double(), atol=1e-5)


def test_a_batch_gives_what_its_rows_give() -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    for sampling in [*SETTINGS, Sampling(0.0)]:
        rows = [[sampling.probs(row) for row in block] for block in logits]
        assert torch.equal(sampling.probs(logits), torch.stack([torch.stack(r) for r in rows]))


def test_greedy_is_a_one_hot_at_the_lowest_id_among_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert Sampling(0.0).probs(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert Sampling(0.0).greedy and not Sampling(0.1).greedy


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    tops = [float(Sampling(t).probs(logits)[0]) for t in (0.1, 0.5, 1.0, 2.0, 100.0)]
    assert tops == sorted(tops, reverse=True)
    assert tops[0] > 0.999 and tops[-1] == pytest.approx(1 / 3, abs=0.01)


def test_top_k_keeps_the_k_most_likely_and_their_odds() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    full, cut = Sampling(1.0).probs(logits), Sampling(1.0, top_k=7).probs(logits)
    kept = cut > 0
    assert int(kept.sum()) == 7 and float(full[kept].min()) > float(full[~kept].max())
    assert torch.allclose(cut[kept], full[kept] / full[kept].sum())


def test_top_k_keeps_every_token_tied_with_the_last_one() -> None:
    probs = Sampling(1.0, top_k=2).probs(torch.tensor([0.0, 1.0, 0.0, -1.0]))
    assert (probs > 0).tolist() == [True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    kept = {p: int((Sampling(1.0, top_p=p).probs(logits) > 0).sum()) for p in (0.4, 0.6, 0.9, 0.99)}
    assert kept == {0.4: 1, 0.6: 2, 0.9: 3, 0.99: 4}
    assert Sampling(1.0, top_p=0.6).probs(logits).tolist() == pytest.approx([5 / 8, 3 / 8, 0, 0])


def test_top_p_stops_where_the_mass_is_reached_exactly() -> None:
    probs = Sampling(1.0, top_p=0.5).probs(torch.zeros(4))
    assert probs.tolist() == [0.5, 0.5, 0, 0]


def test_top_p_always_keeps_the_most_likely_token() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    probs = Sampling(1.0, top_p=1e-9).probs(logits)
    assert float(probs[logits.argmax()]) == 1 and int((probs > 0).sum()) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-60, 1e-300, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1.0, 100.0, 3e38])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float, scale: float) -> None:
    logits = torch.tensor([-1.0, 0.25, 1.0, 0.5]) * scale
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=2, top_p=0.9)):
        probs = sampling.probs(logits)
        assert bool(torch.isfinite(probs).all()) and float(probs.sum()) == pytest.approx(1)
        if temperature < 1:
            assert probs.tolist() == [0, 0, 1, 0]


def test_minus_infinity_is_probability_zero() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    for sampling in (*SETTINGS, Sampling(0.0)):
        probs = sampling.probs(logits)
        assert probs[[0, 2]].tolist() == [0, 0] and float(probs.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"temperature": -0.1}, r"temperature -0\.1 given"),
        ({"temperature": math.nan}, "temperature nan given"),
        ({"temperature": math.inf}, "temperature inf given"),
        ({"top_k": -1}, "top-k -1 given"),
        ({"top_p": 0.0}, r"top-p 0\.0 given"),
        ({"top_p": 1.1}, r"top-p 1\.1 given"),
        ({"top_p": math.nan}, "top-p nan given"),
    ],
)
def test_values_without_a_meaning_are_refused(settings: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Sampling(**settings)  # type: ignore[arg-type]


# draw


GRID = 10_000


def grid() -> Tensor:
    """Uniforms at the middles of GRID equal parts of [0, 1)."""
    return (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_over_a_fine_grid_each_token_has_its_share(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 2, 5, 40):
        weights = torch.rand(vocab_size, generator=generator, dtype=dtype) ** 2
        weights[torch.rand(vocab_size, generator=generator) < 0.3] = 0
        weights[-1] = weights[-1].clamp(min=0.1)
        probs = weights / weights.sum()
        tokens = draw(probs.expand(GRID, -1), grid())
        shares = torch.bincount(tokens, minlength=vocab_size).double() / GRID
        assert float((shares - probs.double()).abs().max()) <= 1.5 / GRID
        assert bool((shares[probs == 0] == 0).all())


def test_the_token_is_the_inverse_of_the_cumulative_law() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    found = [int(draw(probs, torch.tensor(u))) for u in (0.0, 0.24, 0.25, 0.5, 0.74, 0.75, 0.99)]
    assert found == [0, 0, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-24, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, dtype: torch.dtype) -> None:
    cases = [
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 0.3, 0.0, 0.7, 0.0, 0.0],
        [0.0, 0.1, 0.2, 0.7 - 1e-9, 0.0],
        [1e-30, 0.0, 1.0, 1e-30, 0.0],
        [0.5, 0.0, 0.0, 0.0, 0.5],
    ]
    for case in cases:
        probs = torch.tensor(case, dtype=dtype)
        token = int(draw(probs, torch.tensor(uniform, dtype=torch.float64)))
        assert float(probs[token]) > 0


def test_probabilities_need_not_sum_to_one_exactly() -> None:
    # A float32 softmax over a wide vocabulary sums to one only nearly.
    for scale in (0.999, 1.001):
        probs = torch.tensor([0.25, 0.25, 0.5]) * scale
        tokens = draw(probs.expand(GRID, -1), grid())
        shares = (torch.bincount(tokens, minlength=3).double() / GRID).tolist()
        assert shares == pytest.approx([0.25, 0.25, 0.5], abs=1.5 / GRID)


def test_a_wide_float32_vocabulary_keeps_its_rare_tokens() -> None:
    # Added in float32, none of the rare ones would move the sum.
    probs = torch.full((100_000,), 1e-9)
    probs[0] = 1.0
    share = 100_000 * 1e-9
    uniform = (1 + share * torch.tensor([0.25, 0.5, 0.75]).double()) / (1 + share)
    wanted = torch.tensor([25_000, 50_000, 75_000])
    assert int((draw(probs.expand(3, -1), uniform) - wanted).abs().max()) <= 2


def test_rows_are_drawn_each_by_its_own_uniform() -> None:
    probs = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]]])
    uniform = torch.tensor([[0.7, 0.7], [0.1, 0.1]])
    assert draw(probs, uniform).tolist() == [[1, 0], [1, 0]]
