"""Draft vocabularies."""

import re

import pytest
import torch

from heads.align import IGNORE
from heads.errors import UserError
from heads.vocab import VocabMap, label


def vocab(*ids: int, size: int = 10) -> VocabMap:
    return VocabMap(torch.tensor(ids, dtype=torch.long), size)


def test_ids_go_to_the_target_and_back() -> None:
    kept = vocab(1, 4, 9)
    draft_ids = torch.tensor([[0, 2], [1, 1]])
    assert kept.to_target(draft_ids).tolist() == [[1, 9], [4, 4]]
    assert torch.equal(kept.to_draft(kept.to_target(draft_ids)), draft_ids)
    assert len(kept) == 3


def test_a_token_outside_the_draft_vocabulary_is_ignored() -> None:
    found = vocab(1, 4, 9).to_draft(torch.tensor([0, 1, IGNORE, 4, 5, 9]))
    assert found.tolist() == [IGNORE, 0, IGNORE, 1, IGNORE, 2]


def test_the_most_frequent_tokens_are_kept_the_lowest_first_among_ties() -> None:
    counts = torch.tensor([5, 0, 7, 5, 5, 1])
    assert VocabMap.from_counts(counts, 3).target_ids_Vd.tolist() == [0, 2, 3]
    assert VocabMap.from_counts(counts, 6).target_ids_Vd.tolist() == list(range(6))
    assert VocabMap.from_counts(counts, 3).vocab_size == 6


def test_special_tokens_are_always_kept() -> None:
    counts = torch.tensor([5, 0, 7, 5, 5, 1])
    assert VocabMap.from_counts(counts, 3, always=[1, 5, 1]).target_ids_Vd.tolist() == [1, 2, 5]
    assert VocabMap.from_counts(counts, 2, always=[1, 5]).target_ids_Vd.tolist() == [1, 5]


def test_ids_that_never_occur_fill_up_from_the_lowest() -> None:
    counts = torch.tensor([0, 0, 3, 0, 0, 1])
    assert VocabMap.from_counts(counts, 4).target_ids_Vd.tolist() == [0, 1, 2, 5]
    assert VocabMap.from_counts(counts, 4, always=[4]).target_ids_Vd.tolist() == [0, 2, 4, 5]


def test_the_digest_is_of_the_ids_alone() -> None:
    assert vocab(1, 4, 9).digest == vocab(1, 4, 9, size=20).digest != vocab(1, 4, 8).digest
    assert re.fullmatch("[0-9a-f]{16}", vocab(1, 4, 9).digest)
    assert label(None) == "full"
    assert label(torch.tensor([1, 4, 9])) == f"reduced:3:{vocab(1, 4, 9).digest}"


def test_counting_leaves_the_counts_alone() -> None:
    counts = torch.tensor([5.0, 0.0, 7.0], dtype=torch.float64)
    VocabMap.from_counts(counts, 2, always=[1])
    assert counts.tolist() == [5, 0, 7]


def test_more_special_tokens_than_room_are_refused() -> None:
    with pytest.raises(UserError, match=r"of 2 was asked for, but 3 tokens"):
        VocabMap.from_counts(torch.tensor([5, 0, 7, 5]), 2, always=[0, 1, 3])


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_size_that_the_target_does_not_have_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"vocabulary of {size} was asked for; expected 1 to 4"):
        VocabMap.from_counts(torch.tensor([5, 0, 7, 5]), size)


@pytest.mark.parametrize("ids", [[], [1, 1], [4, 1], [[1, 2]]])
def test_ids_that_do_not_ascend_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="ascending, distinct"):
        VocabMap(torch.tensor(ids, dtype=torch.long), 10)


@pytest.mark.parametrize("ids", [[-1, 3], [3, 10]])
def test_ids_outside_the_target_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="outside the target's vocabulary of 10"):
        vocab(*ids)
