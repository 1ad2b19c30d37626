"""The chunked losses against their whole-tensor twins."""

import pytest
import torch
from torch import Tensor

from distill.criterion import ChunkedCriterion, Workspace, loss_memory_gib, step_loss_ref
from distill.losses import LOSSES, LossSettings
from heads.base import StepLoss, TrainingBatch
from heads.errors import UserError
from heads.vocab import VocabMap

B, T, D, V = 2, 40, 8, 21
VOCAB = VocabMap(torch.tensor([0, 1, 3, 4, 7, 8, 9, 12, 15, 19]), V)


def batch(dtype: torch.dtype = torch.float64, mask: str = "some") -> TrainingBatch:
    make = torch.Generator().manual_seed(3)
    segments = torch.ones(B, T, dtype=torch.long)
    segments[0, 17:] = 2
    segments[1, 33:] = 0
    masks = {
        "all": torch.ones(B, T, dtype=torch.bool),
        "some": torch.rand(B, T, generator=make) < 0.6,
        "none": torch.zeros(B, T, dtype=torch.bool),
    }
    return TrainingBatch(
        tokens_BT=torch.randint(0, V, (B, T), generator=make),
        loss_mask_BT=masks[mask],
        segments_BT=segments,
        positions_BT=torch.arange(T).expand(B, T),
        hidden_BTD=torch.randn(B, T, D, generator=make, dtype=torch.float64).to(dtype),
    )


