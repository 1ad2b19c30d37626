"""How one kind of drafter lies in a folder, as its writer sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.base import Checkpoint
from infer.export.contract import Expected
from infer.target import TargetModel

TARGET_KEY = "outrider_target"
"""vLLM keeps a key that it does not know and never reads it; ours says which target it is for."""
TOKENIZER_FILES = {
    "tokenizer_config.json": True,
    **dict.fromkeys(("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"), False),
    **dict.fromkeys(("special_tokens_map.json", "added_tokens.json"), False),
    **dict.fromkeys(("chat_template.jinja", "additional_chat_templates"), False),
    "generation_config.json": False,
}
"""What `write_tokenizer` may leave in a folder, true for what must be there."""
KIND_KEY = "outrider_method"
"""Of a form whose model_type and architecture are any: its method, by which it is known."""


@dataclass(frozen=True)
class Form:
    """The form of one kind.

    `method` is vLLM's name for it; a written config is known by `model_type` and `architecture`,
    or by KIND_KEY where it has that.
    `expected` gives the tensors that a written config promises, or raises UserError where it
    contradicts itself; `config` and `tensors` write it; `needs_target` says whether the target's
    tensors are in it, or raises UserError for what the form cannot hold. `beside` names the files
    that may lie beside config and tensors, true for those that must; `write_beside` writes them.
    """

    method: str
    model_type: str
    architecture: str
    config: Callable[[Checkpoint], dict[str, Any]]
    tensors: Callable[[Checkpoint, TargetModel | None], dict[str, Tensor]]
    expected: Callable[[Mapping[str, Any]], Expected]
    needs_target: Callable[[Checkpoint], bool]
    write_beside: Callable[[TargetModel, Path], None] | None = None
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


def write_tokenizer(target: TargetModel, folder: Path) -> None:
    """The target's tokenizer, chat template and ends of a text, for a folder that is a model."""
    target.tokenizer.save_pretrained(folder)
    target.model.generation_config.save_pretrained(folder)
