"""How one kind of drafter lies in a folder, as its writer sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.base import Checkpoint
from infer.export.contract import Expected
from infer.target import TargetModel

TARGET_KEY = "outrider_target"
"""vLLM keeps a key that it does not know and never reads it; ours says which target it is for."""


@dataclass(frozen=True)
class Form:
    """The form of one kind.

    `method` is vLLM's name for it; a written config is known by `model_type` and `architecture`.
    `expected` gives the tensors that a written config promises, or raises UserError where it
    contradicts itself; `config` and `tensors` write it; `needs_target` says whether the target's
    tensors are in it, or raises UserError for what the form cannot hold. `write_more` writes what
    a folder that is a whole model has beside them, `more_files` are its names.
    """

    method: str
    model_type: str
    architecture: str
    config: Callable[[Checkpoint], dict[str, Any]]
    tensors: Callable[[Checkpoint, TargetModel | None], dict[str, Tensor]]
    expected: Callable[[Mapping[str, Any]], Expected]
    needs_target: Callable[[Checkpoint], bool]
    more_files: tuple[str, ...] = ()
    write_more: Callable[[TargetModel, Path], None] | None = None

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this form."""
        found = config.get("model_type"), config.get("architectures")
        return found == (self.model_type, [self.architecture])


def needs_nothing(checkpoint: Checkpoint) -> bool:
    """For forms that hold nothing of the target."""
    return False
