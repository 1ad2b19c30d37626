"""EAGLE-3: a decoder over captured layers of the target, trained on its own drafts.

Source: EAGLE-3 (2503.01840), section 3: features of a low, a middle and a high layer go through
fc once; one layer attends over [norm(embed); norm(hidden)]; the lm_head is the drafter's own, over
a draft vocabulary; training unrolls the steps of drafting (training-time test). The form and its
norm flags are those that vLLM serves.

Shapes: B rows, T positions, D hidden size, A captured layers, V draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from heads.base import Needs, SharedWeights, TargetIdentity
from heads.blocks import OutputHead, ProductNorm, narrowed
from heads.decoder import DecoderConfig, Plan
from heads.errors import UserError
from heads.recurrent import RecurrentDrafter, Step
from heads.vocab import VocabMap

R = TypeVar("R")


class Eagle3Config(DecoderConfig):
    """`aux_hidden_state_layer_ids`: captured layers, k being the residual stream after k layers.

    None takes 2, the middle one, and the third from the end. `norm_before_residual`: the layer's
    residual is the normed state. `norm_before_fc`: one norm over all captured states, `fc_norm`:
    one for each. `norm_output`: the next step reads the normed output. `embedding`: the target's
    (frozen) or one of its own.
    """

    kind: Literal["eagle3"] = "eagle3"
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    target_hidden_size: int | None = Field(default=None, ge=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embedding: Literal["shared", "own"] = "shared"


class FusedLayer(nn.Module):
    """A decoder layer whose attention reads [norm(embed); norm(hidden)], 2D wide."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        if self.self_attn.o_proj.bias is not None:
            attended = self.self_attn.o_proj.in_features
            self.self_attn.o_proj = nn.Linear(attended, size, bias=False)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = ProductNorm(size, eps=eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.post_attention_layernorm = ProductNorm(size, eps=eps)

    def forward(
        self,
        embeds_BTD: Tensor,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
    ) -> Tensor:
        """The residual stream after the layer [B, T, D]."""
        normed_BTD = self.hidden_norm(hidden_BTD)
        residual_BTD = normed_BTD if self.norm_before_residual else hidden_BTD
        wide_BTD = torch.cat([self.input_layernorm(embeds_BTD), narrowed(normed_BTD)], dim=-1)
        attended_BTD, _ = self.self_attn(wide_BTD, position_embeddings=rotary, plans=plans)
        x_BTD = residual_BTD + attended_BTD
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class Eagle3(RecurrentDrafter):
    """fc over captured layers, one fused layer, a norm and an output matrix of its own."""

    kind = "eagle3"
    Config = Eagle3Config

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: TargetIdentity) -> None:
        config = config.filled(target)
        wide = config.target_hidden_size or target.hidden_size
        layers = checked_layers(config.aux_hidden_state_layer_ids, target)
        given = {"aux_hidden_state_layer_ids": layers, "target_hidden_size": wide}
        config = config.model_copy(update=given)
        super().__init__(config, target)
        size, eps = self.layer_config.hidden_size, self.layer_config.rms_norm_eps
        _check_sizes(config, target)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(len(layers) * wide, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(wide, eps=eps) for _ in layers)
        self.fc = nn.Linear(len(layers) * wide, size, bias=False)
        self.midlayer = FusedLayer(self.layer_config, config.norm_before_residual)
        self.norm = LlamaRMSNorm(size, eps=eps)
        self.lm_head = OutputHead(size, config.draft_vocab_size or target.vocab_size)
        if config.embedding == "own":
            self.embed_tokens = nn.Embedding(target.vocab_size, size)

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Eagle3":
        """The lm_head starts as the target's rows, fc by handing on the last captured layer."""
        drafter = cls(config, target)
        with torch.no_grad():
            if drafter.config.draft_vocab_size:
                assert vocab is not None and len(vocab) == drafter.config.draft_vocab_size
                drafter.draft_ids.copy_(vocab.target_ids_Vd)
            rows = shared.lm_head_VD if vocab is None else shared.lm_head_VD[vocab.target_ids_Vd]
            wide = target.hidden_size
            if drafter.layer_config.hidden_size == wide:
                drafter.lm_head.weight.copy_(rows)
                drafter.fc.weight.normal_(0, 0.02)
                drafter.fc.weight[:, -wide:] += torch.eye(wide)
                if drafter.config.embedding == "own":
                    drafter.embed_tokens.weight.copy_(shared.embed_VD)
        drafter.bind(shared)
        return drafter

    @property
    def needs(self) -> Needs:
        """The captured layers."""
        assert self.config.aux_hidden_state_layer_ids is not None
        return Needs(captured_layers=self.config.aux_hidden_state_layer_ids)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The target's embeddings or its own."""
        if self.config.embedding == "shared":
            return super().embed(tokens, positions)
        own: Tensor = self.embed_tokens(tokens)
        return own

    def contract_fields(self) -> dict[str, Any]:
        """Norm flags, and what the next step reads."""
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        normed = "after" if self.config.norm_output else "before"
        return super().contract_fields() | {
            "norm_flags": {name: getattr(self.config, name) for name in flags},
            "recurrence": f"the layer's output, {normed} the final norm",
        }

    def first_states(self, hidden: Tensor | None, captured: Tensor | None) -> Tensor:
        """fc over the captured layers, in ascending order."""
        assert captured is not None
        if self.config.norm_before_fc:
            joined = self.input_norm(captured.flatten(-2))
        elif self.config.fc_norm:
            joined = captured
        else:
            joined = captured.flatten(-2)
        if self.config.fc_norm:
            parts = (
                joined.unflatten(-1, (len(self.fc_norm), -1))
                if self.config.norm_before_fc
                else joined
            )
            joined = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts.unbind(-2), strict=True)],
                dim=-1,
            )
        states: Tensor = self.fc(joined)
        return states

    def step(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        plans: Sequence[Plan],
        depth: int,
    ) -> Step:
        """The fused layer; the output is normed, the state is the sum before it."""
        out_BTD = self.midlayer(embeds_BTD, states_BTD, rotary, plans)
        normed_BTD = self.norm(out_BTD)
        return Step(normed_BTD, normed_BTD if self.config.norm_output else out_BTD)

    def with_matrix(self, output: Tensor, apply: Callable[[Tensor, Tensor], R]) -> R:
        """Its own output matrix."""
        found: R = self.lm_head(output, apply)
        return found


