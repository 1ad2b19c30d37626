"""LoRA adapters (2106.09685) on a student's layers, by peft; merged when it is exported."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from heads.errors import UserError
from heads.schema import Strict

ADAPTER = "default"
BASE = ".base_layer."
PARTS = ("lora_A", "lora_B")


class Lora(Strict):
    """`modules`: names of the linear layers that get adapters; None is all of them.

    What an adapter adds is scaled by `alpha / rank`.
    """

    rank: int = Field(default=32, ge=1)
    alpha: int = Field(default=64, ge=1)
    modules: tuple[str, ...] | None = None


def adapt(decoder: Any, lora: Lora) -> None:
    """Put adapters into a decoder in place; they alone are trained then.

    Raises UserError where peft is not installed, and for adapters that do not fit the layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError(
            "drafter.lora needs peft, which is not installed; pip install 'outrider[lora]' "
            "or drop drafter.lora"
        ) from None
    linear = {
        name.rpartition(".")[2]: min(module.in_features, module.out_features)
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    wanted = sorted(linear) if lora.modules is None else list(lora.modules)
    unknown = [name for name in wanted if name not in linear]
    if unknown or not wanted:
        raise UserError(
            f"drafter.lora.modules {wanted}: {unknown or 'nothing'} does not fit the student, "
            f"whose linear layers are {', '.join(sorted(linear))}"
        )
    narrow = {name: linear[name] for name in wanted if linear[name] < lora.rank}
    if narrow:
        raise UserError(
            f"drafter.lora.rank is {lora.rank} and layers are narrower: {narrow}; an adapter of "
            "that rank does not fit, give a smaller one"
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=wanted)
    inject_adapter_in_model(config, decoder, adapter_name=ADAPTER)


def is_adapter(name: str) -> bool:
    """Whether a tensor's name is an adapter's."""
    return any(f".{part}." in name for part in PARTS)


def plain_name(name: str) -> str:
    """A tensor's name without adapters around it."""
    return name.replace(BASE, ".")


def merged(tensors: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Tensor]:
    """A state dict without adapters: W + B A alpha / rank, computed in float32."""
    found = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        layer, base, rest = name.partition(BASE)
        if lora is not None and base and rest == "weight":
            down, up = (tensors[f"{layer}.{part}.{ADAPTER}.weight"].float() for part in PARTS)
            tensor = (tensor.float() + up @ down * (lora.alpha / lora.rank)).to(tensor.dtype)
        found[plain_name(name)] = tensor
    return found
