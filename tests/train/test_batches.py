"""Packing, the order of rows, and what a batch holds."""

import pytest
import torch

from distill.criterion import ChunkedCriterion
from distill.features import FeatureSource
from distill.losses import LossSettings
from heads.base import Needs, drafter_class
from infer.target import TargetModel
from tests.train.runs import make_rows
from train.batches import RowStream, collate, pack, share

HIDDEN = Needs(final_hidden=True)


def test_every_token_is_packed_once_and_in_order() -> None:
    rows = make_rows(30, 160)
    packing = pack(rows, 48, seed=1)
    by_id = {row.id: row for row in rows}
    seen = []
    for packed in packing.rows:
        assert len(packed.tokens_T) == 48
        for segment, name in enumerate(packed.ids, start=1):
            here = packed.segments_T == segment
            row = by_id[name]
            assert packed.tokens_T[here].tolist() == row.tokens
            assert packed.loss_mask_T[here].tolist() == row.loss_mask
            assert packed.positions_T[here].tolist() == list(range(len(row.tokens)))
            seen.append(name)
    assert sorted(seen) == sorted(by_id)
    assert packing.num_tokens == sum(len(row.tokens) for row in rows)


def test_packing_depends_on_the_seed_alone() -> None:
    rows = make_rows(30, 160)
    first, again, other = (pack(rows, 48, seed) for seed in (1, 1, 2))
    assert [row.ids for row in first.rows] == [row.ids for row in again.rows]
    assert [row.ids for row in first.rows] != [row.ids for row in other.rows]


def test_conversation_longer_than_a_row_is_cut_and_counted() -> None:
    rows = make_rows(12, 160)
    longest = max(len(row.tokens) for row in rows)
    packing = pack(rows, longest - 1, seed=0)
    assert packing.num_cut == sum(len(row.tokens) == longest for row in rows)
    assert packing.num_tokens == sum(min(len(row.tokens), longest - 1) for row in rows)


def test_packed_rows_have_the_loss_of_the_conversations_alone(tiny_target: TargetModel) -> None:
    """Packed without attention across conversations: sums over rows equal sums one by one."""
    rows = make_rows(9, 160)
    drafter = drafter_class("medusa").create(
        drafter_class("medusa").Config(kind="medusa", num_heads=3),
        tiny_target.identity,
        tiny_target.shared,
    )
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(5))
    sums = []
    for packing in (pack(rows, 80, 0), *(pack([row], 80, 0) for row in rows)):
        features = FeatureSource(tiny_target, HIDDEN, 1.0)
        states = [features.states(row) for row in packing.rows]
        batch = collate(states, tiny_target.device)
        criterion = ChunkedCriterion(batch, LossSettings(), tiny_target.shared.lm_head_VD)
        steps = drafter(batch, criterion)
        sums.append([[float(s.loss_sum.detach()), float(s.num_positions)] for s in steps])
    together, alone = torch.tensor(sums[0]), torch.tensor(sums[1:]).sum(0)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    stream = RowStream(num_rows=7, per_step=3, seed=4)
    visited = [row for step in range(14) for row in stream.rows(step)]
    epochs = [visited[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert RowStream(7, 3, 4).rows(9) == visited[27:30]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_processes_share_the_same_global_batch(processes: int, accumulation: int) -> None:
    rows = list(range(100, 116))
    shares = [share(rows, process, processes, 2) for process in range(processes)]
    assert all(len(micro) == accumulation for micro in shares)
    together = [shares[r][a] for a in range(accumulation) for r in range(processes)]
    assert [row for micro in together for row in micro] == rows
