"""Drafters that feed on themselves: one decoder over (token, state) slots, a step a draft token.

Slot t holds token t + 1 and the target's state at t, and foretells token t + 2. The next slot
holds the drafter's own token and its own state. Training unrolls the same steps over a whole row;
that both are the same is proven in the tests, step by step.

Shapes: B rows, T positions, R requests, N nodes, D drafter's hidden size, V (draft) vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.align import draft_inputs
from heads.base import (
    Criterion,
    DraftState,
    SharedWeights,
    StepLoss,
    TargetIdentity,
    TrainingBatch,
)
from heads.blocks import fill_nan
from heads.cache import TreeCache
from heads.decoder import (
    DecoderConfig,
    NodePlan,
    Plan,
    Rotary,
    UnrolledPlan,
    layer_config,
    spans_of,
)
from heads.rounds import MEASURED_STEPS, Step, SteppingDrafter
from heads.vocab import VocabMap

__all__ = ["RecurrentDrafter", "Step"]


class RecurrentDrafter(SteppingDrafter):
    """What the kinds share: the unrolled training forward and drafting over trees.

    A kind says how the target's states become slots (`first_states`), what one step does (`step`),
    and which output matrix it reads where that is not the target's (`with_matrix`).
    """

    predicts_features = False
    """Whether a step's state is meant to be the target's own state one position later."""

    config: DecoderConfig
    draft_ids: Tensor
    rotary: Rotary

    def __init__(self, config: DecoderConfig, target: TargetIdentity) -> None:
        super().__init__()
        self.config, self.vocab_size = config, target.vocab_size
        self.layer_config = layer_config(config)
        # Neither is a module: a cast of the drafter must not round the frequencies.
        object.__setattr__(self, "rotary", Rotary(self.layer_config))
        self._vocab: VocabMap | None = None
        if config.draft_vocab_size:
            self.register_buffer(
                "draft_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long)
            )

    @classmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "RecurrentDrafter":
        """All NaN, to be filled from a checkpoint."""
        drafter = cls(config, target)
        fill_nan(drafter)
        return drafter

    @property
    def trained_steps(self) -> int:
        """The draft steps that training unrolls."""
        return self.config.num_steps

    @abstractmethod
    def first_states(self, hidden: Tensor | None, captured: Tensor | None) -> Tensor:
        """The states [..., D] that the first step reads, of the target's [..., D], [..., A, D]."""

    @abstractmethod
    def step(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
        depth: int,
    ) -> Step:
        """Draft step `depth` (from 0) over slots of token embeddings and states."""

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What slots at `positions` [...] read of tokens [...]: the target's embeddings."""
        assert self.shared is not None, "bind the drafter to its target first"
        return F.embedding(tokens, self.shared.embed_VD)

    def with_matrix(self, output: Tensor, apply: Any) -> Any:
        """The target's own output matrix, frozen, unless the kind has one of its own."""
        assert self.shared is not None, "bind the drafter to its target first"
        return apply(output, self.shared.lm_head_VD)

    def bind(self, shared: SharedWeights) -> None:
        """Take the target's tensors; read the draft vocabulary that came with the weights."""
        super().bind(shared)
        if self.config.draft_vocab_size:
            self._vocab = VocabMap(self.draft_ids.cpu(), self.vocab_size)

    def contract_fields(self) -> dict[str, Any]:
        """Rope and recurrence; a kind adds its norm flags."""
        return super().contract_fields() | {"rope": dict(self.config.rope or {})}

    def forward(self, batch: TrainingBatch, criterion: Criterion) -> list[StepLoss]:
        """One StepLoss a draft step, fed with the one before it; more steps in eval mode."""
        plans = self.training_plans(batch)
        states_BTD = self.first_states(batch.hidden_BTD, batch.captured_BTAD)
        states_BTD = self.disturbed(states_BTD, batch)
        losses = []
        steps = self.trained_steps if self.training else max(self.trained_steps, MEASURED_STEPS)
        for step in range(steps):
            done = self.unrolled_step(batch, states_BTD, step, plans)
            states_BTD = done.state
            loss = partial(
                criterion,
                step=step,
                vocab=self._vocab,
                features_BTD=done.state if self.predicts_features else None,
            )
            losses.append(self.with_matrix(done.output, loss))
        return losses

    def training_plans(self, batch: TrainingBatch) -> list[UnrolledPlan]:
        """A plan a layer over the batch's conversations."""
        spans = spans_of(batch.segments_BT)
        return [UnrolledPlan(spans) for _ in range(self.num_layers)]

    def unrolled_step(
        self, batch: TrainingBatch, states_BTD: Tensor, step: int, plans: Sequence[Plan]
    ) -> Step:
        """Draft step `step` of every position at once."""
        positions_BT = batch.positions_BT + step
        embeds_BTD = self.embed(draft_inputs(batch.tokens_BT, step), positions_BT)
        if not torch.is_autocast_enabled(embeds_BTD.device.type):
            embeds_BTD = embeds_BTD.to(states_BTD.dtype)
        rotary = self.rotary(embeds_BTD, positions_BT)
        return self.step(embeds_BTD, states_BTD, rotary, plans, step)

    def disturbed(self, states_BTD: Tensor, batch: TrainingBatch) -> Tensor:
        """The first states as training sees them; a kind may add noise."""
        return states_BTD

    def absorb(self, states: Sequence[DraftState]) -> Step:
        """Run the first step over every slot that is new; the last one's result [R, D] each."""
        tokens: list[int] = []
        positions: list[int] = []
        firsts, counts = [], []
        for state in states:
            base = state.memory.length
            first_TD = self.first_states(state.hidden_TD, state.captured_TAD)
            count = len(first_TD)
            assert base + count == len(state.tokens) - 1, "a state for every processed position"
            tokens += state.tokens[base + 1 :]
            firsts.append(first_TD)
            positions += range(base, base + count)
            counts.append(count)
        memories = [state.memory for state in states]
        done = self.nodes_step(
            tokens, torch.cat(firsts), positions, memories, counts, [None] * len(states), depth=0
        )
        last = torch.tensor(counts).cumsum(0) - 1
        return Step(done.output[last], done.state[last])

    def nodes_step(
        self,
        tokens: Sequence[int] | Tensor,
        states_ND: Tensor,
        positions: Sequence[int],
        memories: Sequence[TreeCache],
        counts: Sequence[int],
        visible: Sequence[Tensor | None],
        depth: int,
    ) -> Step:
        """Draft step `depth` over the nodes of several requests, one after another [N, D]."""
        device = states_ND.device
        places_N = torch.tensor(list(positions), device=device)
        embeds_ND = self.embed(torch.as_tensor(tokens, device=device), places_N)
        rotary = self.rotary(embeds_ND, places_N[None])
        plans = [
            NodePlan([memory.tree_layers[layer] for memory in memories], counts, visible)
            for layer in range(self.num_layers)
        ]
        done = self.step(embeds_ND[None], states_ND[None], rotary, plans, depth)
        return Step(done.output[0], done.state[0])
