"""Decoder layers of drafters: transformers' own attention, MLP and norms, over any visible set.

Which positions a query sees is a `Plan`: the unrolled steps of a training batch, or the tree nodes
of several requests behind their caches. Both run the same layers.

Shapes: B rows, T positions, H heads, G key and value heads, d head size, D hidden size, N new
nodes of a request, L positions it holds after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, Qwen2Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from heads.base import DrafterConfig, TargetIdentity
from heads.blocks import ProductNorm
from heads.cache import TreeCacheLayer
from heads.errors import UserError

PLANNED = "outrider_plan"
SHORT = 1024
"""Tokens of a conversation whose attention scores are kept whole in training on a CPU: a third of
the time of masked attention there, and T squared of memory."""
PARTIAL = ("partial_rotary_factor", "mrope_section")
"""Rope settings that the layers here do not follow."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)


class DecoderConfig(DrafterConfig):
    """The sizes of a drafter's decoder layers; what is None is the target's own.

    `num_steps` draft steps are unrolled in training.
    """

    training_only = frozenset({"num_steps"})

    num_steps: int = Field(default=3, ge=1, le=16)
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(default=None, ge=1)
    hidden_act: str | None = None
    attention_bias: bool = False

    def filled(self, target: TargetIdentity) -> Self:
        """The same with the target's own values where none was given."""
        own = target.decoder | {"hidden_size": target.hidden_size}
        missing = {k: own.get(k) for k in (*SIZES, "rope") if getattr(self, k) is None}
        unknown = sorted(k for k, v in missing.items() if v is None)
        if unknown:
            raise UserError(
                f"the target {target.name} ({target.model_type}) does not tell {unknown} for the "
                "drafter's layers; set drafter." + ", drafter.".join(unknown)
            )
        filled = self.model_copy(update=missing)
        rope = filled.rope or {}
        followed = [name for name in PARTIAL if rope.get(name) not in (None, 1.0)]
        if followed:
            raise UserError(
                f"rope settings {filled.rope} were given; the drafter's layers turn whole heads "
                f"and do not follow {followed[0]}: give drafter.rope without it"
            )
        if filled.num_attention_heads % filled.num_key_value_heads:  # type: ignore[operator]
            raise UserError(
                f"drafter.num_attention_heads {filled.num_attention_heads} is no multiple of "
                f"drafter.num_key_value_heads {filled.num_key_value_heads}"
            )
        return filled


def decoder_fields(config: Any) -> dict[str, Any]:
    """What a drafter's layers copy from a transformers config; absent where a model has none."""
    heads = getattr(config, "num_attention_heads", None)
    found = {
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None)
        or (config.hidden_size // heads if heads else None),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "hidden_act": getattr(config, "hidden_act", None),
        "rope": getattr(config, "rope_parameters", None),
    }
    return {k: v for k, v in found.items() if v is not None}


def rope_note(given: Mapping[str, Any] | None, target: TargetIdentity) -> str | None:
    """A warning that names both where a drafter's rope is not its target's; None where it is."""
    own, named = (
        {k: v for k, v in (rope or {}).items() if v is not None}
        for rope in (target.decoder.get("rope"), given)
    )
    if named == own or given is None:
        return None
    return f"warning: its rope settings {named} are not the target's {own}; the drafter's are used"


def layer_config(config: DecoderConfig) -> LlamaConfig:
    """The transformers config of a filled drafter config, its attention planned from here."""
    fields = {name: getattr(config, name) for name in (*SIZES, "attention_bias")}
    try:
        made = LlamaConfig(**fields, rope_parameters=dict(config.rope or {}))
        Rotary(made)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the drafter's layers cannot be made of {fields} and rope {config.rope}: {reason}; "
            "set what is wrong among them, or leave it to the target's own"
        ) from None
    if made.hidden_act not in ACT2FN:
        raise UserError(f"drafter.hidden_act {made.hidden_act!r} is no activation of transformers")
    planned(made)
    return made


class Rotary:
    """Rotary embeddings that stay in float32 whatever the drafter is cast to (no module)."""

    def __init__(self, config: LlamaConfig) -> None:
        self._embedding = LlamaRotaryEmbedding(config)

    def __call__(self, like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, d] in the dtype of `like`."""
        with torch.autocast(like.device.type, enabled=False):
            cos_BTd, sin_BTd = self._embedding(like, positions_BT)
        return cos_BTd, sin_BTd


class Plan(Protocol):
    """Who sees whom in one forward of a layer, and where keys and values are kept."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention output [B, H, T, d] of queries [B, H, T, d] and new keys [B, G, T, d]."""
        ...


def _planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plans: Sequence[Plan],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call: the layer's own plan decides."""
    layer: Any = module.layer_idx
    out = plans[layer].attend(query, key, value, scaling)
    return out.transpose(1, 2), None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float
) -> Tensor:
    """Scaled dot products; `visible` bool [queries, keys], None is causal."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling
    )


@dataclass
class UnrolledPlan:
    """Training: draft step i at a position sees the prefix and its own earlier steps.

    The keys of step 0 stand for the text up to the position, those of later steps only for the
    draft that began there (the diagonal of arXiv 2503.01840, training-time test):

        step 2, position t  ->  step 0 at 0..t, step 1 at t, step 2 at t

    `spans`: the conversations of the packed rows as (row, start, end).
    """

    spans: list[tuple[int, int, int]]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the next step; its keys and values are kept for the steps after it."""
        self.keys.append(key)
        self.values.append(value)
        rows: list[list[Tensor]] = [[] for _ in range(len(query))]
        ends = [0] * len(query)
        for row, start, end in self.spans:
            part = query[row, :, start:end]
            keys, values = (
                [step[row, :, start:end] for step in steps] for steps in (self.keys, self.values)
            )
            short = query.device.type == "cpu" and end - start <= SHORT
            attend = unrolled_attention if short else unrolled_attention_masked
            rows[row].append(attend(part, keys, values, scaling))
            ends[row] = end
        for row, end in enumerate(ends):
            # Zeros that hang on the graph: every engine wants a gradient of every parameter.
            own = (x[row, :, end:] for x in (key, value))
            rows[row].append(query[row, :, end:] * 0 + sum(x.sum() * 0 for x in own))
        return torch.stack([torch.cat(parts, dim=1) for parts in rows])


