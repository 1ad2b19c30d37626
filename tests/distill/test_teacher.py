"""The target's distributions that are kept from draft step to draft step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill.criterion import ChunkedCriterion, step_loss_ref
from distill.losses import LossSettings
from distill.workspace import Workspace
from heads.base import TrainingBatch
from heads.vocab import VocabMap
from tests.distill.random_batch import VOCAB, B, D, T, batch, gradients, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole", "draft"])
@pytest.mark.parametrize("terms", [{"forward_kl": 1.0}, {"topk_ce": 1.0, "jsd": 0.5}])
def test_kept_teacher_gives_what_a_recomputed_one_gives(
    dtype: torch.dtype, vocab: VocabMap | None, terms: dict[str, float]
) -> None:
    settings = LossSettings(terms, 1.3, chunk_size=7, top_k=4)
    hidden, weight, lm_head, _ = tensors(vocab, dtype)
    hidden = hidden.requires_grad_()
    one, kept, anew = batch(dtype), Workspace(), Workspace(teacher_cache_mib=0.0)
    for step in range(6):
        pair = [
            ChunkedCriterion(one, settings, lm_head, workspace=space)(
                hidden, weight, step=step, vocab=vocab
            )
            for space in (kept, anew)
        ]
        torch.testing.assert_close(pair[0].loss_sum, pair[1].loss_sum)
        torch.testing.assert_close(gradients(pair[0], hidden), gradients(pair[1], hidden))
        assert kept.taught.step == 0 and anew.taught is None


def test_kept_teacher_is_never_that_of_another_batch_matrix_or_temperature() -> None:
    hidden, weight, lm_head, _ = tensors(None)
    space = Workspace()

    def check(one: TrainingBatch, matrix: Tensor, step: int, temperature: float = 1.0) -> None:
        settings = LossSettings({"forward_kl": 1.0}, temperature)
        fast = ChunkedCriterion(one, settings, matrix, workspace=space)(hidden, weight, step=step)
        slow = step_loss_ref(one, settings, matrix, hidden, weight, step)
        torch.testing.assert_close(fast.loss_sum, slow.loss_sum)

    first = batch()
    second = replace(first, hidden_BTD=first.hidden_BTD.flip(0))
    check(first, lm_head, 1)
    check(second, lm_head, 1)
    check(first, lm_head, 1)
    check(first, lm_head, 0)
    check(first, -lm_head, 0)
    check(first, lm_head, 0, temperature=2.0)
    first.hidden_BTD.mul_(2)
    check(first, lm_head, 0, temperature=2.0)
    for seed in range(5):  # batches that come and go may lie at one address
        noise = torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)).double()
        check(replace(first, hidden_BTD=noise), lm_head, 0)
