"""What an optimizer step divides its loss by, and what it logs."""

import torch

from distill.features import PackedRow
from tests.train.runs import Recipes, make_rows, records, train_here
from train.batches import pack
from train.stepping import loss_count


def test_loss_counts_positions_or_conversations_that_have_one() -> None:
    rows = make_rows(12, 160)
    for packed in pack(rows, 64, seed=0).rows:
        assert loss_count(packed, per_sequence=False) == packed.num_supervised
        assert loss_count(packed, per_sequence=True) == len(packed.ids)
    zeros = torch.zeros(6, dtype=torch.long)
    segments = torch.tensor([1, 1, 1, 2, 2, 0])
    mask = torch.tensor([True, True, True, True, True, False])
    row = PackedRow(0, zeros, mask, segments, zeros, ("long enough", "too short"))
    assert loss_count(row, per_sequence=True) == 1


def test_logged_loss_is_a_mean_over_positions_also_where_conversations_count_alike(
    recipes: Recipes,
) -> None:
    plain, alike = (
        train_here(recipes(name, stop={"max_steps": 1}, loss={"per_sequence": alike}))
        for name, alike in (("plain", False), ("alike", True))
    )
    a, b = records(plain, "train")[0], records(alike, "train")[0]
    assert (a["loss"], a["losses"]) == (b["loss"], b["losses"])
    assert a["grad_norm"] != b["grad_norm"]
