"""MTP heads in the form that MiMo models ship and engines serve: one more layer of the target.

Source: DeepSeek-V3 (2412.19437), section 2.2, for the module; FastMTP (2509.18362) for one module
used recursively, its steps weighing 0.6^k. A module joins [norm(state); norm(embedding)], runs one
Qwen2 layer and a final norm; the output feeds the target's lm_head and, as the next state, the
next step. The embedding is zero in the slot of position 0, as vLLM and SGLang make it.

Shapes: B rows, T positions, A captured layers, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.base import Needs, SharedWeights, TargetIdentity
from heads.decoder import BiasedDecoderLayer, DecoderConfig, Plan
from heads.errors import UserError
from heads.recurrent import RecurrentDrafter, Step
from heads.vocab import VocabMap


class MtpConfig(DecoderConfig):
    """`num_modules`: module k serves draft step k, the last one every step beyond.

    `target_state`: what the first step reads of the target, before its final norm (vLLM) or after
    it (SGLang).
    """

    kind: Literal["mtp"] = "mtp"
    num_modules: int = Field(default=1, ge=1, le=16)
    target_state: Literal["before_norm", "after_norm"] = "before_norm"


class MtpModule(BiasedDecoderLayer):
    """[norm(state); norm(embedding)] through one projection, one Qwen2 layer and one norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(size, eps=eps)
        self.hidden_layernorm = LlamaRMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = LlamaRMSNorm(size, eps=eps)

    def forward(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
    ) -> Tensor:
        """The next state [B, T, D], normed."""
        normed = [self.hidden_layernorm(states_BTD), self.token_layernorm(embeds_BTD)]
        x_BTD = self.input_proj(torch.cat(normed, dim=-1))
        x_BTD = super().forward(x_BTD, position_embeddings=rotary, plans=plans)
        out_BTD: Tensor = self.final_layernorm(x_BTD)
        return out_BTD


class Mtp(RecurrentDrafter):
    """One module or several between the target's embedding and the target's lm_head.

    They share one record of keys and values: each reads the first step's of the whole text, made
    by module 0, and those of the draft's own earlier steps.
    """

    kind = "mtp"
    Config = MtpConfig
    reduces_vocab = False
    native_tensors: ClassVar[Mapping[str, str]] = {"model.mtp_layers.": "mtp_layers."}

    config: MtpConfig

    def __init__(self, config: MtpConfig, target: TargetIdentity) -> None:
        config = config.filled(target)
        _check(config, target)
        super().__init__(config, target)
        self._last_layer = target.num_hidden_layers
        self.mtp_layers = nn.ModuleList(
            MtpModule(self.layer_config) for _ in range(config.num_modules)
        )

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Mtp":
        """input_proj starts by handing the state on, the final norm as the target's own."""
        drafter = cls(config, target)
        size = target.hidden_size
        module: Any
        with torch.no_grad():
            for module in drafter.mtp_layers:
                module.input_proj.weight.normal_(0, 0.02)
                module.input_proj.weight[:, :size] += torch.eye(size)
                for name in ("q_proj", "k_proj", "v_proj"):
                    getattr(module.self_attn, name).bias.zero_()
                if shared.final_norm_D is not None:
                    module.final_layernorm.weight.copy_(shared.final_norm_D)
        drafter.bind(shared)
        return drafter

    @property
    def needs(self) -> Needs:
        """The residual stream after the last layer, or that after the final norm."""
        if self.config.target_state == "after_norm":
            return Needs(final_hidden=True)
        return Needs(captured_layers=(self._last_layer,))

    def contract_fields(self) -> dict[str, Any]:
        """What the first step and the later ones read."""
        return super().contract_fields() | {
            "hidden": self.config.target_state.replace("_norm", " the final norm"),
            "recurrence": "the module's output, after its final norm",
        }

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The target's embeddings, zero in the slot of position 0."""
        return super().embed(tokens, positions).masked_fill(positions[..., None] == 0, 0)

    def first_states(self, hidden: Tensor | None, captured: Tensor | None) -> Tensor:
        """The target's states themselves."""
        if self.config.target_state == "after_norm":
            assert hidden is not None
            return hidden
        assert captured is not None
        return captured[..., 0, :]

    def step(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
        depth: int,
    ) -> Step:
        """The step's module; its output is the next state too."""
        module = self.mtp_layers[min(depth, len(self.mtp_layers) - 1)]
        out_BTD = module(embeds_BTD, states_BTD, rotary, plans)
        return Step(out_BTD, out_BTD)


def _check(config: MtpConfig, target: TargetIdentity) -> None:
    if config.draft_vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size {config.draft_vocab_size} was given: an MTP head drafts "
            "with the target's own lm_head over its whole vocabulary; drop the field, or train "
            "eagle3"
        )
    if config.hidden_size != target.hidden_size:
        raise UserError(
            f"drafter.hidden_size {config.hidden_size} was given, the target {target.name} has "
            f"{target.hidden_size}: an MTP head reads the target's states and feeds its lm_head, "
            "so both must be equal; drop the field"
        )
    if config.attention_bias:
        raise UserError(
            "drafter.attention_bias was given: an MTP head's queries, keys and values always have "
            "a bias, its attention's output never has one; drop the field"
        )
    if config.num_modules > config.num_steps:
        raise UserError(
            f"drafter.num_modules {config.num_modules} was given for drafter.num_steps "
            f"{config.num_steps}: the last modules would never be trained; give as many steps"
        )
