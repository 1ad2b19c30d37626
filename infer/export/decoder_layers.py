"""What the two forms with decoder layers have in common: config keys, names and shapes.

Read from vLLM 0.32.0 (models/llama.py, llama_eagle.py, llama_eagle3.py). Unlike transformers, its
loaders leave a tensor that is missing at its random start, and drop a bias that they do not expect.

Shapes: D hidden size, H heads, G key and value heads, d head size, V target vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from heads.base import Checkpoint, TargetIdentity
from heads.errors import UserError
from infer.export import contract
from infer.export.contract import Expected, TensorSpec
from infer.export.form import TARGET_KEY

MODEL_TYPE = "llama"
BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""`attention_bias` in a config gives vLLM's attention these four; its o_proj bias is not zeroed."""


def decoder_config(checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """The keys of a Llama config; the rope settings also in the form before transformers 5."""
    config: Any = checkpoint.drafter.config
    rope = dict(config.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": MODEL_TYPE,
        "architectures": [architecture],
        "vocab_size": checkpoint.contract.target.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope.get("rope_type", "default") != "default" else None,
    }


def with_zero_biases(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The tensors and, where the config has `attention_bias`, zeros for a bias that is not there.

    vLLM makes room for all four and fills none by itself.
    """
    if not config.attention_bias:
        return tensors
    zeros = {
        f"{name.removesuffix('.weight')}.bias": torch.zeros_like(weight[:, 0])
        for name, weight in tensors.items()
        if name.endswith(tuple(f"{biased}.weight" for biased in BIASED))
    }
    return zeros | tensors


def layer_tensors(config: Mapping[str, Any], prefix: str, width: int) -> Expected:
    """The tensors of one decoder layer whose queries, keys and values read `width` numbers.

    Its norms are not among them, but for the one behind the attention, which every layer has.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dtype = dtype_of(config)
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    expected = {f"{prefix}.{name}": TensorSpec(shape, dtype) for name, shape in shapes.items()}
    expected[f"{prefix}.post_attention_layernorm.weight"] = TensorSpec((hidden,), dtype)
    if config["attention_bias"]:
        for name in BIASED:
            rows = shapes[f"self_attn.{name}.weight"][0]
            expected[f"{prefix}.self_attn.{name}.bias"] = TensorSpec((rows,), dtype)
    return expected


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a written config promises."""
    return contract.dtype_named(config["dtype"], contract.CONFIG)


def target_of(config: Mapping[str, Any]) -> TargetIdentity:
    """The target that a written config names."""
    try:
        return TargetIdentity.model_validate(config[TARGET_KEY])
    except ValueError as error:
        raise UserError(f"{contract.CONFIG}: {TARGET_KEY} is no target: {error}") from None


def refuse_config(faults: Iterator[str]) -> None:
    """Raise UserError with every fault of a written config."""
    found = list(faults)
    if found:
        raise UserError(f"{contract.CONFIG} contradicts itself: {'; '.join(found)}")


def common_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """What no tensor shows: sizes unlike the target's, an activation that vLLM does not have."""
    target = target_of(config)
    if config["vocab_size"] != target.vocab_size:
        yield f"vocab_size {config['vocab_size']} is not the target's {target.vocab_size}"
    if config["hidden_act"] != "silu":
        yield f"hidden_act {config['hidden_act']!r}, and vLLM has only 'silu'"
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        yield "num_attention_heads is no multiple of num_key_value_heads"
    if config["mlp_bias"]:
        yield "mlp_bias is set, and no drafter here has one"
    if config["rope_parameters"].get("rope_theta") != config["rope_theta"]:
        yield "rope_theta and rope_parameters.rope_theta differ"
    if not isinstance(config["attention_bias"], bool):
        yield "attention_bias is neither true nor false"
