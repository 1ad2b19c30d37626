"""EAGLE-3 in the form that vLLM serves: one layer over several captured layers of the target.

vLLM counts captured layers as we do: k is the residual stream after k layers.

Shapes: D hidden size, Dt target hidden size, A captured layers, V target and Vd draft vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from heads.base import Checkpoint
from infer.export.contract import Expected, TensorSpec
from infer.export.decoder_layers import (
    MODEL_TYPE,
    common_faults,
    decoder_config,
    dtype_of,
    layer_tensors,
    refuse_config,
    target_of,
    with_zero_biases,
)
from infer.export.form import Form, needs_nothing
from infer.target import TargetModel

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
EMBEDDING = "embed_tokens.weight"


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Layer ids both at the top and nested: runners of vLLM read one or the other."""
    drafter: Any = checkpoint.drafter
    config, vocab_size = drafter.config, checkpoint.contract.target.vocab_size
    layer_ids = list(config.aux_hidden_state_layer_ids)
    return decoder_config(checkpoint, ARCHITECTURE) | {
        "num_hidden_layers": 1,
        "draft_vocab_size": config.draft_vocab_size or vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(layer_ids),
        LAYER_IDS: layer_ids,
        "eagle_config": {LAYER_IDS: layer_ids},
        **{flag: getattr(config, flag) for flag in FLAGS},
        "outrider_own_embedding": config.embedding == "own",
    }


def _tensors(checkpoint: Checkpoint, target: TargetModel | None) -> dict[str, Tensor]:
    """The drafter's own, its draft ids as `d2t`: target id = draft id + d2t[draft id].

    vLLM has no place for it when the draft vocabulary is the whole one.
    """
    tensors = dict(checkpoint.drafter.state_dict())
    ids_Vd = tensors.pop("draft_ids", None)
    if ids_Vd is not None and len(ids_Vd) != checkpoint.contract.target.vocab_size:
        tensors["d2t"] = ids_Vd - torch.arange(len(ids_Vd), device=ids_Vd.device)
    return with_zero_biases(tensors, checkpoint.drafter.config)


def _expected(config: Mapping[str, Any]) -> Expected:
    refuse_config(_faults(config))
    hidden, captured = config["hidden_size"], config["target_hidden_size"]
    num, vocabulary = config["num_aux_hidden_states"], config["draft_vocab_size"]
    dtype = dtype_of(config)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num * captured),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (num * captured,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (captured,) for i in range(num)}
    if config["outrider_own_embedding"]:
        shapes[EMBEDDING] = (config["vocab_size"], hidden)
    expected = {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
    expected |= layer_tensors(config, "midlayer", 2 * hidden)
    if vocabulary != config["vocab_size"]:
        fault = _offsets_fault(config["vocab_size"])
        expected["d2t"] = TensorSpec((vocabulary,), torch.int64, fault)
    return expected


def _offsets_fault(vocab_size: int) -> Callable[[Tensor], str | None]:
    """What is wrong with offsets into a vocabulary of that size."""

    def fault(offsets_Vd: Tensor) -> str | None:
        ids_Vd = offsets_Vd + torch.arange(len(offsets_Vd))
        low, high = int(ids_Vd.min()), int(ids_Vd.max())
        if low < 0 or high >= vocab_size:
            return (
                f"leads to target ids {low} to {high}, outside 0 to {vocab_size - 1}: it must hold "
                "offsets, target id less draft id"
            )
        if bool((ids_Vd[1:] <= ids_Vd[:-1]).any()):
            return "leads to target ids that do not ascend: it must hold target id less draft id"
        return None

    return fault


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    yield from common_faults(config)
    target, layer_ids = target_of(config), list(config[LAYER_IDS])
    if config["eagle_config"].get(LAYER_IDS) != layer_ids:
        yield f"{LAYER_IDS} and eagle_config.{LAYER_IDS} differ"
    if any(not 1 <= k <= target.num_hidden_layers for k in layer_ids):
        yield f"{LAYER_IDS} {layer_ids} is outside the target's layers 1 to " + str(
            target.num_hidden_layers
        )
    if sorted(set(layer_ids)) != layer_ids or not layer_ids:
        yield f"{LAYER_IDS} {layer_ids} must be distinct and ascending"
    if config["num_aux_hidden_states"] != len(layer_ids):
        yield f"num_aux_hidden_states {config['num_aux_hidden_states']} for {len(layer_ids)} layers"
    if config["target_hidden_size"] != target.hidden_size:
        yield f"target_hidden_size {config['target_hidden_size']} is not {target.hidden_size}"
    if config["num_hidden_layers"] != 1:
        yield f"num_hidden_layers is {config['num_hidden_layers']}, expected 1"
    if not 1 <= config["draft_vocab_size"] <= config["vocab_size"]:
        yield f"draft_vocab_size {config['draft_vocab_size']} of {config['vocab_size']}"
    if config["hidden_size"] != target.hidden_size and not config["outrider_own_embedding"]:
        yield f"hidden_size {config['hidden_size']} with the target's embedding"
    for flag in FLAGS:
        if not isinstance(config[flag], bool):
            yield f"{flag} is neither true nor false"


FORM = Form("eagle3", MODEL_TYPE, ARCHITECTURE, _config, _tensors, _expected, needs_nothing)
