"""Exported folders read back into drafters, by their format alone.

Nothing here is shared with the writers, so that a mistake of theirs shows: the tests compare the
logits of what was read back with the original's, and `outrider check` measures what lies in the
folder, the very tensors that the engine loads.

Shapes: D hidden size, V target vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.base import (
    Checkpoint,
    Contract,
    Drafter,
    SharedWeights,
    TargetIdentity,
    drafter_class,
    fill,
)
from heads.decoder import SIZES
from heads.errors import UserError
from heads.students import load_student
from infer.export.form import KIND_KEY
from infer.export.public_forms import recognised

READING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    SafetensorError,
)


@dataclass(frozen=True)
class Exported:
    """A drafter out of a folder, not bound yet: `target` is what it was made for.

    `method` is the engine's name for its kind; `lm_head_VD` is the target's output matrix as the
    folder ships it, None where it ships none. `whole`: the folder is target and drafter in one.
    """

    folder: Path
    method: str
    drafter: Drafter
    target: TargetIdentity
    lm_head_VD: Tensor | None
    whole: bool = False

    @property
    def checkpoint(self) -> Checkpoint:
        """The drafter with the contract that the folder tells."""
        contract = Contract(target=self.target, **self.drafter.contract_fields())
        return Checkpoint(self.drafter, contract, path=self.folder)

    def bound(self, dtype: torch.dtype, device: torch.device, shared: SharedWeights) -> Drafter:
        """The drafter, ready to draft: in that dtype, over the matrix that the folder ships.

        `shared` holds the target's tensors, for what the folder does not ship.
        """
        drafter = self.drafter.to(device=device, dtype=dtype)
        matrix_VD = shared.lm_head_VD if self.lm_head_VD is None else self.lm_head_VD
        drafter.bind(replace(shared, lm_head_VD=matrix_VD.to(device=device, dtype=dtype)))
        return drafter.eval()


def read_back(folder: Path) -> Exported:
    """Read a folder that `export_vllm` wrote."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = load_file(folder / "model.safetensors")
        read = READERS[config.get(KIND_KEY) or config["architectures"][0]]
        target = TargetIdentity.model_validate(config["outrider_target"])
        return read(config, tensors, target, folder)
    except READING_ERRORS as error:
        raise UserError(
            f"{folder} cannot be read as an exported drafter ({error!r}); "
            "give a folder written by outrider export"
        ) from None


def _read_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetIdentity, folder: Path
) -> Exported:
    lm_head_VD = tensors.pop("lm_head.weight", None)
    cls = drafter_class("medusa")
    settings = cls.Config.model_validate(
        {
            "num_heads": config["num_heads"],
            "num_layers": config["num_hidden_layers"],
            "lm_head": "own" if lm_head_VD is None else "shared",
        }
    )
    drafter = cls.blank(settings, target)
    fill(drafter, tensors, str(folder))
    return Exported(folder, "medusa", drafter, target, lm_head_VD)


def _read_decoder(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetIdentity, folder: Path
) -> Exported:
    """An exported folder is also a public one; the engine's method has the name of our kind."""
    form = recognised(config, tensors, str(folder))
    return Exported(folder, form.kind, form.drafter(target), target, None)


def _read_whole(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetIdentity, folder: Path
) -> Exported:
    """A MiMo folder: the head's tensors are the drafter, the others the target."""
    prefix = "model."
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}mtp_layers.")
    }
    cls = drafter_class("mtp")
    settings = cls.Config.model_validate(
        {name: config[name] for name in SIZES}
        | {"rope": config["rope_parameters"], "num_modules": config["num_nextn_predict_layers"]}
    )
    drafter = cls.blank(settings, target)
    fill(drafter, own, str(folder))
    return Exported(folder, "mtp", drafter, target, tensors["lm_head.weight"], whole=True)


def _read_language_model(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetIdentity, folder: Path
) -> Exported:
    """Read as anyone would: by transformers."""
    cls: Any = drafter_class("draft_model")
    settings = cls.Config.model_validate({"student": {"model": str(folder)}})
    drafter = cls.holding(load_student(str(folder)), settings, target)
    return Exported(folder, "draft_model", drafter, target, None)


READERS: dict[str, Callable[..., Exported]] = {
    "MedusaModel": _read_medusa,
    "LlamaForCausalLM": _read_decoder,
    "LlamaForCausalLMEagle3": _read_decoder,
    "MiMoForCausalLM": _read_whole,
    "draft_model": _read_language_model,
}
