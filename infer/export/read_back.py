"""Exported folders read back into drafters, by their format alone.

Nothing here is shared with the writers, so that a mistake of theirs shows: the tests compare the
logits of what was read back with the original's, and `outrider check` measures what lies in the
folder, the very tensors that the engine loads.

Shapes: D hidden size, V target vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
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
from heads.errors import UserError


@dataclass(frozen=True)
class Exported:
    """A drafter out of a folder, not bound yet: `target` is what it was made for.

    `method` is the engine's name for its kind; `lm_head_VD` is the shared output matrix that the
    folder ships, None when the drafter has output matrices of its own.
    """

    folder: Path
    method: str
    drafter: Drafter
    target: TargetIdentity
    lm_head_VD: Tensor | None

    @property
    def checkpoint(self) -> Checkpoint:
        """The drafter with the contract that the folder tells."""
        return Checkpoint(self.drafter, Contract(target=self.target), path=self.folder)

    def bound(self, dtype: torch.dtype, device: torch.device, embed_VD: Tensor) -> Drafter:
        """The drafter, ready to draft: in that dtype, over the matrix that the folder ships."""
        drafter = self.drafter.to(device=device, dtype=dtype)
        matrix_VD = embed_VD if self.lm_head_VD is None else self.lm_head_VD
        drafter.bind(SharedWeights(matrix_VD.to(device=device, dtype=dtype), embed_VD))
        return drafter.eval()


def read_back(folder: Path) -> Exported:
    """Read a folder that `export_vllm` wrote."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = load_file(folder / "model.safetensors")
        read = READERS[config["model_type"]]
        target = TargetIdentity.model_validate(config["outrider_target"])
        return read(config, tensors, target, folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
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


READERS: dict[str, Callable[..., Exported]] = {"medusa": _read_medusa}
