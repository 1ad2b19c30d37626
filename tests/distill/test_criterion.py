"""The criterion of a batch, in chunks, against its whole-tensor twin."""

from functools import partial

import pytest
import torch
from torch import Tensor

from distill import workspace
from distill.criterion import ChunkedCriterion, conversation_weights, step_loss_ref
from distill.losses import LOSSES, LossSettings
from distill.workspace import Workspace, loss_memory_gib
from heads.align import IGNORE
from heads.base import StepLoss, TrainingBatch
from heads.errors import UserError
from heads.vocab import VocabMap
from tests.distill.random_batch import FIELDS, TERMS, VOCAB, V, batch, gradients, tensors


def assert_equal(
    fast: StepLoss,
    slow: StepLoss,
    *inputs: Tensor,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    close(fast.loss_sum, slow.loss_sum)
    close(fast.plain_sum, slow.plain_sum)
    assert not fast.plain_sum.requires_grad
    assert torch.equal(fast.num_positions, slow.num_positions)
    assert fast.rank_counts_K.tolist() == slow.rank_counts_K.tolist()
    if fast.num_positions:
        close(gradients(fast, *inputs), gradients(slow, *inputs))


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(terms))
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole", "draft"])
@pytest.mark.parametrize("per_sequence", [False, True], ids=["positions", "conversations"])
@pytest.mark.parametrize("chunk_size", [7, 512])
def test_chunked_loss_equals_the_whole_one(
    terms: dict[str, float], vocab: VocabMap | None, per_sequence: bool, chunk_size: int
) -> None:
    temperature = 1.7 if any(n in LOSSES and LOSSES[n].teacher for n in terms) else 1.0
    settings = LossSettings(terms, temperature, chunk_size, 4, per_sequence)
    hidden, weight, lm_head, features = tensors(vocab)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, features)]
    for mask in ("all", "some", "none"):
        one = batch(mask=mask)
        criterion = ChunkedCriterion(one, settings, lm_head, num_ranks=5)
        for step in (0, 3):
            fast = criterion(hidden, weight, step=step, vocab=vocab, features_BTD=features)
            slow = step_loss_ref(
                one, settings, lm_head, hidden, weight, step, vocab, 5, features_BTD=features
            )
            assert_equal(fast, slow, *inputs)


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(terms))
@pytest.mark.parametrize("gradient_mib", [0.0, 128.0], ids=["many products", "one product"])
@pytest.mark.parametrize("teacher_cache_mib", [0.0, 256.0], ids=["computed anew", "kept"])
def test_float32_equals_the_whole_loss_of_float64(
    terms: dict[str, float], gradient_mib: float, teacher_cache_mib: float
) -> None:
    settings = LossSettings(terms, chunk_size=7, top_k=4)
    hidden, weight, lm_head, features = tensors(None, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, features)]
    one = batch(torch.float32)
    space = Workspace(teacher_cache_mib, gradient_mib)
    criterion = ChunkedCriterion(one, settings, lm_head, workspace=space)
    for step in (0, 1):
        fast = criterion(hidden, weight, step=step, features_BTD=features)
        slow = step_loss_ref(one, settings, lm_head, hidden, weight, step, features_BTD=features)
        assert fast.loss_sum.dtype == torch.float32
        assert_equal(fast, slow, *inputs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"lk_hybrid"}))
def test_gradients_pass_gradcheck(name: str) -> None:
    hidden, weight, lm_head, _ = tensors(VOCAB)
    temperature = 0.8 if LOSSES[name].teacher else 1.0
    settings = LossSettings({name: 1.0}, temperature, chunk_size=5, per_sequence=True)
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
    hidden, weight, lm_head, _ = tensors(None, torch.bfloat16)
    settings, step = LossSettings({name: 1.0}, chunk_size=16), 0
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