def checked_layers(given: tuple[int, ...] | None, target: TargetIdentity) -> tuple[int, ...]:
    """Captured layers in ascending order, distinct and in range.

    None takes 2, n // 2 and n - 3 of n layers, and in a target too shallow for three distinct ones
    as many as there are.

        n = 30  ->  (2, 15, 27)
    """
    last = target.num_hidden_layers
    if given is None:
        wanted = (2, last // 2, last - 3)
        inside = sorted({min(max(layer, 1), last) for layer in wanted})
        spare = [layer for layer in range(1, last + 1) if layer not in inside]
        return tuple(sorted(inside + spare[: max(0, 3 - len(inside))]))
    if not given or len(set(given)) < len(given):
        raise UserError(
            f"drafter.aux_hidden_state_layer_ids {list(given)} are not distinct; engines take "
            "repeated layers once, and fc would not fit: give different ones"
        )
    if min(given) < 1 or max(given) > last:
        raise UserError(
            f"drafter.aux_hidden_state_layer_ids {list(given)} are out of range; the target "
            f"{target.name} has layers 1 to {last} (k is the state after k layers)"
        )
    return tuple(sorted(given))


def _check_sizes(config: Eagle3Config, target: TargetIdentity) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise UserError(
            f"drafter.target_hidden_size {config.target_hidden_size} was given, the target "
            f"{target.name} has {target.hidden_size}; drop the field"
        )
    if config.embedding == "shared" and config.hidden_size != target.hidden_size:
        raise UserError(
            f"drafter.hidden_size {config.hidden_size} differs from the target's "
            f"{target.hidden_size}, whose embeddings it reads; set drafter.embedding=own, or "
            "drop hidden_size"
        )
    if config.draft_vocab_size and config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size {config.draft_vocab_size} is larger than the target's "
            f"vocabulary of {target.vocab_size}; ask for less, or drop the field"
        )
