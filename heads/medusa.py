"""Medusa heads: head h predicts token t + 2 + h from the target's state h_t alone.

Source: Medusa (2401.10774), section 3.1; the form is the one that vLLM serves: residual layers
without bias, then an output matrix, the target's own (shared, frozen) or one a head.

Shapes: B rows, T positions, H heads, D hidden size, K candidates, V (draft) vocabulary, N nodes.
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from heads.base import (
    Criterion,
    DraftBudget,
    Drafter,
    DrafterConfig,
    DraftState,
    Needs,
    SharedWeights,
    StepLoss,
    TargetIdentity,
    TrainingBatch,
)
from heads.blocks import OutputHead, ResidualStack, fill_nan
from heads.drawing import draw_children, drawn_tree, parent_rows
from heads.errors import UserError
from heads.tree import TokenTree, TreeShape
from heads.vocab import VocabMap


class MedusaConfig(DrafterConfig):
    """`num_layers` residual layers a head; `lm_head`: the target's for all heads, or one a head."""

    kind: Literal["medusa"] = "medusa"
    num_heads: int = Field(default=3, ge=1, le=16)
    num_layers: int = Field(default=1, ge=1, le=8)
    lm_head: Literal["shared", "own"] = "shared"


class Medusa(Drafter):
    """H residual stacks over the target's last post-norm state, each with an output matrix."""

    kind = "medusa"
    Config = MedusaConfig
    can_sample = True

    config: MedusaConfig
    draft_ids: Tensor

    def __init__(self, config: MedusaConfig, target: TargetIdentity) -> None:
        super().__init__()
        if config.draft_vocab_size and config.lm_head == "own":
            raise UserError(
                "drafter.lm_head is 'own' and drafter.draft_vocab_size is set: no engine serves "
                "heads of their own over a draft vocabulary; use lm_head=shared "
                "or drop draft_vocab_size"
            )
        self.config, self.vocab_size = config, target.vocab_size
        hidden = target.hidden_size
        self.blocks = nn.ModuleList(
            ResidualStack(hidden, config.num_layers) for _ in range(config.num_heads)
        )
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                OutputHead(hidden, target.vocab_size) for _ in range(config.num_heads)
            )
        if config.draft_vocab_size:
            self.register_buffer(
                "draft_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long)
            )
        self._vocab: VocabMap | None = None
        self._rows_VD: Tensor | None = None

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Medusa":
        """Zero residual layers; own output matrices start as copies of the target's."""
        drafter = cls(config, target)
        if config.lm_head == "own":
            with torch.no_grad():
                for head in drafter.lm_heads:
                    head.weight.copy_(shared.lm_head_VD)  # type: ignore[operator]
        if config.draft_vocab_size:
            assert vocab is not None and len(vocab) == config.draft_vocab_size
            drafter.draft_ids.copy_(vocab.target_ids_Vd)
        drafter.bind(shared)
        return drafter

    @classmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "Medusa":
        """All NaN, to be filled from a checkpoint."""
        drafter = cls(config, target)
        fill_nan(drafter)
        return drafter

    def bind(self, shared: SharedWeights) -> None:
        """Take the target's output matrix; of a draft vocabulary only its rows."""
        super().bind(shared)
        rows = shared.lm_head_VD
        if self.config.draft_vocab_size:
            self._vocab = VocabMap(self.draft_ids.cpu(), self.vocab_size)
            rows = rows[self.draft_ids.to(rows.device)]
        object.__setattr__(self, "_rows_VD", rows)

    @property
    def needs(self) -> Needs:
        """The target's state after its final norm."""
        return Needs(final_hidden=True)

    @property
    def max_depth(self) -> int:
        """One token a head."""
        return self.config.num_heads

    def contract_fields(self) -> dict[str, Any]:
        """No recurrence, no attention: the heads read one state."""
        return super().contract_fields() | {"recurrence": "none: every head reads the same state"}

    def forward(self, batch: TrainingBatch, criterion: Criterion) -> list[StepLoss]:
        """One StepLoss a head."""
        losses = []
        for step, block in enumerate(self.blocks):
            hidden_BTD = block(batch.hidden_BTD)
            loss = partial(criterion, step=step, vocab=self._vocab)
            if self.config.lm_head == "own":
                losses.append(self.lm_heads[step](hidden_BTD, loss))
            else:
                losses.append(loss(hidden_BTD, self._rows_VD))  # type: ignore[arg-type]
        return losses

    def draft_logits(self, hidden_D: Tensor, num_heads: int) -> Tensor:
        """Logits [H, V] of the first `num_heads` heads at one state."""
        hidden_HD = torch.stack([self.blocks[h](hidden_D) for h in range(num_heads)])
        if self.config.lm_head == "shared":
            assert self._rows_VD is not None, "bind the drafter to its target first"
            return nn.functional.linear(hidden_HD, self._rows_VD)
        return torch.stack([self.lm_heads[h](hidden_HD[h]) for h in range(num_heads)])

    @torch.no_grad()
    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """Node of depth d and rank r: candidate r of head d-1, whatever its parent is."""
        shape, tokens = budget.shape, [state.tokens[-1]]
        assert isinstance(shape, TreeShape), shape
        if shape.depth == 0:
            return TokenTree(shape, torch.tensor(tokens))
        if shape.depth > self.config.num_heads:
            raise UserError(
                f"{shape.depth} draft tokens in a row were asked of "
                f"{self.config.num_heads} Medusa heads; use a chain or tree of at most that depth"
            )
        assert state.hidden_TD is not None
        logits_HV = self.draft_logits(state.hidden_TD[-1], shape.depth)
        if budget.probs is not None:
            return self._sample(logits_HV, shape, tokens, budget)
        if max(shape.ranks) >= logits_HV.shape[-1]:
            raise UserError(
                f"the tree asks for candidate {max(shape.ranks)} of {logits_HV.shape[-1]} tokens; "
                "its ranks are too large"
            )
        candidates_HK = self._to_target(
            logits_HV.topk(max(shape.ranks) + 1, dim=-1).indices
        ).tolist()
        tokens += [
            candidates_HK[depth - 1][rank]
            for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)
        ]
        return TokenTree(shape, torch.tensor(tokens))

    def _sample(
        self, logits_HV: Tensor, shape: TreeShape, root: list[int], budget: DraftBudget
    ) -> TokenTree:
        """A tree drawn from each head's own distribution, with that distribution."""
        assert budget.probs is not None
        if self._vocab is not None:
            logits_HV = self._vocab.spread(logits_HV)
        probs_HV = budget.probs(logits_HV).cpu()
        rows = [min(depth, len(probs_HV) - 1) for depth in shape.depths[: parent_rows(shape)]]
        probs_NV, most = probs_HV[rows], max(map(len, shape.children))
        children_NK = draw_children(probs_NV, most, budget.replacement, budget.generator)
        tokens_N = torch.tensor([*root, *[0] * (len(shape) - 1)])
        for node, children in enumerate(shape.children):
            if children:
                tokens_N[list(children)] = children_NK[node, : len(children)]
        return drawn_tree(shape, tokens_N, probs_NV)

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._vocab is None else self._vocab.to_target(draft_ids)
