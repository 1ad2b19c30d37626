"""Drafters of decoder layers in the forms that the public shares, read into ours.

Nothing here is shared with the writers: what Outrider exported is read by the same code, so that a
mistake of a writer shows. Read from vLLM 0.32.0 (models/llama_eagle.py, llama_eagle3.py,
transformers_utils/configs/): what it would ignore in silence is refused here, unless it is zero.

Shapes: D hidden size, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from heads.base import Drafter, TargetIdentity, drafter_class, fill
from heads.decoder import SIZES
from heads.errors import UserError
from heads.schema import parse

FUSED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
PLAIN = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
EMBEDDING = "embed_tokens.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
IGNORED = ("t2d", "self_attn.rotary_emb.inv_freq")


@dataclass
class PublicForm:
    """What a folder holds, with `notes` on what had to be guessed or left out.

    `config` is flat (nested forms laid out), `tensors` have the names that our drafters use.
    """

    where: str
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)

    def drafter(self, target: TargetIdentity) -> Drafter:
        """The drafter, not bound yet. Raises UserError where it does not fit the target."""
        given = self.config.get("vocab_size")
        if given != target.vocab_size:
            raise UserError(
                f"{self.where} has vocab_size {given}, the target {target.name} has "
                f"{target.vocab_size}; give the target that the drafter was trained for"
            )
        settings = READERS[self.kind](self, target)
        cls = drafter_class(self.kind)
        config = parse(cls.Config, {"kind": self.kind, **settings}, self.where)
        drafter = cls.blank(config, target)
        self._drop_zero_biases(set(drafter.state_dict()))
        fill(drafter, self.tensors, self.where)
        return drafter.eval()

    @property
    def shares_matrices(self) -> bool:
        """Whether embedding and output matrix are always the target's own."""
        return self.kind == "eagle"

    def _drop_zero_biases(self, known: set[str]) -> None:
        """A bias that the drafter has no place for may be there as zeros, as some engines ask."""
        extra = [n for n in self.tensors if n.endswith(".bias") and n not in known]
        filled = [name for name in extra if bool(self.tensors[name].any())]
        if filled:
            raise UserError(
                f"{self.where}: {', '.join(filled)} is not zero, and such a drafter has no bias "
                "there here or in vLLM, which would drop it; take another checkpoint"
            )
        for name in extra:
            del self.tensors[name]


