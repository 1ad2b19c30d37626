"""Losses by name, and their weighted sum on a block of logits.

Several losses share one softmax of the drafter's logits and one of the target's; their gradients
add up in the logits' place. `distill/criterion.py` feeds it block by block.

Shapes: S positions of a block, V (draft) vocabulary, D hidden, k the teacher's best tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from distill import divergences
from distill.divergences import Block, Factor, Share, TeacherBlock, Whole
from heads.errors import UserError, unknown_name


@dataclass(frozen=True)
class Loss:
    """A loss over the vocabulary.

    `fused` tells losses and gradient of a block, `ref` the same losses on whole tensors. `reads`:
    what of the block it needs beside q: "log_q", "cross" (-sum p log q), "top" (the best tokens).
    """

    fused: Callable[[Block], Share]
    ref: Callable[[Whole], Tensor]
    teacher: bool = True
    reads: frozenset[str] = frozenset()


LOSSES: dict[str, Loss] = {
    "ce": Loss(divergences.cross_entropy, divergences.cross_entropy_ref, teacher=False),
    "forward_kl": Loss(
        divergences.forward_kl, divergences.forward_kl_ref, reads=frozenset({"cross"})
    ),
    "reverse_kl": Loss(
        divergences.reverse_kl, divergences.reverse_kl_ref, reads=frozenset({"log_q"})
    ),
    "jsd": Loss(
        divergences.jensen_shannon, divergences.jensen_shannon_ref, reads=frozenset({"log_q"})
    ),
    "tv": Loss(divergences.total_variation, divergences.total_variation_ref),
    "nla": Loss(divergences.negative_log_acceptance, divergences.negative_log_acceptance_ref),
    "lk_hybrid": Loss(
        divergences.hybrid_acceptance,
        divergences.hybrid_acceptance_ref,
        reads=frozenset({"cross"}),
    ),
    "topk_ce": Loss(
        divergences.top_cross_entropy,
        divergences.top_cross_entropy_ref,
        reads=frozenset({"top"}),
    ),
}


def smooth_l1(features_SD: Tensor, states_SD: Tensor) -> Tensor:
    """Smooth L1 with beta 1, averaged over the hidden dimension: [S] (2401.15077, 4.2)."""
    return F.smooth_l1_loss(features_SD, states_SD, reduction="none").mean(-1)


FEATURE_LOSSES = {"smooth_l1": smooth_l1}
"""Losses between the drafter's features and the target's own states."""


@dataclass(frozen=True)
class LossSettings:
    """Which losses with which weights, by name; those of weight 0 are left out.

    `temperature` softens both distributions of a loss with a teacher. `top_k` is for losses over
    the teacher's best tokens. `per_sequence`: every conversation counts alike, whatever its length.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"ce": 1.0})
    temperature: float = 1.0
    chunk_size: int = 512
    top_k: int = 10
    per_sequence: bool = False

    def __post_init__(self) -> None:
        """Refuse a loss that is not there and values without a meaning."""
        for name, weight in self.terms.items():
            if name not in LOSSES and name not in FEATURE_LOSSES:
                raise unknown_name("loss", name, [*LOSSES, *FEATURE_LOSSES])
            if not (weight >= 0 and math.isfinite(weight)):
                raise UserError(
                    f"loss.terms.{name} is {weight}; expected a weight of 0 (left out) or more"
                )
        if not any(self.terms.values()):
            raise UserError(
                f"loss.terms {dict(self.terms)} leaves nothing to learn; give a weight above 0 to "
                f"one of {', '.join(sorted([*LOSSES, *FEATURE_LOSSES]))}"
            )
        if self.temperature <= 0 or self.chunk_size < 1 or self.top_k < 1:
            raise UserError(
                f"loss temperature {self.temperature}, chunk_size {self.chunk_size} and top_k "
                f"{self.top_k} given; expected a positive temperature, a chunk of at least 1 "
                "position and at least 1 token"
            )
        if self.temperature != 1 and not self.has_teacher:
            raise UserError(
                f"loss.temperature {self.temperature} given for {', '.join(self.terms)}, which has "
                "no teacher to soften; leave it at 1 or take a loss with a teacher"
            )

    @property
    def vocabulary_terms(self) -> list[tuple[Loss, float]]:
        """The losses over the vocabulary with their weights."""
        return [(LOSSES[n], float(w)) for n, w in self.terms.items() if w and n in LOSSES]

    @property
    def feature_weight(self) -> float:
        """The weight of the regression of features, 0 without."""
        return float(sum(self.terms.get(name, 0.0) for name in FEATURE_LOSSES))

    @property
    def has_teacher(self) -> bool:
        """Whether a loss over the vocabulary reads the target's distribution."""
        return any(loss.teacher for loss, _ in self.vocabulary_terms)

    @property
    def reads_target(self) -> bool:
        """Whether any loss reads the target's states after its final norm."""
        return self.has_teacher or self.feature_weight > 0

    @property
    def reads(self) -> frozenset[str]:
        """What the losses need of a block beside q."""
        return frozenset().union(*(loss.reads for loss, _ in self.vocabulary_terms))


