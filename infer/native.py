"""Drafters that targets are born with: tensors in the target's own files that it does not run."""

import json
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.base import Checkpoint, Contract, DrafterConfig, drafter_class, fill
from heads.errors import UserError
from infer.target import TargetModel, resolve

INDEX = "model.safetensors.index.json"
ERRORS = (OSError, ValueError, KeyError, SafetensorError, HfHubHTTPError, HFValidationError)


def native_drafter(config: DrafterConfig, target: TargetModel) -> tuple[Checkpoint, list[str]]:
    """The target's own drafter of that config, not bound, and notes for people.

    Raises UserError where the target ships none of the config's kind, or one of other tensors.
    """
    cls = drafter_class(config.kind)
    tensors = {
        ours + name.removeprefix(theirs): tensor
        for theirs, ours in cls.native_tensors.items()
        for name, tensor in _tensors(target, theirs)
    }
    if not tensors:
        where = ", ".join(f"{name}*" for name in cls.native_tensors)
        expected = f"its files hold no tensor {where}" if where else "no target does"
        raise UserError(
            f"the target {target.name} ships no drafter of kind {config.kind!r} ({expected}); "
            "drop start to train a new one"
        )
    drafter = cls.blank(config, target.identity)
    more = sorted(tensors.keys() - drafter.state_dict().keys())
    notes = [f"the target's own drafter has more: {', '.join(more[:3])} ... not used"] * bool(more)
    kept = {name: tensor for name, tensor in tensors.items() if name not in more}
    fill(drafter, kept, f"the drafter of {target.name}")
    return Checkpoint(drafter, Contract(target=target.identity, **drafter.contract_fields())), notes


def _tensors(target: TargetModel, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the target's files whose names begin so."""
    try:
        for path in _files(target, prefix):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.startswith(prefix):
                        yield name, file.get_tensor(name)
    except ERRORS as error:
        raise UserError(
            f"the files of the target {target.name} cannot be read for its own drafter: {error!r}; "
            "expected safetensors"
        ) from None


def _files(target: TargetModel, prefix: str) -> list[Path]:
    """The safetensors files that hold such tensors: by the index where there is one."""
    folder = Path(resolve(target.name))
    if not folder.is_dir():
        patterns = ["*.safetensors", INDEX]
        found = snapshot_download(target.name, revision=target.revision, allow_patterns=patterns)
        folder = Path(found)
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    files = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    holding = {file for name, file in files.items() if name.startswith(prefix)}
    return [folder / Path(file).name for file in sorted(holding)]