def recognised(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> PublicForm:
    """A config and tensors as a form, whichever names and nesting they have."""
    flat, kind = _flattened(config, where)
    plain = {name.removeprefix("model."): t for name, t in tensors.items()}
    kept = {name: t for name, t in plain.items() if not name.endswith(IGNORED)}
    if kind is None:
        kind = _kind_by_architecture(flat, kept, where)
    if kind == "eagle3":
        kept = {name.replace("layers.0.", "midlayer.", 1): t for name, t in kept.items()}
    if flat.get("model_type", "llama") not in ("llama", "eagle"):
        raise UserError(
            f"{where} has model_type {flat['model_type']!r}; only drafters with Llama layers "
            "(model_type 'llama') can be read"
        )
    form = PublicForm(where, kind, flat | _layer_sizes(flat, where), kept)
    _place_draft_ids(form, plain.get("t2d"))
    return form


def _flattened(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """The config on one level, and the kind where the nesting tells it.

    The speculators form keeps the layer apart and has `norm_before_residual` unless it says no;
    vLLM's own older form keeps everything under `model`.
    """
    if "speculators_model_type" in config:
        algorithm = config["speculators_model_type"]
        if algorithm != "eagle3":
            raise UserError(
                f"{where}: speculators_model_type {algorithm!r}; expected 'eagle3', the only one "
                "of that form that can be read"
            )
        layer = dict(config.get("transformer_layer_config") or {})
        own = {k: v for k, v in config.items() if k != "transformer_layer_config"}
        return layer | {"norm_before_residual": True} | own, algorithm
    if isinstance(config.get("model"), dict):
        own = {k: v for k, v in config.items() if k not in ("model", "model_type", "architectures")}
        return dict(config["model"]) | own, None
    return dict(config), None


def _kind_by_architecture(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> str:
    """By the architecture's name; the plain Llama name stands for both, so the tensors decide."""
    names = list(config.get("architectures") or [])
    if any(name in FUSED for name in names):
        return "eagle3"
    if not any(name in PLAIN for name in names):
        raise UserError(
            f"{where} has architectures {names}; expected one of {', '.join((*PLAIN, *FUSED))}"
        )
    if "fc.weight" not in tensors:
        raise UserError(
            f"{where} is a model, no drafter: it has no fc.weight that joins a token's embedding "
            "with the target's state"
        )
    fused = any(name.endswith("hidden_norm.weight") for name in tensors)
    return "eagle3" if fused else "eagle"


def _layer_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The layer's sizes and rope as transformers reads them, defaults and older keys included."""
    keys = (*SIZES, "rope_parameters", "rope_theta", "rope_scaling")
    given = {key: config[key] for key in keys if config.get(key) is not None}
    try:
        made = LlamaConfig(**given)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where}: not a Llama config: {str(error).splitlines()[0]}") from None
    return {key: getattr(made, key) for key in SIZES} | {"rope": dict(made.rope_parameters)}


def _place_draft_ids(form: PublicForm, known_V: Tensor | None) -> None:
    """Turn the offsets `d2t` into target ids; `known_V` (bool) marks the draft vocabulary's."""
    offsets_Vd = form.tensors.pop("d2t", None)
    if not isinstance(form.config.get("vocab_size"), int):
        raise UserError(f"{form.where}: its config names no vocab_size; expected the target's")
    size = form.config.get("draft_vocab_size") or form.config.get("vocab_size")
    full = size == form.config.get("vocab_size")
    form.config["draft_vocab_size"] = None if full else size
    if offsets_Vd is None:
        if not full:
            raise UserError(f"{form.where}: draft_vocab_size is {size}, but tensor d2t is missing")
        return
    ids_Vd = _target_ids(offsets_Vd, form.config["vocab_size"], known_V, form.where)
    if len(ids_Vd) != size:
        raise UserError(f"{form.where}: d2t has {len(ids_Vd)} entries, draft_vocab_size is {size}")
    if not full:
        form.tensors["draft_ids"] = ids_Vd


def _target_ids(offsets_Vd: Tensor, vocab_size: int, known_V: Tensor | None, where: str) -> Tensor:
    """Target ids of `d2t`: target id = draft id + d2t[draft id]. d2t = [2, 4]  ->  [2, 5]"""
    if offsets_Vd.ndim != 1 or offsets_Vd.is_floating_point() or not len(offsets_Vd):
        raise UserError(f"{where}: d2t is {offsets_Vd.dtype} {list(offsets_Vd.shape)}, no id list")
    stored_Vd = offsets_Vd.long()
    ids_Vd = stored_Vd + torch.arange(len(stored_Vd))
    ascending = bool((ids_Vd[1:] > ids_Vd[:-1]).all())
    inside = int(ids_Vd.min()) >= 0 and int(ids_Vd.max()) < vocab_size
    marked = known_V.nonzero().flatten() if known_V is not None else ids_Vd
    if ascending and inside and torch.equal(marked, ids_Vd):
        return ids_Vd
    absolute = torch.equal(marked, stored_Vd) if known_V is not None else not inside
    hint = "; it looks like target ids themselves: store d2t[i] - i" if absolute else ""
    raise UserError(
        f"{where}: d2t must hold offsets (target id less draft id); it leads to ids "
        f"{int(ids_Vd.min())} to {int(ids_Vd.max())} of {vocab_size}, "
        f"{'ascending' if ascending else 'not ascending'}"
        f"{', unlike t2d' if not torch.equal(marked, ids_Vd) else ''}{hint}"
    )


def _plain_settings(form: PublicForm, target: TargetIdentity) -> dict[str, Any]:
    """EAGLE-1: features are the target's own, so that the widths must agree."""
    width = form.config["hidden_size"]
    if width != target.hidden_size:
        raise UserError(
            f"{form.where} has hidden_size {width}, the target {target.name} has "
            f"{target.hidden_size}: EAGLE-1 reads the target's own states; give its own target"
        )
    return _layer_settings(form) | {"num_layers": form.config.get("num_hidden_layers", 1)}


def _fused_settings(form: PublicForm, target: TargetIdentity) -> dict[str, Any]:
    """EAGLE-3: captured layers and norm flags, nested ones first where vLLM reads them first."""
    config, nested = form.config, dict(form.config.get("eagle_config") or {})
    wide = config.get("target_hidden_size") or config["hidden_size"]
    if wide != target.hidden_size:
        raise UserError(
            f"{form.where} reads target states of size {wide}, the target {target.name} has "
            f"{target.hidden_size}; give the target that the drafter was trained for"
        )
    if config.get("num_hidden_layers", 1) != 1 or not nested.get("use_aux_hidden_state", True):
        raise UserError(
            f"{form.where}: num_hidden_layers {config.get('num_hidden_layers')}, "
            f"use_aux_hidden_state {nested.get('use_aux_hidden_state', True)}; "
            "expected one layer over captured layers"
        )
    flags = {
        name: bool(config.get(name) or False)
        for name in ("norm_before_residual", "fc_norm", "norm_output")
    }
    before = nested.get("norm_before_fc", config.get("norm_before_fc"))
    return _layer_settings(form) | {
        **flags,
        "norm_before_fc": bool(before),
        "aux_hidden_state_layer_ids": _captured_layers(form, nested, target),
        "target_hidden_size": wide,
        "draft_vocab_size": config["draft_vocab_size"],
        "embedding": "own" if EMBEDDING in form.tensors else "shared",
    }


def _layer_settings(form: PublicForm) -> dict[str, Any]:
    biased = bool(form.config.get("attention_bias"))
    return {key: form.config[key] for key in (*SIZES, "rope")} | {"attention_bias": biased}


def _captured_layers(
    form: PublicForm, nested: Mapping[str, Any], target: TargetIdentity
) -> list[int]:
    """The layer ids as vLLM finds them: at the top, nested, or its default of three."""
    num = target.num_hidden_layers
    given = form.config.get(LAYER_IDS)
    if not given and nested.get(LAYER_IDS):
        given = nested[LAYER_IDS]
        form.notes.append(
            f"layer ids {given} of eagle_config were read as vLLM reads them (k: after k layers)"
        )
    if not given:
        given = [2, num // 2, num - 3]
        form.notes.append(f"its config names no layers; {given}, vLLM's default, were taken")
    layers = sorted(given)
    if len(set(layers)) != len(layers) or not 1 <= layers[0] <= layers[-1] <= num:
        raise UserError(
            f"{form.where}: captured layers {list(given)}; expected distinct ids within 1 to "
            f"{num}, the layers of the target {target.name}"
        )
    return layers


READERS: dict[str, Callable[[PublicForm, TargetIdentity], dict[str, Any]]] = {
    "eagle": _plain_settings,
    "eagle3": _fused_settings,
}
