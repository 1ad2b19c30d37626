"""From what a user names to what drafts: a target, and drafters read, bound and exported.

A drafter is named by a kind that needs no training, a folder, or an id on the model hub. A folder
is one of ours, trained or exported, or a public one, which is read against a target by name.
`KIND+DRAFTER` is a kind that needs no training and any drafter as one (`heads.union`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from heads.base import (
    Checkpoint,
    Contract,
    Drafter,
    TargetIdentity,
    check_contract,
    drafter_class,
    drafter_kinds,
)
from heads.errors import UserError
from heads.union import Union
from infer.export import (
    Exported,
    Found,
    PublicFolder,
    export_drafter,
    fetch,
    is_hub_id,
    open_folder,
    read_public,
)
from infer.target import DType, TargetModel


def is_training_free(spec: str) -> bool:
    """Whether `spec` names a kind that needs no checkpoint (and no folder of that name exists)."""
    return spec in drafter_kinds() and not Path(spec).exists() and not drafter_class(spec).trainable


def split_lookup(spec: str) -> tuple[str | None, str]:
    """The kind and the drafter of `KIND+DRAFTER`; None and `spec` for a drafter alone."""
    lookup, plus, drafter = spec.partition("+")
    if plus and is_training_free(lookup) and not Path(spec).exists():
        return lookup, drafter
    return None, spec


def read_drafter(spec: str) -> Found | None:
    """What `spec` names: a folder, or an id on the model hub; None for a kind that needs none.

    Of a lookup and a drafter, the drafter.
    """
    lookup, drafter = split_lookup(spec)
    if lookup is not None:
        return read_drafter(drafter)
    if is_training_free(spec):
        return None
    if Path(spec).is_dir():
        return open_folder(Path(spec))
    if is_hub_id(spec):
        return open_folder(fetch(spec))
    free = [kind for kind in drafter_kinds() if not drafter_class(kind).trainable]
    raise UserError(
        f"no such drafter: {spec}; expected a folder written by outrider train, a folder or "
        "model hub id of a public drafter, "
        f"one of the kinds that need no training ({', '.join(free)}), "
        "or KIND+DRAFTER, such a kind joined with a drafter"
    )


def open_target(
    drafters: Sequence[Found | None],
    name: str | None,
    dtype: DType,
    device: str | None,
    trust_remote_code: bool = False,
) -> TargetModel:
    """The target by name, or the one that the first drafter with a contract was trained for."""
    identities = [target for target in map(_trained_for, drafters) if target is not None]
    if name is None:
        if not identities:
            raise UserError(_no_target(drafters))
        name = identities[0].name
    revision = next((target.revision for target in identities if target.name == name), None)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return TargetModel.load(
        name, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )


def _trained_for(drafter: Found | None) -> TargetIdentity | None:
    match drafter:
        case Checkpoint():
            return drafter.contract.target
        case Exported():
            return drafter.target
    return None


def _no_target(drafters: Sequence[Found | None]) -> str:
    public = [str(found.folder) for found in drafters if isinstance(found, PublicFolder)]
    if public:
        return (
            f"no target: {public[0]} does not say which target it was trained for; "
            "name it by --target"
        )
    return "no target: these drafters need no training, so name one by --target"


def bind_drafter(
    found: Found | None, spec: str, target: TargetModel, say: Callable[[str], None] | None = None
) -> Checkpoint:
    """The drafter ready to draft for `target`: its contract checked, its tensors in place.

    `say` hears what the user should know of a public drafter.
    """
    lookup, rest = split_lookup(spec)
    if lookup is not None:
        beside = bind_drafter(None, lookup, target).drafter
        return _joined(beside, bind_drafter(found, rest, target, say), target)
    if found is None:
        cls = drafter_class(spec)
        drafter = cls.create(cls.Config(kind=spec), target.identity, target.shared)
        return Checkpoint(drafter, Contract(target=target.identity))
    checkpoint = checkpoint_of(found, target, say)
    if isinstance(found, Exported):
        found.bound(target.dtype, target.device, target.shared)
    else:
        checkpoint.drafter.to(device=target.device, dtype=target.dtype)
        checkpoint.drafter.bind(target.shared)
    return checkpoint


def _joined(lookup: Drafter, checkpoint: Checkpoint, target: TargetModel) -> Checkpoint:
    """The drafter of the checkpoint with a lookup beside it."""
    accuracies = checkpoint.calibration.get("accuracies_HK")
    union = Union(lookup, checkpoint.drafter, target.identity.vocab_size, accuracies)
    union.bind(target.shared)
    return replace(checkpoint, drafter=union.eval())


def checkpoint_of(
    found: Found, target: TargetModel, say: Callable[[str], None] | None = None
) -> Checkpoint:
    """The drafter with its contract, which must be one for `target`; not bound yet."""
    if isinstance(found, PublicFolder):
        checkpoint, notes = read_public(found.folder, target)
        if say is not None:
            for note in notes:
                say(note)
        return checkpoint
    checkpoint = found if isinstance(found, Checkpoint) else found.checkpoint
    check_contract(checkpoint.contract, target.identity, str(checkpoint.path))
    return checkpoint


def export_from(
    spec: str,
    engine: str,
    out: Path,
    dtype: DType | None = None,
    target: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Export the drafter that `spec` names.

    Without a `dtype` in the one of its target, a public one in its own tensors'. The target is
    opened only where the drafter has to be read against it, or is written with it.
    """
    lookup, drafter = split_lookup(spec)
    if lookup is not None:
        raise UserError(
            f"{spec} is a lookup and a drafter, which no engine runs as one; export {drafter}"
        )
    found = read_drafter(spec)
    if found is None:
        raise UserError(
            f"{spec} needs no training and has nothing to export; engines have their own"
        )
    if isinstance(found, Exported):
        raise UserError(f"{spec} is an exported folder already; copy it, or export its checkpoint")
    opened = cache(lambda: open_target([found], target, "float32", "cpu"))
    if not isinstance(found, PublicFolder):
        return export_drafter(found, engine, out, opened, dtype or found.contract.target.dtype)
    return export_drafter(checkpoint_of(found, opened(), say), engine, out, opened, dtype)
