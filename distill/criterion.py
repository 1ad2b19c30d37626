"""The criterion of a batch: output matrix and loss fused, in chunks of positions.

As in Cut Your Losses (2411.09009, section 4, without its filter): the forward takes a chunk of
positions, computes its logits, its losses and at once the gradients with respect to the hidden
states and, where it is trained, the output matrix. So one [C, V] buffer lives at a time and the
backward only scales. Positions without a target never reach the matrix product.

Shapes: B rows, T positions, N supervised positions (flattened), C positions of a chunk, S of a
block (the part of a chunk whose float32 logits stay in the processor's cache), D hidden, V (draft)
vocabulary, K ranks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill.losses import LOSSES, Block, LossSettings
from heads.align import IGNORE, draft_targets, teacher_positions
from heads.base import StepLoss, TrainingBatch
from heads.vocab import VocabMap

BLOCK = 32


@dataclass
class Workspace:
    """Buffers kept from batch to batch: fresh ones of this size cost as much as the arithmetic."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    rows: tuple[VocabMap, Tensor] | None = None
    casts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that is valid until the same name is taken again."""
        size = shape[0] * shape[1]
        held = self.buffers.get(name)
        if held is None or held.dtype != dtype or held.device != like.device or len(held) < size:
            held = self.buffers[name] = torch.empty(size, dtype=dtype, device=like.device)
        return held[:size].view(shape)

    def teacher_rows(self, lm_head_VD: Tensor, vocab: VocabMap | None) -> Tensor:
        """The rows of the target's output matrix that a draft vocabulary names."""
        if vocab is None:
            return lm_head_VD
        if self.rows is None or self.rows[0] is not vocab:
            self.rows = (vocab, lm_head_VD[vocab.target_ids_Vd.to(lm_head_VD.device)])
        return self.rows[1]

    def matmul_weight(self, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix in the dtype of the products; of a frozen one the cast is kept."""
        if weight_VD.dtype == dtype or weight_VD.requires_grad:
            return weight_VD.detach().to(dtype)
        held = self.casts.get(id(weight_VD))
        if held is None or held[1].dtype != dtype:
            held = self.casts[id(weight_VD)] = (weight_VD, weight_VD.to(dtype))
        return held[1]


@dataclass(frozen=True)
class Work:
    """What the fused loss needs beside what it differentiates."""

    settings: LossSettings
    targets_N: Tensor
    teacher_ND: Tensor | None
    teacher_VD: Tensor | None
    num_ranks: int
    workspace: Workspace
    hidden_grad: bool
    weight_grad: bool


class _FusedLoss(torch.autograd.Function):
    """(hidden_ND, weight_VD) -> (loss sum, rank counts), products in the hidden states' dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, work: Work) -> tuple[Tensor, ...]:
        """Losses and gradients in one sweep; the gradients wait for the backward."""
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = hidden_ND.new_zeros((), dtype=wide)
        matrix_VD = work.workspace.matmul_weight(weight_VD, hidden_ND.dtype)
        counts_K = torch.zeros(work.num_ranks, dtype=torch.long, device=hidden_ND.device)
        hidden_grad = torch.empty_like(hidden_ND) if work.hidden_grad else None
        weight_grad = torch.zeros_like(weight_VD, dtype=wide) if work.weight_grad else None
        for start in range(0, len(hidden_ND), work.settings.chunk_size):
            chunk = slice(start, min(start + work.settings.chunk_size, len(hidden_ND)))
            grad_CV, losses_C, ranks_C = _chunk_loss(hidden_ND, matrix_VD, chunk, work)
            total += losses_C.sum()
            counts_K += torch.bincount(ranks_C, minlength=work.num_ranks + 1)[: work.num_ranks]
            if hidden_grad is not None:
                torch.mm(grad_CV, matrix_VD, out=hidden_grad[chunk])
            if weight_grad is not None:
                weight_grad += grad_CV.T @ hidden_ND[chunk]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(counts_K)
        return total, counts_K

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The waiting gradients, scaled."""
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            None if hidden_grad is None else hidden_grad * grads[0],
            None if weight_grad is None else weight_grad * grads[0],
            None,
        )


def _chunk_loss(
    hidden_ND: Tensor, weight_VD: Tensor, chunk: slice, work: Work
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient at the logits [C, V] (in their dtype), losses [C], ranks [C] of one chunk."""
    space, settings = work.workspace, work.settings
    shape = (chunk.stop - chunk.start, len(weight_VD))
    logits_CV = space.take("logits", shape, hidden_ND, hidden_ND.dtype)
    torch.mm(hidden_ND[chunk], weight_VD.T, out=logits_CV)
    teacher_CV = None
    if work.teacher_ND is not None and work.teacher_VD is not None:
        teacher_CV = space.take("teacher", shape, hidden_ND, work.teacher_VD.dtype)
        torch.mm(work.teacher_ND[chunk], work.teacher_VD.T, out=teacher_CV)
    targets_C = work.targets_N[chunk]
    losses, ranks = [], []
    for start in range(0, shape[0], BLOCK):
        block = slice(start, min(start + BLOCK, shape[0]))
        wide_SV = _widened(logits_CV[block], "wide", space)
        best_S = wide_SV.argmax(-1)
        ranks.append(_ranks(wide_SV, targets_C[block], best_S, work.num_ranks))
        taught_SV = (
            None if teacher_CV is None else _widened(teacher_CV[block], "wide_teacher", space)
        )
        view = Block(wide_SV, targets_C[block], best_S, taught_SV, settings.temperature)
        losses.append(LOSSES[settings.name].fused(view))
        if wide_SV.dtype != logits_CV.dtype:
            logits_CV[block].copy_(wide_SV)
    return logits_CV, torch.cat(losses), torch.cat(ranks)


def _widened(rows_SV: Tensor, name: str, space: Workspace) -> Tensor:
    """The rows in at least float32: themselves, or a copy in a buffer."""
    if rows_SV.dtype in (torch.float32, torch.float64):
        return rows_SV
    shape = (rows_SV.shape[0], rows_SV.shape[1])
    return space.take(name, shape, rows_SV, torch.float32).copy_(rows_SV)


def _ranks(logits_SV: Tensor, targets_S: Tensor, best_S: Tensor, num_ranks: int) -> Tensor:
    """Rank [S] of each target among its logits (ties: lowest id first), at most `num_ranks`."""
    if num_ranks == 1:
        return (best_S != targets_S).long()
    at_target = logits_SV.gather(1, targets_S[:, None])
    above = (logits_SV > at_target).sum(-1)
    ids = torch.arange(logits_SV.shape[1], device=targets_S.device)
    ties = ((logits_SV == at_target) & (ids < targets_S[:, None])).sum(-1)
    return (above + ties).clamp_(max=num_ranks)


class ChunkedCriterion:
    """The `heads.base.Criterion` of one batch.

    Targets outside a draft vocabulary carry no loss and count as wrong. A teacher is the target
    itself one position before the token (`heads.align.teacher_positions`), restricted to the draft
    vocabulary and renormalised. `num_ranks` is K of `rank_counts_K`.
    """

    def __init__(
        self,
        batch: TrainingBatch,
        settings: LossSettings,
        lm_head_VD: Tensor,
        num_ranks: int = 1,
        workspace: Workspace | None = None,
    ) -> None:
        self.batch, self.settings, self.lm_head_VD = batch, settings, lm_head_VD
        self.num_ranks, self.workspace = num_ranks, workspace or Workspace()

    def __call__(
        self, hidden_BTD: Tensor, weight_VD: Tensor, *, step: int, vocab: VocabMap | None = None
    ) -> StepLoss:
        """Loss sum and counts of draft step `step`."""
        batch = self.batch
        targets = draft_targets(batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT, step)
        num_positions = (targets != IGNORE).sum()
        if vocab is not None:
            targets = vocab.to_draft(targets)
        where = (targets != IGNORE).flatten().nonzero()[:, 0]
        dtype = _matmul_dtype(hidden_BTD)
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, where).to(dtype)
            teacher_ND, teacher_VD = self._teacher(where, step, vocab, dtype)
            tracked = torch.is_grad_enabled()
            work = Work(
                settings=self.settings,
                targets_N=targets.flatten()[where],
                teacher_ND=teacher_ND,
                teacher_VD=teacher_VD,
                num_ranks=self.num_ranks,
                workspace=self.workspace,
                hidden_grad=tracked and hidden_ND.requires_grad,
                weight_grad=tracked and weight_VD.requires_grad,
            )
            loss_sum, counts_K = _FusedLoss.apply(  # type: ignore[no-untyped-call]
                hidden_ND, weight_VD, work
            )
        return StepLoss(loss_sum, num_positions, counts_K)

    def _teacher(
        self, where: Tensor, step: int, vocab: VocabMap | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """The target's own states and output matrix that foretell the positions' tokens."""
        if not LOSSES[self.settings.name].teacher:
            return None, None
        hidden_BTD = self.batch.hidden_BTD
        positions = teacher_positions(hidden_BTD.shape[1], step, hidden_BTD.device)
        teacher = hidden_BTD[:, positions].flatten(0, 1).index_select(0, where)
        rows = self.workspace.teacher_rows(self.lm_head_VD, vocab)
        return teacher.detach().to(dtype), self.workspace.matmul_weight(rows, dtype)


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else the hidden states' own."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def step_loss_ref(
    batch: TrainingBatch,
    settings: LossSettings,
    lm_head_VD: Tensor,
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    step: int,
    vocab: VocabMap | None = None,
    num_ranks: int = 1,
) -> StepLoss:
    """What `ChunkedCriterion` gives, on whole tensors with plain autograd."""
    targets = draft_targets(batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT, step).flatten()
    draft = targets if vocab is None else vocab.to_draft(targets)
    where = draft != IGNORE
    positions = teacher_positions(batch.tokens_BT.shape[1], step, targets.device)
    rows = lm_head_VD if vocab is None else lm_head_VD[vocab.target_ids_Vd]
    teacher = (batch.hidden_BTD[:, positions].to(rows.dtype) @ rows.T).flatten(0, 1)[where]
    logits = (hidden_BTD @ weight_VD.T).flatten(0, 1)[where]
    losses = LOSSES[settings.name].ref(logits, draft[where], teacher, settings.temperature)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    hits = order[:, :num_ranks] == draft[where][:, None]
    return StepLoss(losses.sum(), (targets != IGNORE).sum(), hits.sum(0))


def loss_memory_gib(
    settings: LossSettings,
    *,
    num_positions: int,
    hidden_size: int,
    vocab_size: int,
    matmul_bytes: int = 2,
    trained_weight: bool = False,
) -> float:
    """Upper estimate of what one draft step's loss holds: its chunk, its block, its gradients.

    `num_positions` of one micro-batch; the output matrix's float32 gradient only when trained.
    """
    chunk = min(settings.chunk_size, num_positions)
    sides = 2 if LOSSES[settings.name].teacher else 1
    buffers = sides * chunk * vocab_size * matmul_bytes
    blocks = (2 * sides - 1) * min(BLOCK, chunk) * vocab_size * 4 * (matmul_bytes < 4)
    states = (1 + sides) * num_positions * hidden_size * matmul_bytes
    weight = vocab_size * hidden_size * (4 + 2 * matmul_bytes) if trained_weight else 0
    return float(buffers + blocks + states + weight) / 2**30
