"""MTP heads in the form that vLLM serves: target and head in one MiMo checkpoint (run on 0.32.0).

A MiMo model is a Qwen2 model with one head of ours behind it, under `model.mtp_layers.0`. So the
target is written as a Qwen2 model: queries, keys and values get a bias of zeros where it has none,
and its output matrix is written even where it is tied. Engines are given the folder as the model,
and the head comes with it; read as a plain Qwen2 model it is the target itself.

Shapes: D hidden size, V target vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from heads.base import Checkpoint, TargetIdentity
from heads.decoder import SIZES
from heads.errors import UserError
from infer.export.contract import Expected, TensorSpec, names
from infer.export.decoder_layers import (
    common_faults,
    decoder_config,
    dtype_of,
    layer_tensors,
    refuse_config,
    target_of,
)
from infer.export.form import TOKENIZER_FILES, Form, write_tokenizer
from infer.target import TargetModel

ARCHITECTURE = "MiMoForCausalLM"
TARGETS = ("llama", "qwen2")
BIASED = ("q_proj", "k_proj", "v_proj")
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
INSTEAD = "train eagle3 for this target instead"
NOT_IN_TENSORRT_LLM = (
    "TensorRT-LLM has no place for an MTP head on a dense Llama or Qwen2 target: it runs MTP only "
    "for models that are born with it (DeepSeek-V3 and the like); train eagle3 for it, or export "
    "this head to vllm"
)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """A Qwen2 config of the target's sizes, which are the head's too."""
    return decoder_config(checkpoint, ARCHITECTURE) | {
        "model_type": "qwen2",
        "num_hidden_layers": checkpoint.contract.target.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "use_sliding_window": False,
    }


def _tensors(checkpoint: Checkpoint, target: TargetModel | None) -> dict[str, Tensor]:
    assert target is not None, "the target is part of this folder"
    tensors = dict(target.model.state_dict())
    weights = [f".self_attn.{name}.weight" for name in BIASED]
    for name, weight in list(tensors.items()):
        if name.endswith(tuple(weights)):
            zeros = torch.zeros_like(weight[:, 0])
            tensors.setdefault(f"{name.removesuffix('.weight')}.bias", zeros)
    own = _target_tensors(_config(checkpoint), torch.float32)
    others = tensors.keys() ^ own.keys()
    if others:
        raise UserError(
            f"{_no_place(checkpoint.contract.target)}: it has no place for, or lacks, "
            f"{', '.join(sorted(others)[:4])}; {INSTEAD}"
        )
    head = checkpoint.drafter.state_dict()
    return tensors | {f"model.{name}": tensor for name, tensor in head.items()}


def _target_tensors(config: Mapping[str, Any], dtype: torch.dtype) -> Expected:
    """Those of the target alone."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    expected = {
        "model.embed_tokens.weight": TensorSpec((vocabulary, hidden), dtype),
        "model.norm.weight": TensorSpec((hidden,), dtype),
        "lm_head.weight": TensorSpec((vocabulary, hidden), dtype),
    }
    for layer in range(config["num_hidden_layers"]):
        expected |= _layer(config, f"model.layers.{layer}", dtype)
    return expected


def _layer(config: Mapping[str, Any], prefix: str, dtype: torch.dtype) -> Expected:
    """A Qwen2 layer: biases for queries, keys and values, none for the attention's output."""
    plain = {**config, "attention_bias": False, "dtype": str(dtype).removeprefix("torch.")}
    expected = layer_tensors(plain, prefix, config["hidden_size"])
    for name in BIASED:
        rows = expected[f"{prefix}.self_attn.{name}.weight"].shape[0]
        expected[f"{prefix}.self_attn.{name}.bias"] = TensorSpec((rows,), dtype)
    expected[f"{prefix}.input_layernorm.weight"] = TensorSpec((config["hidden_size"],), dtype)
    return expected


def _expected(config: Mapping[str, Any]) -> Expected:
    refuse_config(_faults(config))
    hidden, dtype, prefix = config["hidden_size"], dtype_of(config), "model.mtp_layers.0"
    head = {f"{prefix}.{name}.weight": TensorSpec((hidden,), dtype) for name in NORMS}
    head[f"{prefix}.input_proj.weight"] = TensorSpec((hidden, 2 * hidden), dtype)
    return _target_tensors(config, dtype) | _layer(config, prefix, dtype) | head


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    yield from common_faults(config)
    target = target_of(config)
    fixed = {
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": target.num_hidden_layers,
        "hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_bias": True,
    }
    for key, value in fixed.items():
        if config[key] != value:
            yield f"{key} is {config[key]}, expected {value}"
    if config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]:
        yield f"head_dim {config['head_dim']}, and MiMo attention is as wide as the hidden state"


def _no_place(target: TargetIdentity) -> str:
    return f"no engine's MTP form can hold the target {target.name} ({target.model_type})"


def _needs_target(checkpoint: Checkpoint) -> bool:
    """Always; raises UserError first for what no such folder can hold."""
    config: Any = checkpoint.drafter.config
    target = checkpoint.contract.target
    if target.model_type not in TARGETS:
        raise UserError(
            f"{_no_place(target)}: only dense targets of type {names(TARGETS)} fit; {INSTEAD}"
        )
    own = target.decoder | {"hidden_size": target.hidden_size}
    other = [name for name in (*SIZES, "rope") if getattr(config, name) != own.get(name)]
    if other:
        raise UserError(
            f"drafter.{other[0]} is {getattr(config, other[0])!r}, the target's is "
            f"{own.get(other[0])!r}: in one folder target and head have the same; train without it"
        )
    if config.hidden_act != "silu" or config.num_attention_heads * config.head_dim != (
        config.hidden_size
    ):
        raise UserError(
            f"{_no_place(target)}: its activation must be silu ({config.hidden_act}) and its heads "
            f"as wide as the hidden state ({config.num_attention_heads} x {config.head_dim} for "
            f"{config.hidden_size}); {INSTEAD}"
        )
    if config.num_modules != 1:
        raise UserError(
            f"the drafter has {config.num_modules} modules, and vLLM serves one MiMo module for "
            "every draft step; train with drafter.num_modules=1"
        )
    if config.target_state != "before_norm":
        raise UserError(
            f"the drafter reads the target's state {config.target_state}, and vLLM gives the one "
            "before the final norm; train with drafter.target_state=before_norm"
        )
    return True


FORM = Form(
    "mtp",
    "qwen2",
    ARCHITECTURE,
    _config,
    _tensors,
    _expected,
    _needs_target,
    write_beside=write_tokenizer,
    beside=TOKENIZER_FILES,
)
