"""Checkpoints in the exact form that serving engines load."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from heads.base import Checkpoint, check_contract
from heads.errors import UserError, unknown_name
from heads.files import refuse_existing
from infer.export import vllm, vllm_mtp
from infer.export.public import Found, PublicFolder, fetch, is_hub_id, open_folder, read_public
from infer.export.read_back import Exported, read_back
from infer.target import TargetModel

__all__ = [
    "ENGINES",
    "Engine",
    "Exported",
    "Found",
    "PublicFolder",
    "export_drafter",
    "fetch",
    "is_hub_id",
    "open_folder",
    "read_back",
    "read_public",
]


@dataclass(frozen=True)
class Engine:
    """One serving engine: who writes its folders, which drafters need the target, and the proof."""

    export: Callable[[Checkpoint, TargetModel | None, Path, str | None], Path]
    needs_target: Callable[[Checkpoint], bool]
    prove: Callable[[Path], None]


ENGINES = {vllm.ENGINE: Engine(vllm.export_vllm, vllm.needs_target, vllm.prove_vllm)}
REFUSED = {("tensorrt-llm", "mtp"): vllm_mtp.NOT_IN_TENSORRT_LLM}
"""What an engine has no place for, by engine and kind of drafter: why, and what to do."""


def export_drafter(
    checkpoint: Checkpoint,
    engine: str,
    out: Path,
    target_loader: Callable[[], TargetModel],
    dtype: str | None = None,
) -> Path:
    """Write `checkpoint` to the new folder `out` in the form of `engine`.

    `target_loader` is called only when the target's own tensors are part of the folder; a target
    other than the drafter's is refused. `dtype` None keeps the drafter's own.
    """
    refusal = REFUSED.get((engine, checkpoint.drafter.kind))
    if refusal is not None:
        raise UserError(refusal)
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    refuse_existing(out)
    target = None
    if ENGINES[engine].needs_target(checkpoint):
        target = target_loader()
        check_contract(checkpoint.contract, target.identity, str(checkpoint.path or "the drafter"))
    return ENGINES[engine].export(checkpoint, target, out, dtype)
