"""One optimizer step over a global batch, whatever the number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from accelerate.utils import gather_object
from torch import Tensor

from distill.criterion import ChunkedCriterion
from distill.features import FeatureSource, PackedRow, RowStates
from distill.workspace import Workspace
from heads.align import IGNORE, draft_targets
from heads.errors import UserError
from infer.target import TargetModel
from train.batches import Packing, RowStream, collate, derive, share
from train.engine import Engine
from train.ledger import Ledger
from train.recipe import Recipe
from train.rewriting import Rewriter

NOISE = 2
"""Which derived seed the micro-batches draw from (0 and 1 order rows and prompts)."""


@dataclass(frozen=True)
class StepReport:
    """What one step gave: sums [S, 2+K] over the global batch, tokens, times."""

    sums_SX: Tensor
    tokens: int
    gradient_norm: float
    clock_s: float
    step_s: float
    data_s: float


@dataclass
class Stepper:
    """Takes steps: every process its share, one division, one move of the parameters."""

    recipe: Recipe
    engine: Engine
    target: TargetModel
    packing: Packing
    features: FeatureSource
    workspace: Workspace
    stream: RowStream
    ledger: Ledger
    rewriter: Rewriter | None = None

    def take(
        self, step: int, rate: float, progress: float, clock: Callable[[], float]
    ) -> StepReport:
        """Step number `step` (from 0) at a learning rate; raises UserError for a loss of NaN.

        `progress`: the share of the run that lies behind.
        """
        start = perf_counter()
        self.engine.set_learning_rate(rate)
        engine, size = self.engine, self.recipe.optimizer.micro_batch
        indices = self.stream.rows(step)
        shares = share(range(len(indices)), engine.process, engine.processes, size)
        mine = [place for places in shares for place in places]
        if self.rewriter is None:
            states = {i: self.features.states(self.packing.rows[indices[i]]) for i in mine}
        else:
            self.rewriter.prepare(step, progress)
            states = {i: self.rewriter.states(step, i, indices[i]) for i in mine}
        count, tokens = self._counted(list(states.values()))
        data_s = perf_counter() - start
        scale = 1 / max(1, count)
        parts, names = [], []
        for number, places in enumerate(shares):
            began = perf_counter()
            dtype = states_dtype(self.recipe)
            batch = collate([states.pop(i) for i in places], engine.device, dtype)
            data_s += perf_counter() - began
            first = step * self.stream.per_step + places[0]
            torch.manual_seed(derive(self.recipe.seed, NOISE, first))
            criterion = ChunkedCriterion(
                batch,
                self.recipe.loss.settings,
                self.target.shared.lm_head_VD,
                workspace=self.workspace,
            )
            last = number == len(shares) - 1
            parts.append(engine.backward(batch, criterion, scale, last))
            names.append(batch.rows)
        sums_SX, clock_s = self._reduced(parts, clock() if engine.is_main else 0.0)
        norm = engine.gradient_norm()
        self._refuse_nan(step + 1, sums_SX, norm, parts, names)
        engine.step()
        return StepReport(sums_SX, tokens, norm, clock_s, perf_counter() - start, data_s)

    def _counted(self, states: list[RowStates]) -> tuple[int, int]:
        """What the whole step counts and its tokens, without what any process dropped."""
        unknown = self.ledger.unknown(name for state in states for name in state.dropped)
        counts = [
            sum(loss_count(state.row, self.recipe.loss.per_sequence) for state in states),
            sum(state.row.num_tokens for state in states),
            len(unknown),
        ]
        count, tokens, dropped = self.engine.total(torch.tensor(counts)).tolist()
        if dropped:
            self.ledger.enter(unknown)
        return count, tokens

    def _reduced(self, parts: list[Tensor], clock_s: float) -> tuple[Tensor, float]:
        """The sums over micro-batches and processes, and the main process's clock, in one go."""
        sums = torch.stack(parts).sum(0)
        total = self.engine.total(torch.cat([sums.flatten(), sums.new_tensor([clock_s])]))
        return total[:-1].view_as(sums), float(total[-1])

    def _refuse_nan(
        self,
        step: int,
        sums_SX: Tensor,
        norm: float,
        parts: list[Tensor],
        names: list[tuple[str, ...]],
    ) -> None:
        """Stop where the loss or its gradient is no number, naming step and conversations."""
        loss_is_wrong = not bool(torch.isfinite(sums_SX).all())
        if not loss_is_wrong and math.isfinite(norm):
            return
        mine = [
            name
            for part, group in zip(parts, names, strict=True)
            if not loss_is_wrong or not bool(torch.isfinite(part).all())
            for name in group
        ]
        everyone = gather_object(mine)
        raise UserError(
            f"the {'loss' if loss_is_wrong else 'gradient'} of step {step} is not a number; "
            f"conversations of that batch: {', '.join(everyone)}. The run stops before it writes "
            "them into the drafter; lower optimizer.lr, or drop these conversations"
        )


def states_dtype(recipe: Recipe) -> torch.dtype | None:
    """What the target's states are cast to: float32 for a float32 forward, else nothing."""
    return torch.float32 if recipe.precision == "fp32" else None


def loss_count(row: PackedRow, per_sequence: bool) -> int:
    """What a row adds to the divisor of the loss.

    Its positions that the first draft step supervises, or its conversations that have one.
    """
    if not per_sequence:
        return row.num_supervised
    targets_1T = draft_targets(
        row.tokens_T[None], row.loss_mask_T[None], row.segments_T[None], step=0
    )
    return len(set(row.segments_T[targets_1T[0] != IGNORE].tolist()))
