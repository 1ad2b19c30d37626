"""Drafters in the form that vLLM serves (read from and run on vLLM 0.32.0).

vLLM drafts a chain, and `num_speculative_tokens` may not exceed the drafter's depth. It is started
with `speculative_config={"method": ..., "model": FOLDER, "num_speculative_tokens": K}`, or with the
folder as its model and no other in that config where target and drafter are one folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.base import Checkpoint
from heads.errors import UserError
from heads.files import whole_folder
from infer.export import (
    contract,
    vllm_draft_model,
    vllm_eagle,
    vllm_eagle3,
    vllm_medusa,
    vllm_mtp,
)
from infer.export.contract import Expected, Traps
from infer.export.form import TARGET_KEY, Form
from infer.target import TargetModel

ENGINE = "vllm"
TRAPS = Traps(
    "vLLM", {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
)


def export_vllm(
    checkpoint: Checkpoint, target: TargetModel | None, out: Path, dtype: str | None = None
) -> Path:
    """Write `out`, proven complete, or raise UserError and leave nothing.

    `target` is there where its tensors are written too (`needs_target`); `dtype` is that of every
    floating-point tensor written, the drafter's own when None.
    """
    form = form_of(checkpoint)
    TRAPS.refuse(out, form.method)
    own = next(t.dtype for t in checkpoint.drafter.state_dict().values() if t.is_floating_point())
    written = own if dtype is None else contract.dtype_named(dtype, "export")
    config = form.config(checkpoint) | {
        "dtype": str(written).removeprefix("torch."),
        TARGET_KEY: checkpoint.contract.target.model_dump(mode="json"),
    }
    tensors = {
        name: tensor.to(written) if tensor.is_floating_point() else tensor
        for name, tensor in form.tensors(checkpoint, target).items()
    }
    with whole_folder(out) as folder:
        contract.write_files(folder, config, tensors)
        if form.write_beside is not None:
            assert target is not None
            form.write_beside(target, folder)
        contract.prove_files(folder, expected_tensors, files_beside)
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


def prove_vllm(folder: Path) -> None:
    """Prove an exported folder complete, exact, and served by the method that it is written for."""
    TRAPS.refuse(folder, _form_in(contract.read_config(folder)).method)
    contract.prove_files(folder, expected_tensors, files_beside)


def files_beside(config: Mapping[str, Any]) -> Mapping[str, bool]:
    """The files that may lie beside config and tensors, true for those that must."""
    return _form_in(config).beside


def _form_in(config: Mapping[str, Any]) -> Form:
    for form in FORMS.values():
        if form.wrote(config):
            return form
    written = (
        f"{form.model_type} with {form.architecture}" for form in FORMS.values() if form.model_type
    )
    raise UserError(
        f"{contract.CONFIG} has model_type {config.get('model_type')!r} and architectures "
        f"{config.get('architectures')!r}; expected one of {contract.names(written)}: "
        "give a folder written by outrider export"
    )


FORMS = {
    "medusa": vllm_medusa.FORM,
    "eagle": vllm_eagle.FORM,
    "eagle3": vllm_eagle3.FORM,
    "mtp": vllm_mtp.FORM,
    "draft_model": vllm_draft_model.FORM,
}
NO_FOLDER = {
    "ngram": 'it has no tensors; start vLLM with the method "ngram" and no model',
}