def unrolled_attention(
    query_HTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float
) -> Tensor:
    """Attention [H, T, d] of the last of several steps, keys and values [G, T, d] of each.

    Only the first step's keys meet every query; each later step adds one score a position. The
    scores [H, T, T] are whole: for conversations that are short.
    """
    heads, length, size = query_HTd.shape
    groups = keys[0].shape[0]
    query = query_HTd.reshape(groups, heads // groups, length, size)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    prefix = torch.matmul(query.flatten(1, 2) * scaling, keys[0].transpose(-1, -2))
    prefix = prefix.view(groups, -1, length, length).masked_fill(later, float("-inf"))
    own = [(query * key[:, None]).sum(-1, keepdim=True) * scaling for key in keys[1:]]
    weights = torch.cat([prefix, *own], dim=-1).softmax(-1)
    seen = torch.matmul(weights[..., :length].flatten(1, 2), values[0]).view_as(query)
    for step, value in enumerate(values[1:]):
        seen = seen + weights[..., length + step, None] * value[:, None]
    return seen.reshape(heads, length, size)


def unrolled_attention_masked(
    query_HTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float
) -> Tensor:
    """The same by one masked attention over all steps' keys, whose scores are never whole."""
    visible = unrolled_visibility(query_HTd.shape[1], len(keys), query_HTd.device)
    key, value = (torch.cat(list(steps), dim=1)[None] for steps in (keys, values))
    return _attention(query_HTd[None], key, value, visible, scaling)[0]


def unrolled_visibility(length: int, steps: int, device: torch.device) -> Tensor | None:
    """Which keys of `steps` steps each position of the last one sees [length, steps * length].

    None for one step, which is causal. length = 2, steps = 2  ->  [[1, 0, 1, 0], [1, 1, 0, 1]]
    """
    if steps == 1:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    eye = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([ones.tril(), *[eye] * (steps - 1)], dim=1)


@dataclass
class NodePlan:
    """Drafting: the new nodes of several requests, each request behind its own cache.

    Along T lie the nodes of all requests, `counts` of each; `visible` [N, L] a request says which
    of its positions each node sees, None is plain causal behind what is kept.
    """

    caches: Sequence[TreeCacheLayer]
    counts: Sequence[int]
    visible: Sequence[Tensor | None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the nodes; their keys and values are put into the caches."""
        parts = []
        split = [torch.split(x, list(self.counts), dim=2) for x in (query, key, value)]
        for cache, seen, queries, new_keys, new_values in zip(
            self.caches, self.visible, *split, strict=True
        ):
            base = cache.length
            keys, values = cache.update(new_keys, new_values)
            if seen is None and base:
                count = queries.shape[2]
                seen = torch.ones(count, base + count, dtype=torch.bool, device=query.device)
                seen = seen.tril(base)
            parts.append(_attention(queries, keys, values, seen, scaling))
        return torch.cat(parts, dim=2)


@dataclass
class BatchPlan:
    """Writing: the new tokens of several requests of one cache, a row each.

    `visible_BNL` says which of its positions each new token sees.
    """

    cache: TreeCacheLayer
    visible_BNL: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the new tokens; their keys and values are put into the cache."""
        keys, values = self.cache.update(key, value)
        return _attention(query, keys, values, self.visible_BNL[:, None], scaling)


def planned(config: Any) -> Any:
    """The same transformers config with attention that is planned from here."""
    AttentionInterface.register(PLANNED, _planned_attention)
    config._attn_implementation = PLANNED
    return config


def spans_of(segments_BT: Tensor) -> list[tuple[int, int, int]]:
    """The conversations of packed rows as (row, start, end); segments from 1, 0 is padding.

    segments = [[1, 1, 2, 0]]  ->  [(0, 0, 2), (0, 2, 3)]
    """
    spans = []
    for row, segments in enumerate(segments_BT.tolist()):
        start = 0
        for place in range(1, len(segments) + 1):
            if place == len(segments) or segments[place] != segments[start]:
                if segments[start] > 0:
                    spans.append((row, start, place))
                start = place
    return spans


class PlainDecoderLayer(LlamaDecoderLayer):
    """A Llama layer whose input norm may be left out."""

    def __init__(self, config: LlamaConfig, layer_idx: int, input_norm: bool) -> None:
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ProductNorm(size, eps=eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = ProductNorm(size, eps=eps)


class BiasedDecoderLayer(Qwen2DecoderLayer):
    """A Qwen2 layer: queries, keys and values have a bias, the attention's output has none."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        fields = {name: getattr(config, name) for name in SIZES}
        made = Qwen2Config(**fields, num_hidden_layers=layer_idx + 1)
        made._attn_implementation = PLANNED
        super().__init__(made, layer_idx)
