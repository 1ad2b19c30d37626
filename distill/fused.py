"""Output matrix and losses in one differentiable function, in chunks of positions.

As in Cut Your Losses (2411.09009, section 4, without its filter): the forward takes a chunk of
positions, computes its logits, its losses and at once the gradients with respect to the hidden
states and, where it is trained, the output matrix. So one [C, V] buffer lives at a time and the
backward only scales. The gradients at the logits of several chunks, a group, wait for one product
into a trained matrix, which writes all of it.

Shapes: N positions, G of a group, C of a chunk, S of a block (the part of a chunk whose float32
logits stay in the processor's cache), D hidden, V (draft) vocabulary, K ranks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.losses import LossSettings, block_losses
from distill.teacher import Teacher
from distill.workspace import Workspace, block_size, spans, wide_dtype


@dataclass(frozen=True)
class Work:
    """What the fused loss needs beside what it differentiates.

    `matrix_VD` is the output matrix in the dtype of the products.
    """

    settings: LossSettings
    matrix_VD: Tensor
    targets_N: Tensor
    weights_N: Tensor | None
    teacher: Teacher | None
    num_ranks: int
    workspace: Workspace
    hidden_grad: bool
    weight_grad: bool

    @property
    def gradient(self) -> bool:
        """Whether the losses move anything that is differentiated."""
        return (self.hidden_grad or self.weight_grad) and bool(self.settings.vocabulary_terms)


class FusedLoss(torch.autograd.Function):
    """(hidden_ND, weight_VD) -> (weighted loss sum, plain loss sum, rank counts).

    Products are in the hidden states' dtype.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, work: Work) -> tuple[Tensor, ...]:
        """Losses and gradients in one sweep; the gradients wait for the backward."""
        space, size, matrix_VD = work.workspace, len(hidden_ND), work.matrix_VD
        wide = wide_dtype(hidden_ND.dtype)
        losses_N = torch.empty(size, dtype=wide, device=hidden_ND.device)
        ranks_N = torch.empty(size, dtype=torch.long, device=hidden_ND.device)
        hidden_grad = torch.zeros_like(hidden_ND) if work.hidden_grad else None
        weight_grad = None
        for group in spans(0, size, _group_size(work)):
            shape = (group.stop - group.start, len(matrix_VD))
            grads_GV = space.take("logits", shape, hidden_ND, hidden_ND.dtype)
            for chunk in spans(group.start, group.stop, work.settings.chunk_size):
                logits_CV = grads_GV[chunk.start - group.start : chunk.stop - group.start]
                torch.mm(hidden_ND[chunk], matrix_VD.T, out=logits_CV)
                _chunk_losses(logits_CV, chunk, work, losses_N, ranks_N)
                if hidden_grad is not None and work.gradient:
                    torch.mm(logits_CV, matrix_VD, out=hidden_grad[chunk])
            if work.weight_grad and work.gradient:
                part = grads_GV.T @ hidden_ND[group]
                weight_grad = part if weight_grad is None else weight_grad.to(wide).add_(part)
        ctx.save_for_backward(hidden_grad, weight_grad)
        # Not the matrix itself: a sharded one has been taken apart again by the backward.
        ctx.weight = (weight_VD.shape, weight_VD.dtype) if work.weight_grad else None
        plain = losses_N.sum()
        weighted = plain.clone() if work.weights_N is None else (losses_N * work.weights_N).sum()
        counts_K = torch.bincount(ranks_N, minlength=work.num_ranks + 1)[: work.num_ranks]
        ctx.mark_non_differentiable(plain, counts_K)
        return weighted, plain, counts_K

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The waiting gradients, scaled; that of the matrix in the matrix's own dtype."""
        hidden_grad, weight_grad = ctx.saved_tensors
        of_weight = None
        if weight_grad is not None:
            of_weight = weight_grad.to(ctx.weight[1], copy=True).mul_(grads[0])
        elif ctx.weight is not None:
            of_weight = grads[0].new_zeros(ctx.weight[0], dtype=ctx.weight[1])
        return None if hidden_grad is None else hidden_grad * grads[0], of_weight, None


def _group_size(work: Work) -> int:
    """Positions whose gradients are kept for one product into the matrix, in whole chunks."""
    chunk = work.settings.chunk_size
    if not (work.weight_grad and work.gradient):
        return chunk
    a_row = len(work.matrix_VD) * work.matrix_VD.element_size()
    return max(1, int(work.workspace.gradient_mib * 2**20) // (a_row * chunk)) * chunk


def _chunk_losses(
    logits_CV: Tensor, chunk: slice, work: Work, losses_N: Tensor, ranks_N: Tensor
) -> None:
    """Fill in a chunk's losses and ranks; its logits are overwritten by their gradient."""
    space = work.workspace
    taught, rows_C = (None, None) if work.teacher is None else work.teacher.chunk(chunk)
    narrow = logits_CV.dtype != losses_N.dtype
    for block in spans(0, len(logits_CV), block_size(logits_CV.shape[1], logits_CV.device)):
        place = slice(chunk.start + block.start, chunk.start + block.stop)
        wide_SV, targets_S = space.widened(logits_CV[block], "wide"), work.targets_N[place]
        best_S = wide_SV.argmax(-1)
        ranks_N[place] = _ranks(wide_SV, targets_S, best_S, work.num_ranks)
        rows = block if rows_C is None else rows_C[block]
        losses_N[place] = block_losses(
            wide_SV,
            targets_S,
            best_S,
            None if taught is None else taught.block(rows, space),
            work.settings,
            partial(space.take_like, wide_SV),
            work.gradient,
            None if work.weights_N is None else work.weights_N[place],
        )
        if narrow and work.gradient:
            logits_CV[block].copy_(wide_SV)


def _ranks(logits_SV: Tensor, targets_S: Tensor, best_S: Tensor, num_ranks: int) -> Tensor:
    """Rank [S] of each target among its logits (ties: lowest id first), at most `num_ranks`."""
    if num_ranks == 1:
        return (best_S != targets_S).long()
    at_target = logits_SV.gather(1, targets_S[:, None])
    above = (logits_SV > at_target).sum(-1)
    ids = torch.arange(logits_SV.shape[1], device=targets_S.device)
    ties = ((logits_SV == at_target) & (ids < targets_S[:, None])).sum(-1)
    return (above + ties).clamp_(max=num_ranks)
