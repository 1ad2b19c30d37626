"""The target's own distributions that a drafter's are held against, kept for a batch.

Draft step i at position t is taught by the target's state at t + 1 + i, so the rows that one step
needs are, but for the last ones of each conversation, those of the step before. They are computed
for the first step and serve all the others while they fit the workspace's `teacher_cache_mib`;
beyond it they are computed anew, a chunk at a time. Either way they are rounded to the dtype of
the products, whose own rounding of the logits is coarser.

Shapes: B rows, T positions, N positions of a draft step, C of a chunk, S of a block, R rows that
are held, D hidden, V (draft) vocabulary, k the best tokens.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.divergences import TeacherBlock
from distill.losses import LossSettings
from distill.workspace import Workspace, block_size, spans, wide_dtype
from heads.align import teacher_positions
from heads.base import TrainingBatch


@dataclass(frozen=True)
class Taught:
    """Distributions `probs_RV` with what `TeacherBlock` holds of each row."""

    probs_RV: Tensor
    mass_R: Tensor
    neg_entropy_R: Tensor
    top_Rk: Tensor | None

    def block(self, rows: Tensor | slice, space: Workspace) -> TeacherBlock:
        """Some of the rows, in float32 at least."""
        if isinstance(rows, Tensor) and rows.device.type == "cpu":
            first, last = int(rows[0]), int(rows[-1])
            rows = slice(first, last + 1) if last - first == len(rows) - 1 else rows
        if isinstance(rows, slice):
            probs_SV = self.probs_RV[rows]
        else:
            shape = (len(rows), self.probs_RV.shape[1])
            probs_SV = space.take("teacher_rows", shape, self.probs_RV, self.probs_RV.dtype)
            torch.index_select(self.probs_RV, 0, rows, out=probs_SV)
        top_Sk = None if self.top_Rk is None else self.top_Rk[rows]
        wide_SV = space.widened(probs_SV, "wide_teacher")
        return TeacherBlock(wide_SV, self.mass_R[rows], self.neg_entropy_R[rows], top_Sk)


@dataclass(frozen=True)
class Kept:
    """The distributions of a batch from draft step `step` on.

    `row_of_P` [B * T]: the row of each position's distribution, -1 where there is none.
    """

    batch: "weakref.ref[TrainingBatch]"
    matrix_VD: Tensor
    key: tuple[object, ...]
    step: int
    row_of_P: Tensor
    taught: Taught


@dataclass(frozen=True)
class Teacher:
    """The distributions of one draft step: `places_N` in the flattened batch, `matrix_VD`."""

    batch: TrainingBatch
    settings: LossSettings
    matrix_VD: Tensor
    places_N: Tensor
    step: int
    space: Workspace

    @classmethod
    def of(
        cls,
        batch: TrainingBatch,
        settings: LossSettings,
        matrix_VD: Tensor,
        where_N: Tensor,
        step: int,
        space: Workspace,
    ) -> "Teacher":
        """For the positions `where_N` of the flattened batch, ascending."""
        places_N = teacher_places(batch, where_N, step)
        return cls(batch, settings, matrix_VD, places_N, step, space)

    def chunk(self, chunk: slice) -> tuple[Taught, Tensor | None]:
        """A chunk's distributions, and which rows of them they are; None: all, in order."""
        places_C = self.places_N[chunk]
        kept = self._kept()
        if kept is not None:
            return kept.taught, kept.row_of_P[places_C]
        shape = (len(places_C), len(self.matrix_VD))
        probs_CV = self.space.take("teacher", shape, self.matrix_VD, self.matrix_VD.dtype)
        return self._fill(places_C, probs_CV), None

    def _kept(self) -> Kept | None:
        """What is kept of this batch, computed if need be; None where it would be too much."""
        held: Kept | None = self.space.taught
        # The matrix is held too, so that no other one can come to lie at its address.
        key = (
            *(self.matrix_VD.data_ptr(), self.matrix_VD.shape, self.matrix_VD.dtype),
            *("top" in self.settings.reads and self.settings.top_k, self.settings.temperature),
            *(_version(self.matrix_VD), _version(self.batch.hidden_BTD)),
        )
        if (
            held is not None
            and held.batch() is self.batch
            and held.key == key
            and held.step <= self.step
        ):
            return held
        shape = (len(self.places_N), len(self.matrix_VD))
        size = shape[0] * shape[1] * self.matrix_VD.element_size()
        if size > self.space.teacher_cache_mib * 2**20:
            return None
        # Forgotten first: the buffer that it lies in is overwritten.
        self.space.taught = None
        probs_NV = self.space.take("teacher_kept", shape, self.matrix_VD, self.matrix_VD.dtype)
        taught = self._fill(self.places_N, probs_NV)
        row_of_P = torch.full_like(self.batch.tokens_BT.flatten(), -1)
        row_of_P[self.places_N] = torch.arange(shape[0], device=row_of_P.device)
        kept = Kept(weakref.ref(self.batch), self.matrix_VD, key, self.step, row_of_P, taught)
        self.space.taught = kept
        return kept

    def _fill(self, places_R: Tensor, probs_RV: Tensor) -> Taught:
        """Compute the distributions at places of the flattened batch, into `probs_RV`."""
        dtype, size = wide_dtype(probs_RV.dtype), len(places_R)
        states_PD = self.batch.hidden_BTD.detach().flatten(0, 1)
        top_k = min(self.settings.top_k, probs_RV.shape[1]) if "top" in self.settings.reads else 0
        taught = Taught(
            probs_RV,
            torch.empty(size, dtype=dtype, device=probs_RV.device),
            torch.empty(size, dtype=dtype, device=probs_RV.device),
            places_R.new_empty(size, top_k) if top_k else None,
        )
        for chunk in spans(0, size, self.settings.chunk_size):
            states_CD = states_PD.index_select(0, places_R[chunk]).to(self.matrix_VD.dtype)
            torch.mm(states_CD, self.matrix_VD.T, out=probs_RV[chunk])
            step = block_size(probs_RV.shape[1], probs_RV.device)
            for block in spans(chunk.start, chunk.stop, step):
                _finish(taught, block, self.settings.temperature, self.space)
        return taught


