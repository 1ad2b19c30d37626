"""EAGLE-1 in the form that vLLM serves: no embedding, no final norm, no output matrix.

The un-normed output feeds the target's output matrix and the next draft step.

Shapes: D hidden size, V target vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

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

ARCHITECTURE = "LlamaForCausalLM"


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    drafter: Any = checkpoint.drafter
    return decoder_config(checkpoint, ARCHITECTURE) | {
        "num_hidden_layers": drafter.config.num_layers
    }


def _tensors(checkpoint: Checkpoint, target: TargetModel | None) -> dict[str, Tensor]:
    return with_zero_biases(dict(checkpoint.drafter.state_dict()), checkpoint.drafter.config)


def _expected(config: Mapping[str, Any]) -> Expected:
    refuse_config(_faults(config))
    hidden, dtype = config["hidden_size"], dtype_of(config)
    expected = {"fc.weight": TensorSpec((hidden, 2 * hidden), dtype)}
    for layer in range(config["num_hidden_layers"]):
        expected |= layer_tensors(config, f"layers.{layer}", hidden)
        if layer:
            expected[f"layers.{layer}.input_layernorm.weight"] = TensorSpec((hidden,), dtype)
    return expected


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    yield from common_faults(config)
    target = target_of(config)
    if config["hidden_size"] != target.hidden_size:
        yield f"hidden_size {config['hidden_size']} is not the target's {target.hidden_size}"
    if config["num_hidden_layers"] < 1:
        yield f"num_hidden_layers is {config['num_hidden_layers']}"


FORM = Form("eagle", MODEL_TYPE, ARCHITECTURE, _config, _tensors, _expected, needs_nothing)
