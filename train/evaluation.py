"""A drafter's worth as it learns: validation loss, then the real tree loop on held-out prompts.

Nothing here draws from the training's random state: every training micro-batch seeds its own.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from distill.criterion import ChunkedCriterion
from distill.features import FeatureSource, RowStates
from distill.workspace import Workspace
from heads.base import Checkpoint, Contract, Drafter, fill
from heads.tree import TreeShape
from infer.compare import measure_acceptance
from infer.loop import GenerationSettings
from infer.sampling import Sampling
from infer.target import TargetModel
from infer.trees import grow_static_tree
from train.batches import collate
from train.corpus import Corpus
from train.engine import Engine
from train.ledger import Ledger
from train.logbook import accuracies
from train.recipe import Recipe
from train.stepping import states_dtype

NUM_RANKS = 10


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found; `checkpoint` and `tau` on the main process only."""

    sums_SX: Tensor
    checkpoint: Checkpoint | None
    tau: float
    seconds: float


@dataclass
class Evaluator:
    """Measures the drafter as it stands."""

    recipe: Recipe
    engine: Engine
    target: TargetModel
    corpus: Corpus
    features: FeatureSource
    workspace: Workspace
    ledger: Ledger

    def measure(self, step: int) -> Evaluation:
        """Validation sums over all processes, acceptance on the main one; all take part."""
        start = perf_counter()
        sums_SX = self._validation_sums()
        tensors = self.engine.whole_state()
        checkpoint, tau = None, float("nan")
        if self.engine.is_main:
            rates = accuracies(sums_SX)
            checkpoint = self._plain_copy(tensors)
            tau = self._acceptance_length(checkpoint.drafter, rates)
            checkpoint.calibration |= {"accuracies_HK": rates, "tau": tau, "step": step}
            checkpoint.drafter.to(dtype=torch.float32)
            fill(checkpoint.drafter, tensors, "the trained drafter")
        return Evaluation(sums_SX, checkpoint, tau, perf_counter() - start)

    def _validation_sums(self) -> Tensor:
        """Loss sums and counts over the held-out rows, summed over processes."""
        rows, size = self.corpus.validation.rows, self.recipe.optimizer.micro_batch
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        processes, total = self.engine.processes, None
        dropped: list[str] = []
        self.engine.model.eval()
        for first in range(0, len(groups), processes):
            number = first + self.engine.process
            # Sharded weights are gathered by all at once: who has no group left repeats the first.
            group = groups[number if number < len(groups) else 0]
            states = [self.features.states(row) for row in group]
            dropped += [name for state in states for name in state.dropped]
            sums = self._sums(states)
            sums = sums if number < len(groups) else torch.zeros_like(sums)
            total = sums if total is None else total + sums
        self.engine.model.train()
        self.ledger.enter(dropped)
        assert total is not None
        return self.engine.total(total)

    @torch.no_grad()
    def _sums(self, states: list[RowStates]) -> Tensor:
        batch = collate(states, self.engine.device, states_dtype(self.recipe))
        ranks = min(NUM_RANKS, len(self.corpus.vocab or self.target.shared.lm_head_VD))
        criterion = ChunkedCriterion(
            batch,
            self.recipe.loss.settings,
            self.target.shared.lm_head_VD,
            ranks,
            self.workspace,
        )
        sums: Tensor = self.engine.model(batch, criterion)[1]
        return sums

    def _plain_copy(self, tensors: dict[str, Tensor]) -> Checkpoint:
        """The drafter as a loader would bring it back, apart from the one that engines wrap."""
        trained = self.engine.drafter
        drafter = type(trained).blank(trained.config, self.target.identity)
        fill(drafter, tensors, "the trained drafter")
        fields: dict[str, Any] = trained.contract_fields()
        return Checkpoint(drafter, Contract(target=self.target.identity, **fields))

    def _acceptance_length(self, drafter: Drafter, rates: list[list[float]]) -> float:
        """tau of the greedy loop, with a tree grown from the accuracies measured just now.

        1 when every answer ended before a round was needed. Dropped conversations are not asked.
        """
        drafter.to(device=self.target.device, dtype=self.target.dtype).eval()
        drafter.bind(self.target.shared)
        settings = GenerationSettings(
            max_new_tokens=self.recipe.eval.max_new_tokens,
            sampling=Sampling(),
            rule="greedy",
            shape=tree_for(rates, self.recipe.eval.tree_nodes),
        )
        questions = self.corpus.questions
        if isinstance(self.recipe.eval.prompts, int):
            questions = [q for q in questions if q.id not in self.ledger.names]
        report = measure_acceptance(self.target, drafter, questions, settings)
        return float(report.acceptance_length) if report.counts.rounds else 1.0


def tree_for(rates: list[list[float]], num_drafts: int) -> TreeShape:
    """The tree of `num_drafts` drafts, or of as many as there are candidates for."""
    possible, level = 0, 1
    for row in rates:
        level *= len(row)
        possible += level
    return grow_static_tree(rates, min(num_drafts, possible))
