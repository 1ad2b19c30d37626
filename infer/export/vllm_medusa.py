"""Medusa heads in the form that vLLM serves (run on vLLM 0.32.0).

Shapes: D hidden size, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.base import Checkpoint
from infer.export import contract
from infer.export.contract import Expected, TensorSpec
from infer.export.form import Form
from infer.target import TargetModel

ARCHITECTURE = "MedusaModel"


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """No key but those two may hold "num" with "heads" or "layers": vLLM renames such keys."""
    drafter: Any = checkpoint.drafter
    return {
        "model_type": "medusa",
        "architectures": [ARCHITECTURE],
        "hidden_size": checkpoint.contract.target.hidden_size,
        "vocab_size": checkpoint.contract.target.vocab_size,
        "num_heads": drafter.config.num_heads,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": False,
        "original_lm_head": drafter.config.lm_head == "shared",
    }


def _tensors(checkpoint: Checkpoint, target: TargetModel | None) -> dict[str, Tensor]:
    """Residual blocks and output matrices.

    vLLM 0.32.0 has a `token_map` for draft vocabularies and refuses it when it proves that every
    parameter was loaded (run: "weights were not initialized from checkpoint: {'token_map'}"; it
    loads only with that proof switched off). So the matrix is written for the whole vocabulary.
    """
    tensors = dict(checkpoint.drafter.state_dict())
    draft_ids_Vd = tensors.pop("draft_ids", None)
    if _needs_target(checkpoint):
        assert target is not None, "the target's lm_head is part of this folder"
        matrix_VD = target.shared.lm_head_VD
        tensors["lm_head.weight"] = (
            matrix_VD if draft_ids_Vd is None else never_chosen_outside(matrix_VD, draft_ids_Vd)
        )
    return tensors


def never_chosen_outside(lm_head_VD: Tensor, draft_ids_Vd: Tensor) -> Tensor:
    """The matrix [V, D] with every row outside the draft vocabulary replaced by its rows' mean.

    Such a row's logit is the mean of the draft vocabulary's logits, whatever the state: below their
    maximum. So the best token over all of V is the best token of the draft vocabulary.

        rows a, b, c and draft ids (0, 2)  ->  a, (a + c) / 2, c
    """
    ids = draft_ids_Vd.to(lm_head_VD.device)
    rows_VdD = lm_head_VD[ids]
    filled = rows_VdD.double().mean(dim=0).to(lm_head_VD.dtype).repeat(len(lm_head_VD), 1)
    filled[ids] = rows_VdD
    return filled


def _expected(config: Mapping[str, Any]) -> Expected:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    dtype = contract.dtype_named(config["dtype"], contract.CONFIG)
    expected = {
        f"blocks.{head}.layers.{layer}.weight": TensorSpec((hidden, hidden), dtype)
        for head in range(config["num_heads"])
        for layer in range(config["num_hidden_layers"])
    }
    matrix = TensorSpec((vocabulary, hidden), dtype)
    if config["original_lm_head"]:
        expected["lm_head.weight"] = matrix
    else:
        expected |= {f"lm_heads.{head}.weight": matrix for head in range(config["num_heads"])}
    return expected


def _needs_target(checkpoint: Checkpoint) -> bool:
    drafter: Any = checkpoint.drafter
    return bool(drafter.config.lm_head == "shared")


FORM = Form(
    "medusa",
    "medusa",
    ARCHITECTURE,
    _config,
    _tensors,
    _expected,
    _needs_target,
)