def teacher_places(batch: TrainingBatch, where_N: Tensor, step: int) -> Tensor:
    """Where in the flattened batch the teacher of each of its positions `where_N` stands."""
    length = batch.tokens_BT.shape[1]
    positions_T = teacher_positions(length, step, where_N.device)
    return where_N - where_N % length + positions_T[where_N % length]


def _finish(taught: Taught, block: slice, temperature: float, space: Workspace) -> None:
    """Turn a block's logits into distributions, in place."""
    rows_SV = taught.probs_RV[block]
    logits_SV = space.widened(rows_SV, "wide_teacher")
    if temperature != 1:
        logits_SV /= temperature
    if taught.top_Rk is not None:
        taught.top_Rk[block] = logits_SV.topk(taught.top_Rk.shape[1]).indices
    probs_SV = space.take_like(logits_SV, "softmax")
    torch.softmax(logits_SV, -1, out=probs_SV)
    log_sum_S = logits_SV.amax(-1) - probs_SV.amax(-1).log()
    if rows_SV.dtype != probs_SV.dtype:
        rows_SV.copy_(probs_SV)
        probs_SV.copy_(rows_SV)
    taught.mass_R[block] = probs_SV.sum(-1)
    dot_S = torch.linalg.vecdot(probs_SV, logits_SV)
    taught.neg_entropy_R[block] = dot_S - log_sum_S * taught.mass_R[block]
    if rows_SV.dtype == probs_SV.dtype:
        rows_SV.copy_(probs_SV)


def _version(tensor: Tensor) -> int:
    """Grows when the tensor is written to."""
    return -1 if tensor.is_inference() else tensor._version
