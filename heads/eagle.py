"""EAGLE-1: a decoder over (token, feature) slots that foretells the target's next feature.

Source: EAGLE (2401.15077), section 4; with several alignment passes HASS (2408.15766), section 3.2;
drafted as a dynamic tree EAGLE-2 (2406.16858). The form is the one that vLLM serves: fc without
bias over [embed, hidden], no input norm on the first layer, no final norm, the target's lm_head
on the un-normed output, which is also what the next step reads.

Shapes: B rows, T positions, D hidden size, A captured layers, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from heads.base import Needs, SharedWeights, TargetIdentity, TrainingBatch
from heads.decoder import DecoderConfig, PlainDecoderLayer, Plan
from heads.errors import UserError
from heads.recurrent import RecurrentDrafter, Step
from heads.vocab import VocabMap

NOISE_LENGTH = 512
"""The length at which the feature noise has its nominal width (2401.15077, appendix)."""


class EagleConfig(DecoderConfig):
    """`num_steps` alignment passes: 1 is EAGLE, 3 is HASS.

    `feature_noise`: half the width of the uniform noise on the target's features in training,
    scaled by 512 / conversation length.
    """

    training_only = frozenset({"num_steps", "feature_noise"})

    kind: Literal["eagle"] = "eagle"
    num_layers: int = Field(default=1, ge=1, le=8)
    num_steps: int = Field(default=1, ge=1, le=16)
    feature_noise: float = Field(default=0.1, ge=0)


class Eagle(RecurrentDrafter):
    """fc and decoder layers between the target's embedding and the target's lm_head."""

    kind = "eagle"
    Config = EagleConfig
    reduces_vocab = False
    predicts_features = True

    config: EagleConfig

    def __init__(self, config: EagleConfig, target: TargetIdentity) -> None:
        if config.draft_vocab_size:
            raise UserError(
                f"drafter.draft_vocab_size {config.draft_vocab_size} was given: EAGLE-1 drafts "
                "with the target's own lm_head over its whole vocabulary; drop the field, or "
                "train eagle3"
            )
        config = config.filled(target)
        if config.hidden_size != target.hidden_size:
            raise UserError(
                f"drafter.hidden_size {config.hidden_size} was given, the target {target.name} "
                f"has {target.hidden_size}: EAGLE-1 reads and foretells the target's own "
                "features, so both must be equal; drop the field"
            )
        super().__init__(config, target)
        self.num_layers = config.num_layers
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            PlainDecoderLayer(self.layer_config, index, input_norm=index > 0)
            for index in range(config.num_layers)
        )

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Eagle":
        """fc starts by handing the feature on; the rest is drawn at random."""
        drafter = cls(config, target)
        size = target.hidden_size
        with torch.no_grad():
            drafter.fc.weight.normal_(0, 0.02)
            drafter.fc.weight[:, size:] += torch.eye(size)
        drafter.bind(shared)
        return drafter

    @property
    def needs(self) -> Needs:
        """The target's state after its final norm."""
        return Needs(final_hidden=True)

    def contract_fields(self) -> dict[str, Any]:
        """The recurrence is un-normed."""
        return super().contract_fields() | {"recurrence": "the layers' output, no norm after it"}

    def first_states(self, hidden: Tensor | None, captured: Tensor | None) -> Tensor:
        """The target's features themselves."""
        assert hidden is not None
        return hidden

    def disturbed(self, states_BTD: Tensor, batch: TrainingBatch) -> Tensor:
        """Features with uniform noise, the wider the shorter the conversation; in training only."""
        if not (self.training and self.config.feature_noise):
            return states_BTD
        segments_BT = batch.segments_BT
        lengths_BT = torch.zeros_like(segments_BT)
        for row, segments_T in enumerate(segments_BT):
            lengths_BT[row] = torch.bincount(segments_T)[segments_T]
        scale_BT1 = self.config.feature_noise * NOISE_LENGTH / lengths_BT[..., None]
        noise_BTD = 2 * torch.rand(states_BTD.shape, device=states_BTD.device) - 1
        return states_BTD + (noise_BTD * scale_BT1).to(states_BTD.dtype)

    def step(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
        depth: int,
    ) -> Step:
        """fc([embed, feature]) through the layers; nothing is normed at the end."""
        x_BTD = self.fc(torch.cat([embeds_BTD, states_BTD], dim=-1))
        for layer in self.layers:
            x_BTD = layer(x_BTD, position_embeddings=rotary, plans=plans)
        return Step(x_BTD, x_BTD)
