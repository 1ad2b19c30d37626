"""Rows with the drafter's own responses, and the texts that a drafter writes."""

from typing import Any

import pytest
import torch

from distill.features import FeatureSource, PackedRow
from distill.generate import batched_generate
from heads.base import Needs
from heads.draft_model import DraftModel, DraftModelConfig
from infer.sampling import Sampling
from infer.target import TargetModel
from train.recipe import OnPolicySection
from train.rewriting import last_response, with_responses

TOKENS = [1, 20, 21, 22, 23, 1, 30, 31, 40, 41, 42, 0]
MASK = [0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0]
SEGMENTS = [1] * 5 + [2] * 6 + [0]
POSITIONS = [*range(5), *range(6), 0]


def row() -> PackedRow:
    tokens, mask, segments, positions = map(torch.tensor, (TOKENS, MASK, SEGMENTS, POSITIONS))
    return PackedRow(0, tokens, mask.bool(), segments, positions, ("a", "b"))


def test_the_last_response_is_found() -> None:
    assert last_response(row(), 1) == (0, 2, 5)
    assert last_response(row(), 2) == (5, 9, 11)


def test_a_shorter_response_closes_the_row_up() -> None:
    new = with_responses(row(), {1: [50, 51]})
    assert new.tokens_T.tolist() == [1, 20, 50, 51, 1, 30, 31, 40, 41, 42, 0, 0]
    assert new.loss_mask_T.long().tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0]
    assert new.segments_T.tolist() == [1] * 4 + [2] * 6 + [0] * 2
    assert new.positions_T.tolist() == [*range(4), *range(6), 0, 0]
    assert new.num_tokens == 10


def test_states_of_a_changed_row_are_those_of_its_own_text(tiny_target: TargetModel) -> None:
    needs = Needs(final_hidden=True, captured_layers=(1, 3))
    source, new = FeatureSource(tiny_target, needs, 1.0), with_responses(row(), {2: [60]})
    ours = source.changed(new, [2], row())
    whole = FeatureSource(tiny_target, needs, 0.0).states(new)
    torch.testing.assert_close(ours.hidden_TD, whole.hidden_TD)
    assert ours.captured_TAD is not None and whole.captured_TAD is not None
    torch.testing.assert_close(ours.captured_TAD, whole.captured_TAD)
    assert ours.row == new or ours.row.tokens_T.tolist() == new.tokens_T.tolist()


def student(target: TargetModel) -> DraftModel:
    config = DraftModelConfig.model_validate({"student": {"layers": 2}})
    return DraftModel.create(config, target.identity, target.shared).eval()


def test_a_written_text_is_the_drafters_own_greedy_text(tiny_target: TargetModel) -> None:
    """A student of all layers writes what the target writes; one of fewer what it drafts."""
    prompts = [[1, 20, 21], [1, 20, 30, 31, 32], [1, 50]]
    whole = DraftModelConfig.model_validate({"student": {"layers": 3}})
    drafter = DraftModel.create(whole, tiny_target.identity, tiny_target.shared).eval()
    writer, greedy = drafter.writer(tiny_target.end_tokens), Sampling()
    ours = batched_generate(writer, prompts, 12, greedy, [0] * 3)
    assert ours == batched_generate(tiny_target, prompts, 12, greedy, [0] * 3)
    few = student(tiny_target).writer(tiny_target.end_tokens)
    together = batched_generate(few, prompts, 12, greedy, [0] * 3)
    assert together == [batched_generate(few, [p], 12, greedy, [0])[0] for p in prompts]
    assert together != ours


def test_a_drawn_text_is_its_seeds_alone(tiny_target: TargetModel) -> None:
    writer = student(tiny_target).writer(tiny_target.end_tokens)
    prompts, sampling = [[1, 20, 21], [1, 50]], Sampling(1.0)
    both = batched_generate(writer, prompts, 8, sampling, [5, 6])
    assert both[1] == batched_generate(writer, prompts[1:], 8, sampling, [6])[0]


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, [0.25, 0.25, 0.25]),
        ({"begin": 0.5}, [0.0, 0.25, 0.25]),
        ({"schedule": "linear", "share": 1.0}, [0.0, 0.5, 1.0]),
        ({"schedule": "linear", "share": 1.0, "begin": 0.5}, [0.0, 0.0, 1.0]),
    ],
)
def test_the_share_follows_its_schedule(fields: dict[str, Any], shares: list[float]) -> None:
    section = OnPolicySection.model_validate(fields)
    assert [section.share_at(progress) for progress in (0.0, 0.5, 1.0)] == shares