@pytest.mark.parametrize("gradient_mib", [0.0, 128.0])
@pytest.mark.parametrize("name", ["ce", "forward_kl"])
def test_trained_matrix_of_float32_gets_a_float32_gradient_under_autocast(
    name: str, gradient_mib: float
) -> None:
    hidden, weight, lm_head, _ = tensors(None, torch.float32)
    weight, settings = weight.requires_grad_(), LossSettings({name: 1.0}, chunk_size=16)
    space = Workspace(gradient_mib=gradient_mib)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = ChunkedCriterion(batch(torch.float32), settings, lm_head, workspace=space)(
            hidden, weight, step=0
        )
    slow = step_loss_ref(batch(torch.float32), settings, lm_head, hidden, weight, 0)
    (got,), (want,) = gradients(fast, weight), gradients(slow, weight)
    assert got is not None and want is not None and got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(terms))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_smaller_than_a_chunk_change_nothing(
    terms: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, lm_head, features = tensors(VOCAB, dtype)
    hidden = hidden.requires_grad_()
    settings, one = LossSettings(terms, chunk_size=37, top_k=4), batch(dtype)
    found = []
    for numbers in (2**19, 1):
        monkeypatch.setattr(workspace, "BLOCK_NUMBERS", numbers)
        step = ChunkedCriterion(one, settings, lm_head, num_ranks=3)(
            hidden, weight, step=1, vocab=VOCAB, features_BTD=features
        )
        found.append((step, gradients(step, hidden)))
    torch.testing.assert_close(found[0], found[1])


def test_cast_of_a_trained_matrix_follows_its_changes() -> None:
    hidden, weight, lm_head, _ = tensors(None, torch.float32)
    other = (-weight).requires_grad_()
    weight = weight.requires_grad_()
    criterion = ChunkedCriterion(batch(torch.float32), LossSettings(), lm_head)

    def check(matrix: Tensor, step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = criterion(hidden, matrix, step=step).loss_sum
        new = ChunkedCriterion(batch(torch.float32), LossSettings(), lm_head)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(got, new(hidden, matrix, step=step).loss_sum)

    check(weight, 0)
    check(weight, 1)
    check(other, 2)
    check(weight, 3)
    with torch.no_grad():
        weight.mul_(0.5)
    check(weight, 4)
    weight.data.mul_(3)  # as an engine may write, behind autograd's back
    check(weight, 0)


def test_conversations_count_alike_whatever_their_length() -> None:
    one = batch(mask="all")
    hidden, weight, lm_head, _ = tensors(None)
    settings = LossSettings(per_sequence=True)
    together = ChunkedCriterion(one, settings, lm_head)(hidden, weight, step=1)
    means = []
    for row, place in ((0, slice(0, 17)), (0, slice(17, 40)), (1, slice(0, 33))):
        part = (slice(row, row + 1), place)
        alone = TrainingBatch(
            *(getattr(one, name)[part] for name in one.__annotations__ if name in FIELDS)
        )
        step = ChunkedCriterion(alone, LossSettings(), lm_head)(hidden[part], weight, step=1)
        means.append(step.loss_sum / step.num_positions)
    torch.testing.assert_close(together.loss_sum, torch.stack(means).sum())
    plain = ChunkedCriterion(one, LossSettings(), lm_head)(hidden, weight, step=1)
    torch.testing.assert_close(together.plain_sum, plain.loss_sum)


def test_weights_of_conversations_follow_the_docstring() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 0, 0]])
    targets = torch.tensor([[5, 6, IGNORE, 7, IGNORE], [IGNORE] * 5])
    weights = conversation_weights(segments, targets)
    assert weights.tolist() == [[0.5, 0.5, 0, 1, 0], [0] * 5]


def test_drafter_without_features_is_refused_a_regression() -> None:
    hidden, weight, lm_head, _ = tensors(None)
    criterion = ChunkedCriterion(batch(), LossSettings({"smooth_l1": 1.0}), lm_head)
    with pytest.raises(UserError, match="predicts no features"):
        criterion(hidden, weight, step=0)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_of_a_token_that_is_nearly_impossible_is_finite(name: str) -> None:
    hidden, weight, lm_head, _ = tensors(None, torch.float32)
    one, settings = batch(torch.float32, mask="all"), LossSettings({name: 1.0})
    hidden = (hidden * 300).requires_grad_()
    fast = ChunkedCriterion(one, settings, lm_head)(hidden, weight, step=0)
    (gradient,) = torch.autograd.grad(fast.loss_sum, hidden)
    assert bool(torch.isfinite(fast.loss_sum)) and bool(torch.isfinite(gradient).all())
    if name == "ce":
        slow = step_loss_ref(one, settings, lm_head, hidden, weight, 0)
        torch.testing.assert_close(fast.loss_sum, slow.loss_sum, rtol=1e-5, atol=0)