def tensors(vocab: VocabMap | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Drafter states, an output matrix, the target's output matrix."""
    make = torch.Generator().manual_seed(4)
    rows = V if vocab is None else len(vocab)
    shapes = (B, T, D), (rows, D), (V, D)
    return tuple(torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)


def gradients(step: StepLoss, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(step.loss_sum * 0.37, inputs)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole", "draft"])
@pytest.mark.parametrize("mask", ["all", "some", "none"])
@pytest.mark.parametrize("chunk_size", [1, 7, 33, 512])
def test_chunked_loss_equals_the_whole_one(
    name: str, vocab: VocabMap | None, mask: str, chunk_size: int
) -> None:
    temperature = 1.7 if LOSSES[name].teacher else 1.0
    settings = LossSettings(name, temperature, chunk_size)
    hidden, weight, lm_head = tensors(vocab)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    for step in (0, 3):
        fast = ChunkedCriterion(batch(mask=mask), settings, lm_head, num_ranks=5)(
            hidden, weight, step=step, vocab=vocab
        )
        slow = step_loss_ref(
            batch(mask=mask), settings, lm_head, hidden, weight, step, vocab, num_ranks=5
        )
        torch.testing.assert_close(fast.loss_sum, slow.loss_sum)
        assert torch.equal(fast.num_positions, slow.num_positions)
        assert fast.rank_counts_K.tolist() == slow.rank_counts_K.tolist()
        if mask != "none":
            torch.testing.assert_close(
                gradients(fast, hidden, weight), gradients(slow, hidden, weight)
            )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_pass_gradcheck(name: str) -> None:
    hidden, weight, lm_head = tensors(VOCAB)
    settings = LossSettings(name, 0.8 if LOSSES[name].teacher else 1.0, chunk_size=5)
    whole = batch()
    few = TrainingBatch(
        tokens_BT=whole.tokens_BT[:1, 10:22],
        loss_mask_BT=whole.loss_mask_BT[:1, 10:22],
        segments_BT=whole.segments_BT[:1, 10:22],
        positions_BT=whole.positions_BT[:1, 10:22],
        hidden_BTD=whole.hidden_BTD[:1, 10:22],
    )
    criterion = ChunkedCriterion(few, settings, lm_head)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return criterion(hidden, weight, step=1, vocab=VOCAB).loss_sum

    hidden = hidden[:1, 10:22].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (hidden, weight.requires_grad_()))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_bf16_matmuls_keep_float32_statistics(name: str) -> None:
    hidden, weight, lm_head = tensors(None, torch.bfloat16)
    settings, step = LossSettings(name, chunk_size=16), 0
    exact = step_loss_ref(
        batch(torch.bfloat16), settings, lm_head.float(), hidden.float(), weight.float(), step
    )
    hidden = hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = ChunkedCriterion(batch(torch.bfloat16), settings, lm_head)(hidden, weight, step=step)
    assert fast.loss_sum.dtype == torch.float32
    torch.testing.assert_close(fast.loss_sum, exact.loss_sum, rtol=3e-3, atol=0)
    (gradient,) = torch.autograd.grad(fast.loss_sum, hidden)
    assert gradient.dtype == torch.bfloat16 and bool(torch.isfinite(gradient).all())


def test_trained_matrix_of_float32_gets_a_float32_gradient_under_autocast() -> None:
    hidden, weight, lm_head = tensors(None, torch.float32)
    weight = weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = ChunkedCriterion(batch(torch.float32), LossSettings(), lm_head)(
            hidden, weight, step=0
        )
    slow = step_loss_ref(batch(torch.float32), LossSettings(), lm_head, hidden, weight, 0)
    (got,), (want,) = gradients(fast, weight), gradients(slow, weight)
    assert got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < 0.02


def test_loss_of_a_token_that_is_nearly_impossible_is_finite() -> None:
    hidden, weight, lm_head = tensors(None)
    one = batch(mask="all")
    fast = ChunkedCriterion(one, LossSettings(), lm_head)(hidden * 300, weight, step=0)
    slow = step_loss_ref(one, LossSettings(), lm_head, hidden * 300, weight, 0)
    torch.testing.assert_close(fast.loss_sum, slow.loss_sum)
    fast32 = ChunkedCriterion(one, LossSettings(), lm_head)(
        hidden.float() * 300, weight.float(), step=0
    )
    torch.testing.assert_close(fast32.loss_sum.double(), slow.loss_sum, rtol=1e-5, atol=0)


def test_teacher_that_agrees_with_the_drafter_leaves_no_loss() -> None:
    one = batch(mask="all")
    _, _, lm_head = tensors(None)
    same = one.hidden_BTD.roll(-1, dims=1).requires_grad_()
    loss = ChunkedCriterion(one, LossSettings("forward_kl"), lm_head)(same, lm_head, step=0)
    assert float(loss.loss_sum.detach()) == pytest.approx(0, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.loss_sum, same)
    assert float(gradient.abs().max()) < 1e-9


def test_equal_logits_are_ranked_by_lowest_id() -> None:
    one = batch(mask="all")
    hidden, weight, lm_head = tensors(None)
    flat = ChunkedCriterion(one, LossSettings(), lm_head, num_ranks=3)(
        hidden, torch.zeros_like(weight), step=0
    )
    targets = torch.cat([one.tokens_BT[0, 2:17], one.tokens_BT[0, 19:], one.tokens_BT[1, 2:33]])
    assert flat.rank_counts_K.tolist() == [int((targets == rank).sum()) for rank in range(3)]


def test_evaluation_without_gradients_gives_the_same_sums() -> None:
    hidden, weight, lm_head = tensors(None)
    space = Workspace()
    criterion = ChunkedCriterion(batch(), LossSettings(), lm_head, workspace=space)
    trained = criterion(hidden.clone().requires_grad_(), weight, step=0)
    with torch.no_grad():
        watched = criterion(hidden, weight, step=0)
    assert torch.equal(trained.loss_sum.detach(), watched.loss_sum)
    assert not watched.loss_sum.requires_grad


def test_memory_estimate_grows_with_the_chunk_and_not_with_the_vocabulary_times_positions() -> None:
    def memory(chunk: int, positions: int) -> float:
        return loss_memory_gib(
            LossSettings(chunk_size=chunk),
            num_positions=positions,
            hidden_size=576,
            vocab_size=49_152,
        )

    assert memory(512, 8_192) < 0.1
    assert memory(8_192, 8_192) > 0.7
    assert memory(512, 8_192) - memory(512, 1_024) < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "foward_kl"}, "did you mean 'forward_kl'"),
        ({"name": "ce", "temperature": 2.0}, "no teacher"),
        ({"name": "ce", "chunk_size": 0}, "at least 1 position"),
    ],
)
def test_bad_loss_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LossSettings(**settings)  # type: ignore[arg-type]
