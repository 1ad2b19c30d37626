"""How one kind of drafter lies in a folder, as its writer sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.base import Checkpoint, SharedWeights
from infer.export.contract import Expected

TARGET_KEY = "outrider_target"
"""vLLM keeps a key that it does not know and never reads it; ours says which target it is for."""
KIND_KEY = "outrider_method"
"""Of a form whose model_type and architecture are any: its method, by which it is known."""


@dataclass(frozen=True)
class Form:
    """The form of one kind.

    `method` is vLLM's name for it; a written config is known by `model_type` and `architecture`,
    or by KIND_KEY where it has that.
    `expected` gives the tensors that a written config promises, or raises UserError where it
    contradicts itself; `config` and `tensors` write it; `needs_target` says whether the target's
    tensors are in it. `beside` names the files that may lie beside them, true for those that must;
    `write_beside` writes them.
    """

    method: str
    model_type: str
    architecture: str
    config: Callable[[Checkpoint], dict[str, Any]]
    tensors: Callable[[Checkpoint, SharedWeights | None], dict[str, Tensor]]
    expected: Callable[[Mapping[str, Any]], Expected]
    needs_target: Callable[[Checkpoint], bool]
    write_beside: Callable[[SharedWeights | None, Path], None] | None = None
    beside: Mapping[str, bool] = field(default_factory=dict)

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this form."""
        if KIND_KEY in config:
            return bool(config[KIND_KEY] == self.method)
        found = config.get("model_type"), config.get("architectures")
        return found == (self.model_type, [self.architecture])


def needs_nothing(checkpoint: Checkpoint) -> bool:
    """For forms that hold nothing of the target."""
    return False
