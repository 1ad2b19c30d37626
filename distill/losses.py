"""What a drafter's logits are held against: losses by name, each with a `_ref` twin.

A fused loss reads one block of float32 (or float64) logits, gives the losses of its positions and
leaves the gradient in the logits' place. `distill/criterion.py` feeds it block by block.

Shapes: N positions, S positions of a block, V (draft) vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.errors import UserError, unknown_name


@dataclass(frozen=True)
class LossSettings:
    """Which loss, by name. `temperature` softens both distributions of a loss with a teacher."""

    name: str = "ce"
    temperature: float = 1.0
    chunk_size: int = 512

    def __post_init__(self) -> None:
        """Refuse a loss that is not there and values without a meaning."""
        if self.name not in LOSSES:
            raise unknown_name("loss", self.name, LOSSES)
        if self.temperature <= 0 or self.chunk_size < 1:
            raise UserError(
                f"loss temperature {self.temperature} and chunk_size {self.chunk_size} given; "
                "expected a positive temperature and a chunk of at least 1 position"
            )
        if self.temperature != 1 and not LOSSES[self.name].teacher:
            raise UserError(
                f"loss.temperature {self.temperature} given for loss {self.name!r}, which has no "
                "teacher to soften; leave it at 1 or take a loss with a teacher"
            )


def cross_entropy(logits_SV: Tensor, targets_S: Tensor, best_S: Tensor) -> Tensor:
    """-log q(target) [S]; the logits are overwritten by its gradient, q - onehot(target)."""
    at_target = logits_SV.gather(1, targets_S[:, None])[:, 0]
    log_sum = _softmax_(logits_SV, best_S)
    logits_SV[torch.arange(len(targets_S), device=targets_S.device), targets_S] -= 1
    return log_sum - at_target


def cross_entropy_ref(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The same on whole tensors, gradient by autograd: [N]."""
    return F.cross_entropy(logits_NV, targets_N, reduction="none")


def forward_kl(logits_SV: Tensor, best_S: Tensor, teacher_SV: Tensor, temperature: float) -> Tensor:
    """KL(p || q) [S], p the teacher's distribution and q the drafter's, both at `temperature`.

    The logits are overwritten by the gradient, (q - p) / temperature; the teacher's logits by p.
    With z the teacher's logits and x the drafter's: KL = E_p[z - x] - logsumexp(z) + logsumexp(x).
    """
    if temperature != 1:
        logits_SV /= temperature
        teacher_SV /= temperature
    gap_SV = teacher_SV - logits_SV
    teacher_sum = _softmax_(teacher_SV, teacher_SV.argmax(-1))
    log_sum = _softmax_(logits_SV, best_S)
    divergence: Tensor = torch.linalg.vecdot(teacher_SV, gap_SV) - teacher_sum + log_sum
    logits_SV -= teacher_SV
    if temperature != 1:
        logits_SV /= temperature
    return divergence


def forward_kl_ref(logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """The same on whole tensors, gradient by autograd: [N]."""
    teacher = (teacher_NV / temperature).log_softmax(-1)
    drafter = (logits_NV / temperature).log_softmax(-1)
    return (teacher.exp() * (teacher - drafter)).sum(-1)


def _softmax_(logits_SV: Tensor, best_S: Tensor) -> Tensor:
    """Overwrite logits by their softmax; gives the logsumexp [S]. `best_S` is their argmax."""
    top = logits_SV.gather(1, best_S[:, None])
    torch.softmax(logits_SV, -1, out=logits_SV)
    return (top - logits_SV.gather(1, best_S[:, None]).log())[:, 0]


class Block(NamedTuple):
    """One block of positions as a loss sees it; `teacher_SV` only for a loss with a teacher."""

    logits_SV: Tensor
    targets_S: Tensor
    best_S: Tensor
    teacher_SV: Tensor | None
    temperature: float


@dataclass(frozen=True)
class Loss:
    """A registered loss.

    `fused` gives the losses [S] of a block and overwrites its logits by their gradient; `ref`
    gives the same losses from (logits, targets, teacher logits or None, temperature).
    """

    fused: Callable[[Block], Tensor]
    ref: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    teacher: bool = False


def _taught(teacher: Tensor | None) -> Tensor:
    assert teacher is not None
    return teacher


LOSSES: dict[str, Loss] = {
    "ce": Loss(
        lambda b: cross_entropy(b.logits_SV, b.targets_S, b.best_S),
        lambda logits, targets, teacher, temperature: cross_entropy_ref(logits, targets),
    ),
    "forward_kl": Loss(
        lambda b: forward_kl(b.logits_SV, b.best_S, _taught(b.teacher_SV), b.temperature),
        lambda logits, targets, teacher, temperature: forward_kl_ref(
            logits, _taught(teacher), temperature
        ),
        teacher=True,
    ),
}
