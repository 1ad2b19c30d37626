"""Exported folders read back into drafters, by their format alone.

Nothing here is shared with the writers, so that a mistake of theirs shows: the tests compare the
logits of what was read back with the original's, and `outrider check` measures what lies in the
folder, the very tensors that the engine loads.

Shapes: D hidden size, V target vocabulary, Vd draft vocabulary.
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

from heads.base import Drafter, SharedWeights, TargetIdentity, drafter_class, fill
from heads.errors import UserError


@dataclass(frozen=True)
class Exported:
    """A drafter out of a folder: `target` is what it was made for, `lm_head_VD` what it ships.

    `lm_head_VD` is None when the drafter has output matrices of its own. Rows outside a draft
    vocabulary are zero and never read.
    """

    method: str
    drafter: Drafter
    target: TargetIdentity
    lm_head_VD: Tensor | None

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
        return read(config, tensors, target, str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(
            f"{folder} cannot be read as an exported drafter ({error!r}); "
            "give a folder written by outrider export"
        ) from None


def _read_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetIdentity, where: str
) -> Exported:
    lm_head_VD = tensors.pop("lm_head.weight", None)
    token_map = tensors.pop("token_map", None)
    if token_map is not None and lm_head_VD is not None:
        rows_VdD = lm_head_VD
        lm_head_VD = rows_VdD.new_zeros(target.vocab_size, target.hidden_size)
        lm_head_VD[token_map] = rows_VdD
    if token_map is not None:
        tensors["draft_ids"] = token_map
    cls = drafter_class("medusa")
    settings = cls.Config.model_validate(
        {
            "num_heads": config["num_heads"],
            "num_layers": config["num_hidden_layers"],
            "lm_head": "own" if lm_head_VD is None else "shared",
            "draft_vocab_size": None if token_map is None else len(token_map),
        }
    )
    drafter = cls.blank(settings, target)
    fill(drafter, tensors, where)
    return Exported("medusa", drafter, target, lm_head_VD)


READERS: dict[str, Callable[..., Exported]] = {"medusa": _read_medusa}
