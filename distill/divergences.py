"""How a drafter's distribution q differs from the target's p: fused forms and slow `_ref` twins.

A fused form reads a block of positions whose softmax is already taken and tells its losses and, as
multiples of what the block holds, their gradient at the logits; `distill/losses.py` adds several up
in place. With g = dL/dq and q = softmax(x): dL/dx = q * (g - <q, g>). A `_ref` twin works on whole
logits with plain autograd.

Shapes: N positions, S positions of a block, V (draft) vocabulary, k the teacher's best tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

FLOOR = torch.finfo(torch.float32).tiny
"""Probabilities and overlaps below it are taken as it under a logarithm."""

Factor = Tensor | float
"""One for each position [S], or one for all."""


class TeacherBlock(NamedTuple):
    """p at a block's positions: `probs_SV`, their sums, sum p log p, the best tokens by p.

    The sums `mass_S` are 1 up to the rounding of the dtype in which p was kept.
    """

    probs_SV: Tensor
    mass_S: Tensor
    neg_entropy_S: Tensor
    top_Sk: Tensor | None = None


@dataclass
class Block:
    """What the losses of a block share. `scratch` gives buffers [S, V] by name."""

    probs_SV: Tensor
    targets_S: Tensor
    target_log_q_S: Tensor
    scratch: Callable[[str], Tensor]
    teacher: TeacherBlock | None = None
    log_q_SV: Tensor | None = None
    cross_S: Tensor | None = None
    top_log_q_Sk: Tensor | None = None
    plain_SV: Tensor | None = field(default=None)
    """softmax at temperature 1, where the others are at another one."""

    @property
    def taught(self) -> TeacherBlock:
        """The teacher, of a loss that has one."""
        assert self.teacher is not None
        return self.teacher

    @cached_property
    def overlap(self) -> tuple[Tensor, Tensor, Tensor]:
        """alpha = sum min(p, q) [S]; q where q < p, else 0 [S, V]; the latter's sum [S].

        d alpha / d x = below - q * mass.
        """
        q_SV, p_SV = self.probs_SV, self.taught.probs_SV
        below_SV = torch.minimum(q_SV, p_SV, out=self.scratch("below"))
        alpha_S = below_SV.sum(-1)
        torch.lt(q_SV, p_SV, out=below_SV).mul_(q_SV)
        return alpha_S, below_SV, below_SV.sum(-1)


class Share(NamedTuple):
    """A loss of a block: its values [S], its gradient q * `q` + p * `p` + `dense` + `sparse`.

    `dense`: (values [S, V], factor); `sparse`: (vocabulary ids [S, k], values [S, k]).
    """

    losses_S: Tensor
    q: Factor = 0.0
    p: Factor = 0.0
    dense: tuple[Tensor, Factor] | None = None
    sparse: tuple[Tensor, Tensor] | None = None


def cross_entropy(block: Block) -> Share:
    """-log q(target); gradient q - onehot(target)."""
    hit_S1 = -torch.ones_like(block.target_log_q_S)[:, None]
    sparse = (block.targets_S[:, None], hit_S1)
    if block.plain_SV is not None:
        return Share(-block.target_log_q_S, dense=(block.plain_SV, 1.0), sparse=sparse)
    return Share(-block.target_log_q_S, q=1.0, sparse=sparse)


def forward_kl(block: Block) -> Share:
    """KL(p || q) = sum p log p - sum p log q; gradient q - p."""
    assert block.cross_S is not None
    return Share(block.taught.neg_entropy_S + block.cross_S, q=1.0, p=-1.0)


def reverse_kl(block: Block) -> Share:
    """KL(q || p); gradient q * (log q - log p - KL)."""
    assert block.log_q_SV is not None
    gap_SV = torch.clamp_min(block.taught.probs_SV, FLOOR, out=block.scratch("reverse")).log_()
    torch.sub(block.log_q_SV, gap_SV, out=gap_SV).mul_(block.probs_SV)
    divergence_S = gap_SV.sum(-1)
    return Share(divergence_S, q=-divergence_S, dense=(gap_SV, 1.0))


def jensen_shannon(block: Block) -> Share:
    """(KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2; gradient q (log(q/m) - KL(q || m)) / 2."""
    assert block.log_q_SV is not None
    q_SV, taught = block.probs_SV, block.taught
    middle_SV = torch.add(q_SV, taught.probs_SV, out=block.scratch("middle"))
    middle_SV.mul_(0.5).clamp_min_(FLOOR).log_()
    of_p_S = taught.neg_entropy_S - torch.linalg.vecdot(taught.probs_SV, middle_SV)
    torch.sub(block.log_q_SV, middle_SV, out=middle_SV).mul_(q_SV)
    of_q_S = middle_SV.sum(-1)
    return Share((of_p_S + of_q_S) / 2, q=-of_q_S / 2, dense=(middle_SV, 0.5))


def total_variation(block: Block) -> Share:
    """sum |p - q| / 2, which is the mass less the overlap; gradient that of -alpha."""
    alpha_S, below_SV, mass_S = block.overlap
    return Share((1 + block.taught.mass_S) / 2 - alpha_S, q=mass_S, dense=(below_SV, -1.0))


def negative_log_acceptance(block: Block) -> Share:
    """-log alpha (2602.23881); gradient that of -alpha, divided by alpha."""
    alpha_S, below_SV, mass_S = block.overlap
    inverse_S = torch.where(alpha_S > FLOOR, 1 / alpha_S.clamp_min(FLOOR), 0)
    losses_S = -alpha_S.clamp_min(FLOOR).log()
    return Share(losses_S, q=mass_S * inverse_S, dense=(below_SV, -inverse_S))


def hybrid_acceptance(block: Block) -> Share:
    """l KL(p || q) + (1 - l) (1 - alpha), l = exp(-3 alpha) held constant (2602.23881)."""
    assert block.cross_S is not None
    alpha_S, below_SV, mass_S = block.overlap
    mix_S = (-3 * alpha_S).exp()
    divergence_S = block.taught.neg_entropy_S + block.cross_S
    losses_S = mix_S * divergence_S + (1 - mix_S) * (1 - alpha_S)
    return Share(losses_S, mix_S + (1 - mix_S) * mass_S, -mix_S, (below_SV, mix_S - 1))


def top_cross_entropy(block: Block) -> Share:
    """-sum of p log q over the k best tokens of p (2408.15766); gradient q sum(p_k) - p_k."""
    taught = block.taught
    assert taught.top_Sk is not None and block.top_log_q_Sk is not None
    p_Sk = taught.probs_SV.gather(1, taught.top_Sk)
    losses_S = -(p_Sk * block.top_log_q_Sk).sum(-1)
    return Share(losses_S, q=p_Sk.sum(-1), sparse=(taught.top_Sk, -p_Sk))


class Whole(NamedTuple):
    """What a `_ref` twin reads: logits [N, V] of drafter and target, and the target tokens."""

    logits_NV: Tensor
    targets_N: Tensor
    teacher_NV: Tensor
    temperature: float
    top_k: int

    @property
    def log_q_NV(self) -> Tensor:
        """The drafter's log-probabilities."""
        return (self.logits_NV / self.temperature).log_softmax(-1)

    @property
    def q_NV(self) -> Tensor:
        """The drafter's probabilities."""
        return (self.logits_NV / self.temperature).softmax(-1)

    @property
    def log_p_NV(self) -> Tensor:
        """The target's, not below log FLOOR."""
        logs = (self.teacher_NV / self.temperature).log_softmax(-1)
        return logs.clamp_min(torch.tensor(FLOOR, dtype=logs.dtype).log())

    @property
    def p_NV(self) -> Tensor:
        """The target's probabilities."""
        return (self.teacher_NV / self.temperature).softmax(-1)

    @property
    def alpha_N(self) -> Tensor:
        """sum min(p, q); where they are equal, q moves nothing."""
        q_NV, p_NV = self.q_NV, self.p_NV
        return torch.where(q_NV < p_NV, q_NV, p_NV).sum(-1)


def cross_entropy_ref(whole: Whole) -> Tensor:
    """`cross_entropy` on whole tensors: [N]."""
    return F.cross_entropy(whole.logits_NV, whole.targets_N, reduction="none")


def forward_kl_ref(whole: Whole) -> Tensor:
    """`forward_kl` on whole tensors: [N]."""
    return (whole.p_NV * (whole.log_p_NV - whole.log_q_NV)).sum(-1)


def reverse_kl_ref(whole: Whole) -> Tensor:
    """`reverse_kl` on whole tensors: [N]."""
    return (whole.q_NV * (whole.log_q_NV - whole.log_p_NV)).sum(-1)


def jensen_shannon_ref(whole: Whole) -> Tensor:
    """`jensen_shannon` on whole tensors: [N]."""
    q_NV, p_NV = whole.q_NV, whole.p_NV
    middle_NV = ((q_NV + p_NV) / 2).clamp_min(FLOOR).log()
    of_p_NV, of_q_NV = whole.log_p_NV - middle_NV, whole.log_q_NV - middle_NV
    return (p_NV * of_p_NV + q_NV * of_q_NV).sum(-1) / 2


def total_variation_ref(whole: Whole) -> Tensor:
    """`total_variation` on whole tensors: [N]."""
    q_NV, p_NV = whole.q_NV, whole.p_NV
    return torch.where(q_NV < p_NV, p_NV - q_NV, q_NV - p_NV).sum(-1) / 2


def negative_log_acceptance_ref(whole: Whole) -> Tensor:
    """`negative_log_acceptance` on whole tensors: [N]."""
    return -whole.alpha_N.clamp_min(FLOOR).log()


def hybrid_acceptance_ref(whole: Whole) -> Tensor:
    """`hybrid_acceptance` on whole tensors: [N]."""
    alpha_N = whole.alpha_N
    mix_N = (-3 * alpha_N.detach()).exp()
    return mix_N * forward_kl_ref(whole) + (1 - mix_N) * (1 - alpha_N)


def top_cross_entropy_ref(whole: Whole) -> Tensor:
    """`top_cross_entropy` on whole tensors: [N]."""
    top_Nk = whole.teacher_NV.topk(min(whole.top_k, whole.teacher_NV.shape[1])).indices
    return -(whole.p_NV.gather(1, top_Nk) * whole.log_q_NV.gather(1, top_Nk)).sum(-1)
