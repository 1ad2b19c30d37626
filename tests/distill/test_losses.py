"""Each fused loss against its twin, and what a block of several of them adds up to."""

import pytest
import torch
from torch import Tensor

from distill.divergences import TeacherBlock, Whole
from distill.losses import LOSSES, LossSettings, block_losses, smooth_l1
from heads.errors import UserError

S, V = 9, 23
TAUGHT = sorted(name for name in LOSSES if LOSSES[name].teacher)
LOGITS = ["plain", "ties", "equal", "far", "extreme"]


def logits(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Drafter's logits, teacher's logits, targets."""
    make = torch.Generator().manual_seed(3)
    drafter, teacher = (torch.randn(S, V, generator=make, dtype=torch.float64) for _ in range(2))
    if kind == "ties":
        drafter, teacher = drafter.round(), teacher.round()
    elif kind == "equal":
        teacher = drafter.clone()
    elif kind == "far":  # probabilities that underflow in float32, not in float64
        drafter, teacher = drafter * 60, teacher * 60
    elif kind == "extreme":  # and in float64
        drafter, teacher = drafter * 3000, teacher * 3000
    targets = torch.randint(0, V, (S,), generator=make)
    return drafter.to(dtype), teacher.to(dtype), targets


def teacher_block(teacher: Tensor, temperature: float, top_k: int) -> TeacherBlock:
    log_p = (teacher / temperature).log_softmax(-1)
    p = (teacher / temperature).softmax(-1)
    neg_entropy = torch.where(p > 0, p * log_p, 0).sum(-1)
    return TeacherBlock(p, p.sum(-1), neg_entropy, teacher.topk(top_k).indices)


def fused(
    settings: LossSettings, drafter: Tensor, teacher: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses [S] and gradient of their sum [S, V]."""
    taught = teacher_block(teacher, settings.temperature, settings.top_k)
    buffers: dict[str, Tensor] = {}
    values = drafter.clone()
    losses = block_losses(
        values,
        targets,
        drafter.argmax(-1),
        taught if settings.has_teacher else None,
        settings,
        lambda name: buffers.setdefault(name, torch.full_like(drafter, float("nan"))),
    )
    return losses, values


def slow(
    settings: LossSettings, drafter: Tensor, teacher: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = drafter.clone().requires_grad_()
    whole = Whole(leaf, targets, teacher, settings.temperature, settings.top_k)
    losses = torch.zeros(S, dtype=drafter.dtype)
    for loss, weight in settings.vocabulary_terms:
        losses = losses + weight * loss.ref(whole)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("kind", LOGITS[:4])
def test_fused_loss_and_gradient_equal_the_twin(name: str, temperature: float, kind: str) -> None:
    if not LOSSES[name].teacher and temperature != 1:
        pytest.skip("no teacher to soften")
    settings = LossSettings({name: 1.3}, temperature, top_k=4)
    got, want = (how(settings, *logits(kind)) for how in (fused, slow))
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradient_of_the_twin_is_that_of_finite_differences(name: str) -> None:
    drafter, teacher, targets = logits("plain")
    if name == "lk_hybrid":
        pytest.skip("its mixing weight is held constant")

    def loss(values: Tensor) -> Tensor:
        return LOSSES[name].ref(Whole(values, targets, teacher, 1.0, 4))

    assert torch.autograd.gradcheck(loss, (drafter.requires_grad_(),))


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LOGITS)
def test_loss_and_gradient_are_finite(name: str, dtype: torch.dtype, kind: str) -> None:
    losses, gradient = fused(LossSettings({name: 1.0}, top_k=4), *logits(kind, dtype))
    assert bool(torch.isfinite(losses).all()) and bool(torch.isfinite(gradient).all())
    assert float(losses.min()) > -1e-3
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(S, dtype=dtype), rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ce", "nla"}))
@pytest.mark.parametrize("kind", LOGITS[:4])
def test_float32_losses_are_those_of_float64(name: str, kind: str) -> None:
    settings = LossSettings({name: 1.0}, top_k=4)
    drafter, teacher, targets = logits(kind, torch.float32)
    got = fused(settings, drafter, teacher, targets)
    want = slow(settings, drafter.double(), teacher.double(), targets)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.9])
def test_several_losses_add_up(temperature: float) -> None:
    terms = {name: 0.3 + number for number, name in enumerate(sorted(LOSSES))}
    settings = LossSettings(terms, temperature, top_k=4)
    got, want = (how(settings, *logits("plain")) for how in (fused, slow))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    without = LossSettings(terms | {"tv": 0.0}, temperature, top_k=4)
    only = LossSettings({"tv": terms["tv"]}, temperature)
    parts = [fused(part, *logits("plain")) for part in (without, only)]
    for number in range(2):
        torch.testing.assert_close(parts[0][number] + parts[1][number], got[number])


@pytest.mark.parametrize("name", sorted(set(TAUGHT) - {"topk_ce"}))
def test_drafter_that_agrees_with_its_teacher_has_no_loss(name: str) -> None:
    losses, gradient = fused(LossSettings({name: 1.0}), *logits("equal"))
    assert float(losses.abs().max()) < 1e-12 and float(gradient.abs().max()) < 1e-12


def test_losses_of_acceptance_are_functions_of_the_overlap() -> None:
    drafter, teacher, targets = logits("plain")
    alpha = torch.minimum(drafter.softmax(-1), teacher.softmax(-1)).sum(-1)
    values = {n: fused(LossSettings({n: 1.0}), drafter, teacher, targets)[0] for n in TAUGHT}
    torch.testing.assert_close(values["tv"], 1 - alpha)
    torch.testing.assert_close(values["nla"], -alpha.log())
    mix = (-3 * alpha).exp()
    torch.testing.assert_close(
        values["lk_hybrid"], mix * values["forward_kl"] + (1 - mix) * (1 - alpha)
    )


def test_smooth_l1_is_averaged_over_the_hidden_dimension() -> None:
    features, states = torch.tensor([[0.0, 0.0], [3.0, 0.5]]), torch.zeros(2, 2)
    expected = torch.tensor([0.0, ((3 - 0.5) + 0.125) / 2])
    torch.testing.assert_close(smooth_l1(features, states), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"terms": {"foward_kl": 1.0}}, "did you mean 'forward_kl'"),
        ({"terms": {"smooth": 1.0}}, "did you mean 'smooth_l1'"),
        ({"terms": {"ce": -1.0}}, r"loss.terms.ce is -1"),
        ({"terms": {"ce": float("nan")}}, r"loss.terms.ce is nan"),
        ({"terms": {"ce": 0.0, "tv": 0.0}}, "nothing to learn"),
        ({"terms": {}}, "nothing to learn"),
        ({"terms": {"ce": 1.0}, "temperature": 2.0}, "no teacher"),
        ({"terms": {"smooth_l1": 1.0, "tv": 0.0}, "temperature": 2.0}, "no teacher"),
        ({"chunk_size": 0}, "at least 1 position"),
        ({"terms": {"topk_ce": 1.0}, "top_k": 0}, "at least 1 token"),
    ],
)
def test_bad_loss_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LossSettings(**settings)  # type: ignore[arg-type]