def block_losses(
    logits_SV: Tensor,
    targets_S: Tensor,
    best_S: Tensor,
    teacher: TeacherBlock | None,
    settings: LossSettings,
    scratch: Callable[[str], Tensor],
    gradient: bool = True,
    weights_S: Tensor | None = None,
) -> Tensor:
    """The weighted sum of the losses [S] of a block of float32 (or float64) logits.

    The logits are overwritten by its gradient (by anything where none is wanted), times
    `weights_S` where given. `best_S` is the logits' argmax.
    """
    if not settings.vocabulary_terms:
        return logits_SV.new_zeros(len(logits_SV))
    block = _prepare(logits_SV, targets_S, best_S, teacher, settings, scratch)
    total_S = logits_SV.new_zeros(len(logits_SV))
    q: Factor = 0.0
    p: Factor = 0.0
    shares: list[tuple[Share, float]] = []
    for loss, weight in settings.vocabulary_terms:
        share = loss.fused(block)
        total_S.add_(share.losses_S, alpha=weight)
        scale = weight / settings.temperature if loss.teacher else weight
        q, p = q + scale * share.q, p + scale * share.p
        shares.append((share, scale))
    if gradient:
        rows: Factor = 1.0 if weights_S is None else weights_S.to(logits_SV.dtype)
        _scale_(logits_SV, q * rows)
        if teacher is not None and not (isinstance(p, float) and p == 0):
            _add_(logits_SV, teacher.probs_SV, p * rows)
        for share, scale in shares:
            _add_parts_(logits_SV, share, scale * rows)
    return total_S


def _prepare(
    logits_SV: Tensor,
    targets_S: Tensor,
    best_S: Tensor,
    teacher: TeacherBlock | None,
    settings: LossSettings,
    scratch: Callable[[str], Tensor],
) -> Block:
    """Take the softmax in place, and before it what it would destroy."""
    plain = None
    at_target_S = logits_SV.gather(1, targets_S[:, None])[:, 0]
    if settings.temperature != 1:
        if settings.terms.get("ce"):
            plain = scratch("plain").copy_(logits_SV)
            target_log_q_S = at_target_S - _softmax_(plain, best_S)
        logits_SV /= settings.temperature
    reads, dot_S, at_top_Sk, log_q_SV = settings.reads, None, None, None
    if teacher is not None and "cross" in reads:
        dot_S = torch.linalg.vecdot(teacher.probs_SV, logits_SV)
    if teacher is not None and teacher.top_Sk is not None:
        at_top_Sk = logits_SV.gather(1, teacher.top_Sk)
    if "log_q" in reads:
        log_q_SV = scratch("log_q").copy_(logits_SV)
    log_sum_S = _softmax_(logits_SV, best_S)
    if plain is None:
        target_log_q_S = at_target_S - log_sum_S
    if log_q_SV is not None:
        log_q_SV -= log_sum_S[:, None]
    return Block(
        logits_SV,
        targets_S,
        target_log_q_S,
        scratch,
        teacher,
        log_q_SV,
        None if dot_S is None or teacher is None else log_sum_S * teacher.mass_S - dot_S,
        None if at_top_Sk is None else at_top_Sk - log_sum_S[:, None],
        plain,
    )


def _softmax_(logits_SV: Tensor, best_S: Tensor) -> Tensor:
    """Overwrite logits by their softmax; gives the logsumexp [S]. `best_S` is their argmax."""
    top = logits_SV.gather(1, best_S[:, None])
    torch.softmax(logits_SV, -1, out=logits_SV)
    return (top - logits_SV.gather(1, best_S[:, None]).log())[:, 0]


def _scale_(values_SV: Tensor, factor: Factor) -> None:
    if isinstance(factor, Tensor):
        values_SV.mul_(factor[:, None])
    elif factor != 1:
        values_SV.mul_(factor)


def _add_(values_SV: Tensor, more_SV: Tensor, factor: Factor) -> None:
    if isinstance(factor, Tensor):
        values_SV.addcmul_(more_SV, factor[:, None])
    else:
        values_SV.add_(more_SV, alpha=factor)


def _add_parts_(values_SV: Tensor, share: Share, factor: Factor) -> None:
    """Add a share's dense and sparse parts."""
    if share.dense is not None:
        _add_(values_SV, share.dense[0], factor * share.dense[1])
    if share.sparse is not None:
        ids_Sk, added_Sk = share.sparse
        column = factor[:, None] if isinstance(factor, Tensor) else factor
        values_SV.scatter_add_(1, ids_Sk, added_Sk * column)