def test_teacher_that_agrees_with_the_drafter_leaves_no_loss() -> None:
    one = batch(mask="all")
    lm_head = tensors(None)[2]
    same = one.hidden_BTD.roll(-1, dims=1).requires_grad_()
    settings = LossSettings({"forward_kl": 1.0, "smooth_l1": 1.0})
    loss = ChunkedCriterion(one, settings, lm_head)(same, lm_head, step=0, features_BTD=same)
    assert float(loss.loss_sum.detach()) == pytest.approx(0, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.loss_sum, same)
    assert float(gradient.abs().max()) < 1e-9


@pytest.mark.parametrize("terms", [{"ce": 1.0}, {"smooth_l1": 1.0}])
def test_equal_logits_are_ranked_by_lowest_id(terms: dict[str, float]) -> None:
    one = batch(mask="all")
    hidden, weight, lm_head, features = tensors(None)
    flat = ChunkedCriterion(one, LossSettings(terms), lm_head, num_ranks=3)(
        hidden, torch.zeros_like(weight), step=0, features_BTD=features
    )
    targets = torch.cat([one.tokens_BT[0, 2:17], one.tokens_BT[0, 19:], one.tokens_BT[1, 2:33]])
    assert flat.rank_counts_K.tolist() == [int((targets == rank).sum()) for rank in range(3)]


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(terms))
def test_evaluation_without_gradients_gives_the_same_sums(terms: dict[str, float]) -> None:
    hidden, weight, lm_head, features = tensors(None)
    space = Workspace()
    criterion = ChunkedCriterion(batch(), LossSettings(terms), lm_head, workspace=space)
    learning = hidden.clone().requires_grad_()
    trained = criterion(learning, weight, step=0, features_BTD=features)
    with torch.no_grad():
        watched = criterion(hidden, weight, step=0, features_BTD=features)
    assert torch.equal(trained.loss_sum.detach(), watched.loss_sum)
    assert not watched.loss_sum.requires_grad


def test_no_tensor_of_all_positions_and_the_vocabulary_is_made_beyond_the_budgets() -> None:
    hidden, weight, lm_head, _ = tensors(None)
    space = Workspace(teacher_cache_mib=0.0, gradient_mib=0.0)
    settings = LossSettings({"lk_hybrid": 1.0, "reverse_kl": 1.0, "topk_ce": 1.0}, chunk_size=5)
    criterion = ChunkedCriterion(batch(mask="all"), settings, lm_head, workspace=space)
    step = criterion(hidden.requires_grad_(), weight.requires_grad_(), step=0)
    gradients(step, hidden, weight)
    assert max(len(buffer) for buffer in space.buffers.values()) <= 5 * V


def test_memory_estimate_grows_with_the_chunk_and_not_with_the_vocabulary_times_positions() -> None:
    def memory(chunk: int, positions: int, trained: bool = False, **terms: float) -> float:
        return loss_memory_gib(
            LossSettings(terms or {"ce": 1.0}, chunk_size=chunk),
            num_positions=positions,
            hidden_size=576,
            vocab_size=49_152,
            trained_weight=trained,
        )

    assert memory(512, 8_192) < 0.1
    assert memory(8_192, 8_192) > 0.7
    assert memory(512, 8_192) - memory(512, 1_024) < 0.02
    budget = (workspace.TEACHER_CACHE_MIB + workspace.GRADIENT_MIB) / 1024
    for positions in (512, 2_048, 65_536):
        more = memory(512, positions, True, forward_kl=1.0) - memory(512, positions)
        assert more < budget + 0.6
