"""The target's states for packed rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from distill.features import FeatureSource, PackedRow, features_gib
from heads.base import Needs
from infer.target import TargetModel

NEEDS = Needs(final_hidden=True, captured_layers=(1, 3))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def row() -> PackedRow:
    """Conversations of 9 and 6 tokens and 5 positions of padding."""
    segments = torch.tensor([1] * 9 + [2] * 6 + [0] * 5)
    tokens = torch.randint(3, 160, (20,), generator=torch.Generator().manual_seed(1))
    return PackedRow(
        index=0,
        tokens_T=torch.where(segments > 0, tokens, 0),
        loss_mask_T=segments > 0,
        segments_T=segments,
        positions_T=torch.cat([torch.arange(9), torch.arange(6), torch.zeros(5)]).long(),
        ids=("first", "second"),
    )


def test_states_are_those_of_each_conversation_alone(tiny_target: TargetModel) -> None:
    packed = FeatureSource(tiny_target, NEEDS, 1.0).states(row())
    parts = [
        tiny_target.forward(row().tokens_T[None, place], needs=NEEDS)
        for place in (slice(0, 9), slice(9, 15))
    ]
    hidden = torch.cat([part.hidden_BND[0] for part in parts])
    torch.testing.assert_close(packed.hidden_TD, hidden, atol=1e-5, rtol=1e-5)
    captured = [part.captured_BNAD for part in parts]
    assert packed.captured_TAD is not None and all(c is not None for c in captured)
    together = torch.cat([c[0] for c in captured if c is not None])
    torch.testing.assert_close(packed.captured_TAD, together, atol=1e-5, rtol=1e-5)


def test_later_epochs_read_the_same_bits_from_memory(tiny_target: TargetModel) -> None:
    keeping, forgetful = (FeatureSource(tiny_target, NEEDS, gib) for gib in (1.0, 0.0))
    first, again = keeping.states(row()), keeping.states(row())
    assert again is first
    anew = forgetful.states(row())
    assert anew is not forgetful.states(row())
    assert torch.equal(anew.hidden_TD, first.hidden_TD)


def test_cache_keeps_to_its_budget(tiny_target: TargetModel) -> None:
    size = features_gib(15, tiny_target, NEEDS)
    assert size == 15 * 3 * 32 * 4 / 2**30
    source = FeatureSource(tiny_target, NEEDS, 1.5 * size)
    kept, dropped = (replace(row(), index=index) for index in (0, 1))
    assert source.states(kept) is source.states(kept)
    assert source.states(dropped) is not source.states(dropped)


@pytest.fixture
def poison(tiny_target: TargetModel) -> Iterator[Callable[[int], None]]:
    """Gives a token's embedding the value NaN, for the time of a test."""
    weight = tiny_target.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        yield lambda token: weight[token].fill_(float("nan"))
        weight.copy_(before)


def only_in(place: slice) -> int:
    """A token of the row that stands nowhere else."""
    tokens = row().tokens_T.tolist()
    return next(token for token in tokens[place] if tokens.count(token) == 1)


@pytest.mark.parametrize(("bad", "place"), [("first", slice(0, 9)), ("second", slice(9, 15))])
def test_conversation_whose_states_are_nan_is_dropped_and_the_other_keeps_its_bits(
    bad: str, place: slice, tiny_target: TargetModel, poison: Callable[[int], None]
) -> None:
    whole = FeatureSource(tiny_target, NEEDS, 0.0).states(row())
    poison(only_in(place))
    found = FeatureSource(tiny_target, NEEDS, 1.0).states(row())
    assert whole.dropped == () and found.dropped == (bad,)
    assert whole.captured_TAD is not None and found.captured_TAD is not None
    out = torch.zeros(20, dtype=torch.bool)
    out[place] = True
    kept = ~out[:15]
    assert torch.equal(found.hidden_TD, whole.hidden_TD[kept])
    assert torch.equal(found.captured_TAD, whole.captured_TAD[kept])
    length = int(kept.sum())
    assert found.row.segments_T.tolist() == [1] * length + [0] * (20 - length)
    for name in ("tokens_T", "loss_mask_T", "positions_T"):
        assert torch.equal(getattr(found.row, name)[:length], getattr(row(), name)[:15][kept])
        assert not getattr(found.row, name)[length:].any()
    assert found.row.num_tokens == length and found.row.num_supervised == length - 2
    assert found.row.ids == tuple(name for name in row().ids if name != bad)


def test_row_of_nothing_but_nan_is_all_padding(
    tiny_target: TargetModel, poison: Callable[[int], None]
) -> None:
    for place in (slice(0, 9), slice(9, 15)):
        poison(only_in(place))
    found = FeatureSource(tiny_target, NEEDS, 1.0).states(row())
    assert found.dropped == ("first", "second")
    assert found.row.num_tokens == found.row.num_supervised == 0 and found.row.ids == ()
    assert found.hidden_TD.shape == (0, 32) and found.captured_TAD is not None
    assert found.captured_TAD.shape == (0, 2, 32)


def test_nothing_is_computed_for_a_drafter_that_needs_nothing(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "forward", None)
    states = FeatureSource(tiny_target, Needs(), 1.0).states(row())
    assert states.hidden_TD.shape == (15, 0) and states.captured_TAD is None
