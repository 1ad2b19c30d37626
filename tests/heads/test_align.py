"""Targets against inputs: the one place where they shift."""

import random

import pytest
import torch

from heads.align import IGNORE, draft_targets, shift_left, teacher_positions


def test_shifting_brings_later_values_forward() -> None:
    values = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert shift_left(values, 0, -1).tolist() == values.tolist()
    assert shift_left(values, 1, -1).tolist() == [[2, 3, 4, -1], [6, 7, 8, -1]]
    assert shift_left(values, 3, -1).tolist() == [[4, -1, -1, -1], [8, -1, -1, -1]]
    for by in (4, 9):
        assert shift_left(values, by, -1).tolist() == [[-1] * 4] * 2


def test_draft_step_zero_is_paired_with_the_token_after_the_next() -> None:
    tokens = torch.tensor([[10, 11, 12, 13]])
    every, one = torch.ones_like(tokens).bool(), torch.ones_like(tokens)
    assert draft_targets(tokens, every, one, 0).tolist() == [[12, 13, IGNORE, IGNORE]]
    assert draft_targets(tokens, every, one, 1).tolist() == [[13, IGNORE, IGNORE, IGNORE]]
    assert draft_targets(tokens, every, one, 2).tolist() == [[IGNORE] * 4]


def test_only_supervised_tokens_are_targets() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    mask = torch.tensor([[False, False, False, True, True]])
    found = draft_targets(tokens, mask, torch.ones_like(tokens), 0)
    # The token at 3 is a target; that the mask is false where it is predicted from does not matter.
    assert found.tolist() == [[IGNORE, 13, 14, IGNORE, IGNORE]]


def test_no_target_comes_from_another_conversation_or_from_padding() -> None:
    tokens = torch.tensor([[10, 11, 12, 20, 21, 22, 0, 0]])
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 0, 0]])
    found = draft_targets(tokens, torch.ones_like(tokens).bool(), segments, 0)
    assert found.tolist() == [[12, IGNORE, IGNORE, 22, IGNORE, IGNORE, IGNORE, IGNORE]]


@pytest.mark.parametrize("step", range(4))
def test_targets_equal_their_slow_twin(step: int) -> None:
    rng = random.Random(step)
    length = 24
    for _ in range(5):
        tokens = [rng.randrange(1, 99) for _ in range(length)]
        mask = [rng.random() < 0.6 for _ in range(length)]
        cuts = sorted(rng.sample(range(length), 2))
        segments = [1 if t < cuts[0] else 2 if t < cuts[1] else 0 for t in range(length)]
        expected = []
        for t in range(length):
            at = t + 2 + step
            inside = at < length and segments[t] == segments[at] != 0
            expected.append(tokens[at] if inside and mask[at] else IGNORE)
        found = draft_targets(
            torch.tensor([tokens]), torch.tensor([mask]), torch.tensor([segments]), step
        )
        assert found.tolist() == [expected]


def test_the_inputs_are_left_alone() -> None:
    tokens, segments = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long)
    mask = torch.ones(1, 3).bool()
    draft_targets(tokens, mask, segments, 0).fill_(7)
    shift_left(tokens, 0, 0).fill_(7)
    assert tokens.tolist() == [[1, 2, 3]] and bool(mask.all()) and bool((segments == 1).all())


@pytest.mark.parametrize("step", range(3))
def test_the_teacher_of_a_step_predicts_that_steps_target(step: int) -> None:
    # The target's own state at position t predicts token t + 1.
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    predicted = shift_left(tokens, 1, IGNORE)[0]
    targets = draft_targets(tokens, torch.ones_like(tokens).bool(), torch.ones_like(tokens), step)[
        0
    ]
    teachers = teacher_positions(6, step, torch.device("cpu"))
    supervised = targets != IGNORE
    assert torch.equal(predicted[teachers][supervised], targets[supervised])
    assert int(supervised.sum()) == 4 - step and int(teachers.max()) == 5


def test_teacher_positions_stay_inside_the_row() -> None:
    assert teacher_positions(4, 0, torch.device("cpu")).tolist() == [1, 2, 3, 3]
    assert teacher_positions(2, 5, torch.device("cpu")).tolist() == [1, 1]
