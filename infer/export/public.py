"""Folders in the form that the public shares drafters in, with no contract of ours.

Such a folder does not say which target it was trained for, so it is read against one that the user
names: `read_public`. Folders of our own, trained or exported, are accepted there as well.

Shapes: D hidden size, V vocabulary.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.base import Checkpoint, Contract, check_contract, drafter_class, load_drafter
from heads.decoder import rope_note
from heads.errors import UserError
from heads.students import is_ordinary
from infer.export.form import TARGET_KEY
from infer.export.public_forms import EMBEDDING, PublicForm, recognised
from infer.export.read_back import Exported, read_back
from infer.target import TargetModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_ERRORS = (OSError, ValueError, HfHubHTTPError, HFValidationError)


@dataclass(frozen=True)
class PublicFolder:
    """A drafter that can be read once its target is known."""

    folder: Path


Found = Checkpoint | Exported | PublicFolder


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as owner/name on the model hub, and no such folder is here."""
    return HUB_ID.fullmatch(spec) is not None and not Path(spec).exists()


def fetch(hub_id: str) -> Path:
    """The folder of a drafter on the model hub, downloaded where it is not cached."""
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except HUB_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no such folder: {hub_id}, and the model hub did not give it either: {reason}; "
            "check the name and the network, or download it and give its folder"
        ) from None


def open_folder(folder: Path) -> Found:
    """A folder by what its config says it is: trained here, exported here, or public."""
    config = _config(folder)
    if config is None or {"format", "contract"} & config.keys():
        return load_drafter(folder)
    if TARGET_KEY in config:
        return read_back(folder)
    return PublicFolder(folder)


def read_public(folder: Path, target: TargetModel) -> tuple[Checkpoint, list[str]]:
    """The drafter of a folder for `target`, and notes on what the user should know.

    The folder is a public one, a checkpoint of ours, or an exported one; the latter two must have
    been made for this very target. The drafter is not bound. Raises UserError naming what does
    not fit.
    """
    found = open_folder(folder)
    if isinstance(found, PublicFolder):
        return _read_foreign(folder, target)
    checkpoint = found if isinstance(found, Checkpoint) else found.checkpoint
    check_contract(checkpoint.contract, target.identity, str(folder))
    return checkpoint, []


def _read_foreign(folder: Path, target: TargetModel) -> tuple[Checkpoint, list[str]]:
    config, tensors = _config(folder), read_tensors(folder)
    assert config is not None
    if is_ordinary(folder, tensors):
        return _read_language_model(folder, target)
    form = recognised(config, tensors, str(folder))
    _settle_shared(form, target)
    _compare_rope(form, target)
    drafter = form.drafter(target.identity)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter, contract, path=folder), form.notes


def _read_language_model(folder: Path, target: TargetModel) -> tuple[Checkpoint, list[str]]:
    """A small causal LM as a draft model, its tokens compared with the target's."""
    cls = drafter_class("draft_model")
    config = cls.Config.model_validate({"student": {"model": str(folder)}})
    drafter = cls.create(config, target.identity, target.shared)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter.eval(), contract, path=folder), []


def _settle_shared(form: PublicForm, target: TargetModel) -> None:
    """Copies of the target's own matrices are dropped; where the drafter needs one, it is put in.

    vLLM shares the target's matrices the same way.
    """
    if _same(form.tensors.get(EMBEDDING), target.shared.embed_VD):
        del form.tensors[EMBEDDING]
    elif EMBEDDING in form.tensors:
        if form.shares_matrices:
            raise UserError(
                f"{form.where}: its embed_tokens.weight is not the target's own, and an EAGLE-1 "
                "drafter reads the target's embedding; give the target that it was trained for"
            )
        form.notes.append("its embedding is not the target's: it is kept as its own")
    if form.shares_matrices:
        if _same(form.tensors.get(LM_HEAD), target.shared.lm_head_VD):
            del form.tensors[LM_HEAD]
    elif LM_HEAD not in form.tensors and form.config["draft_vocab_size"] is None:
        form.tensors[LM_HEAD] = target.shared.lm_head_VD.detach().cpu().clone()
        form.notes.append("it has no lm_head.weight: it starts with the target's")


def _same(given: Tensor | None, own: Tensor) -> bool:
    """Whether two matrices are equal in the coarser of their dtypes."""
    if given is None or given.shape != own.shape:
        return False
    own = own.cpu()
    return torch.equal(given.to(own.dtype), own) or torch.equal(own.to(given.dtype), given)


def _compare_rope(form: PublicForm, target: TargetModel) -> None:
    note = rope_note(form.config["rope"], target.identity)
    if note is not None:
        form.notes.append(note)


def _config(folder: Path) -> dict[str, Any] | None:
    """The folder's config, None where there is none that can be read."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, out of one safetensors file or several that an index names."""
    try:
        if (folder / INDEX).is_file():
            files = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
            tensors: dict[str, Tensor] = {}
            for name in sorted(set(files.values())):
                tensors |= load_file(folder / Path(name).name)
            absent = sorted(files.keys() - tensors.keys())
            if absent:
                raise UserError(f"{folder / INDEX} names tensors that no file has: {absent}")
            return tensors
        if not (folder / WEIGHTS).is_file():
            raise UserError(_no_weights(folder))
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{folder}: its tensors cannot be read: {error!r}") from None


def _no_weights(folder: Path) -> str:
    """Nothing is unpickled here: a pickle can run any code."""
    return (
        f"{folder} has no {WEIGHTS}; nothing is unpickled here, so download a pytorch_model.bin "
        'and convert it once, in its folder: python -c "import torch, safetensors.torch as s; '
        "s.save_file("
        "{k: v.contiguous() for k, v in torch.load('pytorch_model.bin', weights_only=True)"
        ".items()}, 'model.safetensors')\""
    )
