"""Draft models in the form that vLLM serves: an ordinary transformers folder (draft_model).

SGLang serves the same folder as STANDALONE and TensorRT-LLM as Draft_Target, whose loader wants a
config without `draft_vocab_size`; neither was run here. The tokenizer and the chat template in it
are the target's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from heads.base import Checkpoint
from heads.students import config_of, names_in, student_fields
from infer.export import contract
from infer.export.contract import Expected, TensorSpec
from infer.export.decoder_layers import refuse_config, target_of
from infer.export.form import KIND_KEY, TARGET_KEY, TOKENIZER_FILES, Form, write_tokenizer
from infer.target import TargetModel

METHOD = "draft_model"
OURS = ("dtype", "architectures", TARGET_KEY, KIND_KEY, "rope_theta", "rope_scaling")


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The student's own config; the rope settings also in the form before transformers 5."""
    drafter: Any = checkpoint.drafter
    fields = dict(drafter.config.transformer)
    names, _ = names_in(fields)
    rope = dict(fields.get("rope_parameters") or {})
    if "rope_theta" in rope:
        fields["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            fields["rope_scaling"] = rope
    return fields | {"architectures": [names.architecture], KIND_KEY: METHOD, "use_cache": True}


def _tensors(checkpoint: Checkpoint, target: TargetModel | None) -> dict[str, Tensor]:
    assert target is not None, "the target's tokenizer is part of this folder"
    drafter: Any = checkpoint.drafter
    found: dict[str, Tensor] = drafter.ordinary(target.shared)
    return found


def _expected(config: Mapping[str, Any]) -> Expected:
    refuse_config(_faults(config))
    dtype = contract.dtype_named(config["dtype"], contract.CONFIG)
    _, shapes = names_in(_fields(config))
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The student's config out of a written one."""
    plain = {key: value for key, value in config.items() if key not in OURS}
    return student_fields(config_of(plain))


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    target = target_of(config)
    if "draft_vocab_size" in config:
        yield "draft_vocab_size is given; an ordinary model has none"
    if config["vocab_size"] != target.vocab_size:
        yield f"vocab_size {config['vocab_size']} is not the target's {target.vocab_size}"
    names, _ = names_in(_fields(config))
    if config["architectures"] != [names.architecture]:
        yield f"architectures {config['architectures']} is not [{names.architecture!r}]"
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None and config.get("rope_theta") != theta:
        yield "rope_theta and rope_parameters.rope_theta differ"


FORM = Form(
    METHOD,
    "",
    "",
    _config,
    _tensors,
    _expected,
    lambda checkpoint: True,
    write_beside=write_tokenizer,
    beside=TOKENIZER_FILES,
)
