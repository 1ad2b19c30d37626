"""Drafters in the form that vLLM serves (read from and run on vLLM 0.32.0).

vLLM drafts a chain, and `num_speculative_tokens` may not exceed the drafter's depth. It is started
with `speculative_config={"method": ..., "model": FOLDER, "num_speculative_tokens": K}`.

Shapes: D hidden size, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.base import Checkpoint, SharedWeights
from heads.errors import UserError
from heads.files import whole_folder
from infer.export import contract
from infer.export.contract import Expected, TensorSpec, Traps

ENGINE = "vllm"
TRAPS = Traps("vLLM", ("eagle-", "eagle3", "dflash", "dspark"))
TARGET_KEY = "outrider_target"
"""vLLM keeps a key that it does not know and never reads it; ours says which target it is for."""


@dataclass(frozen=True)
class Form:
    """How one kind of drafter lies in a folder.

    `method` is vLLM's name for it; `expected` gives the tensors that a written config promises,
    `config` and `tensors` write it, `needs_target` says whether the target's tensors are in it.
    """

    method: str
    config: Callable[[Checkpoint], dict[str, Any]]
    tensors: Callable[[Checkpoint, SharedWeights | None], dict[str, Tensor]]
    expected: Callable[[Mapping[str, Any]], Expected]
    needs_target: Callable[[Checkpoint], bool]


def export_vllm(
    checkpoint: Checkpoint, shared: SharedWeights | None, out: Path, dtype: str | None = None
) -> Path:
    """Write `out`, proven complete, or raise UserError and leave nothing.

    `shared` holds the target's tensors (see `needs_target`); `dtype` that of every floating-point
    tensor written, the drafter's own when None.
    """
    form = form_of(checkpoint)
    TRAPS.refuse(out)
    own = next(t.dtype for t in checkpoint.drafter.state_dict().values() if t.is_floating_point())
    written = own if dtype is None else contract.dtype_named(dtype, "export")
    config = form.config(checkpoint) | {
        "dtype": str(written).removeprefix("torch."),
        TARGET_KEY: checkpoint.contract.target.model_dump(mode="json"),
    }
    tensors = {
        name: tensor.to(written) if tensor.is_floating_point() else tensor
        for name, tensor in form.tensors(checkpoint, shared).items()
    }
    with whole_folder(out) as folder:
        contract.write_files(folder, config, tensors)
        contract.prove_files(folder, expected_tensors)
    return out


def form_of(checkpoint: Checkpoint) -> Form:
    """The form of a checkpoint's kind."""
    kind = checkpoint.drafter.kind
    if kind not in FORMS:
        hint = f": {NO_FOLDER[kind]}" if kind in NO_FOLDER else ""
        raise UserError(
            f"vLLM has no place for a folder of kind {kind!r}{hint}; "
            f"kinds that can be exported: {contract.names(FORMS)}"
        )
    return FORMS[kind]


def needs_target(checkpoint: Checkpoint) -> bool:
    """Whether the target's own tensors are written into the folder."""
    return form_of(checkpoint).needs_target(checkpoint)


def expected_tensors(config: Mapping[str, Any]) -> Expected:
    """The tensors that a written config promises."""
    return _form_in(config).expected(config)


def method_of(config: Mapping[str, Any]) -> str:
    """The speculative method that a written config is served with."""
    return _form_in(config).method


def prove_vllm(folder: Path) -> None:
    """Prove an exported folder complete, exact, and served by the method that it is written for."""
    contract.prove(folder, expected_tensors, TRAPS)


def _form_in(config: Mapping[str, Any]) -> Form:
    model_type = config.get("model_type")
    for form in FORMS.values():
        if form.method == model_type:
            return form
    raise UserError(
        f"{contract.CONFIG} has model_type {model_type!r}; "
        f"expected one of {contract.names(form.method for form in FORMS.values())}: "
        "give a folder written by outrider export"
    )


def _medusa_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """No key but those two may hold "num" with "heads" or "layers": vLLM renames such keys."""
    drafter: Any = checkpoint.drafter
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": checkpoint.contract.target.hidden_size,
        "vocab_size": checkpoint.contract.target.vocab_size,
        "num_heads": drafter.config.num_heads,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": False,
        "original_lm_head": drafter.config.lm_head == "shared",
    }


def _medusa_tensors(checkpoint: Checkpoint, shared: SharedWeights | None) -> dict[str, Tensor]:
    """Residual blocks and output matrices.

    vLLM 0.32.0 has a `token_map` for draft vocabularies and refuses it when it proves that every
    parameter was loaded (run: "weights were not initialized from checkpoint: {'token_map'}"; it
    loads only with that proof switched off). So the matrix is written for the whole vocabulary.
    """
    tensors = dict(checkpoint.drafter.state_dict())
    draft_ids_Vd = tensors.pop("draft_ids", None)
    if _medusa_needs_target(checkpoint):
        assert shared is not None, "the target's lm_head is part of this folder"
        tensors["lm_head.weight"] = (
            shared.lm_head_VD
            if draft_ids_Vd is None
            else never_chosen_outside(shared.lm_head_VD, draft_ids_Vd)
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


def _medusa_expected(config: Mapping[str, Any]) -> Expected:
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


def _medusa_needs_target(checkpoint: Checkpoint) -> bool:
    drafter: Any = checkpoint.drafter
    return bool(drafter.config.lm_head == "shared")


FORMS = {
    "medusa": Form(
        "medusa", _medusa_config, _medusa_tensors, _medusa_expected, _medusa_needs_target
    ),
}
NO_FOLDER = {
    "ngram": 'it has no tensors; start vLLM with the method "ngram" and no model',
}
