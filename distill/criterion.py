"""The criterion of a batch: what each draft step is held against, and how its positions count.

Positions without a target never reach the matrix product, which `distill/fused.py` does together
with the losses.

Shapes: B rows, T positions, P = B * T, N supervised positions, D hidden, V (draft) vocabulary, K
ranks.
"""

import torch
from torch import Tensor

from distill.divergences import Whole
from distill.fused import FusedLoss, Work
from distill.losses import LossSettings, smooth_l1
from distill.teacher import Teacher, teacher_places
from distill.workspace import Workspace, wide_dtype
from heads.align import IGNORE, draft_targets, teacher_positions
from heads.base import StepLoss, TrainingBatch
from heads.errors import UserError
from heads.vocab import VocabMap


def conversation_weights(segments_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """1 / (its conversation's supervised positions) at each supervised position [B, T], else 0.

    segments [1 1 1 2 2], targets [5 6 IGNORE 7 IGNORE]  ->  [1/2 1/2 0 1 0]
    """
    rows, length = segments_BT.shape
    supervised = targets_BT != IGNORE
    first = torch.arange(rows, device=segments_BT.device)[:, None] * (length + 1)
    number_P = (segments_BT + first).flatten()
    count_P = torch.zeros(rows * (length + 1), dtype=torch.float32, device=segments_BT.device)
    count_P.index_add_(0, number_P, supervised.flatten().float())
    weights_P = supervised.flatten() / count_P[number_P].clamp(min=1)
    return weights_P.view(rows, length)


class ChunkedCriterion:
    """The `heads.base.Criterion` of one batch.

    Targets outside a draft vocabulary carry no loss over the vocabulary and count as wrong. A
    teacher is the target itself one position before the token (`heads.align.teacher_positions`),
    restricted to the draft vocabulary and renormalised. `num_ranks` is K of `rank_counts_K`.
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
        self._cast: tuple[Tensor, int, Tensor] | None = None

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        *,
        step: int,
        vocab: VocabMap | None = None,
        features_BTD: Tensor | None = None,
    ) -> StepLoss:
        """Loss sums and counts of draft step `step`."""
        batch = self.batch
        targets_BT = draft_targets(batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT, step)
        weights_P = None
        if self.settings.per_sequence:
            weights_P = conversation_weights(batch.segments_BT, targets_BT).flatten()
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            regression = self._regression(features_BTD, targets_BT.flatten(), weights_P, step)
        draft_BT = targets_BT if vocab is None else vocab.to_draft(targets_BT)
        dtype = _matmul_dtype(hidden_BTD)
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            loss_sum, plain_sum, counts_K = self._vocabulary(
                hidden_BTD, weight_VD, draft_BT.flatten(), weights_P, step, vocab, dtype
            )
        if regression is not None:
            loss_sum, plain_sum = loss_sum + regression[0], plain_sum + regression[1]
        return StepLoss(loss_sum, (targets_BT != IGNORE).sum(), counts_K, plain_sum)

    def _vocabulary(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        targets_P: Tensor,
        weights_P: Tensor | None,
        step: int,
        vocab: VocabMap | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted and plain sum of the losses over the vocabulary, rank counts."""
        where_N = (targets_P != IGNORE).nonzero()[:, 0]
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, where_N).to(dtype)
        tracked = torch.is_grad_enabled()
        work = Work(
            settings=self.settings,
            matrix_VD=self._matrix(weight_VD, step, dtype),
            targets_N=targets_P[where_N],
            weights_N=None if weights_P is None else weights_P[where_N],
            teacher=self._teacher(where_N, step, vocab, dtype),
            num_ranks=self.num_ranks,
            workspace=self.workspace,
            hidden_grad=tracked and hidden_ND.requires_grad,
            weight_grad=tracked and weight_VD.requires_grad,
        )
        sums: tuple[Tensor, Tensor, Tensor] = FusedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, work
        )
        return sums

    def _matrix(self, weight_VD: Tensor, step: int, dtype: torch.dtype) -> Tensor:
        """The output matrix in the dtype of the products.

        A trained one does not change between the draft steps of a batch: it is cast for the first.
        """
        if weight_VD.dtype == dtype or not weight_VD.requires_grad:
            return self.workspace.matmul_weight(weight_VD, dtype)
        held, version = self._cast, weight_VD._version
        if step == 0 or held is None or held[0] is not weight_VD or held[1] != version:
            cast_VD = weight_VD.detach().to(dtype)
            held = self._cast = (weight_VD, version, cast_VD)
        return held[2]

    def _teacher(
        self, where_N: Tensor, step: int, vocab: VocabMap | None, dtype: torch.dtype
    ) -> Teacher | None:
        """The target's distributions that foretell the positions' tokens."""
        if not self.settings.has_teacher:
            return None
        rows = self.workspace.teacher_rows(self.lm_head_VD, vocab)
        matrix_VD = self.workspace.matmul_weight(rows, dtype)
        return Teacher.of(self.batch, self.settings, matrix_VD, where_N, step, self.workspace)

    def _regression(
        self, features_BTD: Tensor | None, targets_P: Tensor, weights_P: Tensor | None, step: int
    ) -> tuple[Tensor, Tensor] | None:
        """Weighted and plain sum of the loss between features and the target's states."""
        weight = self.settings.feature_weight
        if not weight:
            return None
        if features_BTD is None:
            raise UserError(
                "loss.terms asks for smooth_l1, but this drafter predicts no features of the "
                "target; take it out of loss.terms or train a drafter that predicts them"
            )
        where_N, wide = (targets_P != IGNORE).nonzero()[:, 0], wide_dtype(features_BTD.dtype)
        features_ND = features_BTD.flatten(0, 1).index_select(0, where_N).to(wide)
        places_N = teacher_places(self.batch, where_N, step)
        states_ND = self.batch.hidden_BTD.detach().flatten(0, 1)[places_N].to(wide)
        losses_N = weight * smooth_l1(features_ND, states_ND)
        weighted = losses_N if weights_P is None else losses_N * weights_P[where_N]
        return weighted.sum(), losses_N.detach().sum()


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
    features_BTD: Tensor | None = None,
) -> StepLoss:
    """What `ChunkedCriterion` gives, on whole tensors with plain autograd."""
    targets_BT = draft_targets(batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT, step)
    weights_P = conversation_weights(batch.segments_BT, targets_BT).flatten()
    weights_P = weights_P if settings.per_sequence else torch.ones_like(weights_P)
    targets = targets_BT.flatten()
    draft = targets if vocab is None else vocab.to_draft(targets)
    where, known = targets != IGNORE, draft != IGNORE
    positions = teacher_positions(batch.tokens_BT.shape[1], step, targets.device)
    rows = lm_head_VD if vocab is None else lm_head_VD[vocab.target_ids_Vd]
    states_BTD = batch.hidden_BTD[:, positions].to(rows.dtype)
    teacher = (states_BTD @ rows.T).flatten(0, 1)[known]
    logits = (hidden_BTD @ weight_VD.T).flatten(0, 1)[known]
    whole = Whole(logits, draft[known], teacher, settings.temperature, settings.top_k)
    losses = torch.zeros_like(targets, dtype=logits.dtype)
    for loss, weight in settings.vocabulary_terms:
        losses = losses.index_add(0, known.nonzero()[:, 0], weight * loss.ref(whole))
    if settings.feature_weight:
        assert features_BTD is not None
        gap = smooth_l1(features_BTD, states_BTD).flatten()[where]
        losses = losses.index_add(0, where.nonzero()[:, 0], settings.feature_weight * gap)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    hits = order[:, :num_ranks] == draft[known][:, None]
    plain = losses.detach().sum()
    return StepLoss((losses * weights_P).sum(), where.sum(), hits.sum(0), plain)
