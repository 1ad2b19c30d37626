"""The target's states for packed rows."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from distill.features import FeatureSource, PackedRow, features_gib
from heads.base import Needs
from heads.errors import UserError
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


def test_conversation_whose_states_are_nan_is_named(tiny_target: TargetModel) -> None:
    weight = tiny_target.model.get_input_embeddings().weight
    before = weight.detach().clone()
    only_in_second = next(
        int(t) for t in row().tokens_T[9:15] if int(t) not in row().tokens_T[:9].tolist()
    )
    try:
        with torch.no_grad():
            weight[only_in_second] = float("nan")
        with pytest.raises(UserError, match="states of conversation second hold NaN"):
            FeatureSource(tiny_target, NEEDS, 1.0).states(row())
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_nothing_is_computed_for_a_drafter_that_needs_nothing(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "forward", None)
    states = FeatureSource(tiny_target, Needs(), 1.0).states(row())
    assert states.hidden_TD.shape == (15, 0) and states.captured_TAD is None
