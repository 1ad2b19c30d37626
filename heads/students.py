"""Small language models that draft for a larger one: cut from it, or read from a folder.

A student is a transformers model, `AutoModelForCausalLM` in form: a decoder and an output matrix.

Shapes: D hidden size, I intermediate size, V vocabulary.
"""

import copy
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, model_validator
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from heads.base import SharedWeights, TargetIdentity
from heads.decoder import planned
from heads.errors import UserError
from heads.files import quiet_transformers
from heads.schema import Strict

GATED = ("gate_proj", "up_proj", "down_proj")
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
DEFAULT_SHARE = 5
"""A student is cut to a fifth of the target's layers where nothing else is asked for."""
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, RuntimeError, TypeError),
    *(SafetensorError, StrictDataclassError),
)


class Student(Strict):
    """Where a student comes from: `layers` of the target, or `model`, a folder or hub id.

    `layers` None without a `model` is a fifth of the target's. `mlp`: the intermediate size of a
    cut student's layers, None for the target's own.
    """

    layers: int | None = None
    mlp: int | None = Field(default=None, ge=1)
    model: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "Student":
        if self.model is not None and (self.layers is not None or self.mlp is not None):
            raise ValueError("give layers (and mlp) to cut from the target, or a model, not both")
        return self

    def layers_of(self, target: TargetIdentity) -> int:
        """How many layers are kept; refuses none and more than there are."""
        last = target.num_hidden_layers
        layers = max(1, last // DEFAULT_SHARE) if self.layers is None else self.layers
        if not 1 <= layers <= last:
            raise UserError(
                f"drafter.student.layers is {layers}; the target {target.name} has {last} layers: "
                f"give 1 to {last}"
            )
        return layers


def kept_layers(layers: int, of: int) -> list[int]:
    """Evenly spaced layers, the first and the last among them.

    layers = 4, of = 10  ->  [0, 3, 6, 9]
    """
    if layers == 1:
        return [0]
    return [(2 * i * (of - 1) + layers - 1) // (2 * (layers - 1)) for i in range(layers)]


def cut_student(student: Student, target: TargetIdentity, model: Any) -> Any:
    """A student out of some of the target's layers, with copies of its tensors, in float32."""
    own = model.config.get_text_config()
    kept = kept_layers(student.layers_of(target), target.num_hidden_layers)
    config = copy.deepcopy(own)
    config.num_hidden_layers = len(kept)
    if getattr(own, "layer_types", None):
        config.layer_types = [own.layer_types[layer] for layer in kept]
    if student.mlp is not None:
        _check_mlp(student.mlp, own, model.get_decoder(), target)
        config.intermediate_size = student.mlp
    cut = new_student(student_fields(config))
    cut.load_state_dict(dict(_cut_tensors(model, kept, student.mlp)))
    return cut.float().eval()


def _check_mlp(size: int, config: Any, decoder: Any, target: TargetIdentity) -> None:
    found = getattr(config, "intermediate_size", None)
    gated = all(hasattr(getattr(layer, "mlp", None), n) for layer in decoder.layers for n in GATED)
    if found is None or not gated:
        raise UserError(
            f"drafter.student.mlp is {size}, and the layers of the target {target.name} "
            f"({target.model_type}) have no {', '.join(GATED)} to narrow; drop it"
        )
    if size > found:
        raise UserError(
            f"drafter.student.mlp is {size}, the target {target.name} has {found}; give at most "
            "that, or drop it"
        )


def _cut_tensors(model: Any, kept: list[int], mlp: int | None) -> Iterator[tuple[str, Tensor]]:
    """The state dict of the cut model: kept layers renumbered, MLPs narrowed."""
    decoder = model.get_decoder()
    prefix = next(f"{n}.layers." for n, module in model.named_modules() if module is decoder)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            yield name, tensor
    for place, layer in enumerate(kept):
        old = f"{prefix}{layer}."
        found = {n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)}
        for name, tensor in (found if mlp is None else _narrowed(found, mlp)).items():
            yield f"{prefix}{place}.{name}", tensor


def _narrowed(tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """A layer's tensors with the `size` neurons of its MLP that weigh most, in their order.

    A neuron weighs the product of the norms of its gate, up and down vectors.
    """
    gate_ID, up_ID, down_DI = (tensors[f"mlp.{name}.weight"].float() for name in GATED)
    weights_I = gate_ID.norm(dim=1) * up_ID.norm(dim=1) * down_DI.norm(dim=0)
    kept = weights_I.topk(size).indices.sort().values
    narrow = dict(tensors)
    for name in GATED:
        dim = 1 if name == "down_proj" else 0
        narrow[f"mlp.{name}.weight"] = tensors[f"mlp.{name}.weight"].index_select(dim, kept)
        bias = f"mlp.{name}.bias"
        if bias in tensors and dim == 0:
            narrow[bias] = tensors[bias][kept]
    return narrow


def load_student(name: str) -> Any:
    """The causal LM of a folder or hub id, in float32."""
    try:
        with quiet_transformers():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True
            )
    except LOADING_ERRORS as error:
        raise UserError(_unreadable(name, error)) from None
    wrong = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if wrong:
        raise UserError(
            f"{name}: its weights do not fit its config: {', '.join(wrong[:3])} of {len(wrong)} "
            "tensors are missing or unexpected; fetch the model again"
        )
    return loaded


def _unreadable(name: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{name} could not be read as a causal LM: {reason}; expected a folder with config, "
        "safetensors and tokenizer, or a hub id"
    )


def refuse_unfit(name: str, loaded: Any, target: TargetIdentity, shared: SharedWeights) -> None:
    """Raise UserError for a student with other tokens than the target's, or a larger one."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name)
    except LOADING_ERRORS as error:
        raise UserError(_unreadable(name, error)) from None
    refuse_other_tokens(name, tokenizer, target, shared.tokenizer)
    _check_size(name, loaded, target, shared.model)


def refuse_other_tokens(name: str, own: Any, target: TargetIdentity, tokenizer: Any) -> None:
    """Raise UserError, showing the first differing token, unless both give tokens the same ids."""
    ours, theirs = (
        {id_: token for token, id_ in one.get_vocab().items()} for one in (own, tokenizer)
    )
    for id_ in sorted(ours.keys() | theirs.keys()):
        if ours.get(id_) != theirs.get(id_):
            raise UserError(
                f"{name} has another tokenizer than {target.name}: token {id_} is "
                f"{ours.get(id_)!r} there and {theirs.get(id_)!r} in the target; a draft model "
                "must have the target's own tokens: take a smaller model of its family, or cut "
                "one from the target (drafter.student.layers)"
            )


def _check_size(name: str, loaded: Any, target: TargetIdentity, model: Any) -> None:
    rows = loaded.get_output_embeddings().weight.shape[0]
    if rows != target.vocab_size:
        raise UserError(
            f"{name} has logits of {rows} tokens, the target {target.name} of {target.vocab_size}; "
            "engines take a draft model of the same vocabulary size only: take another, or cut "
            "one from the target (drafter.student.layers)"
        )
    sizes = [sum(p.numel() for p in one.parameters()) for one in (loaded, model)]
    if sizes[0] > sizes[1]:
        raise UserError(
            f"{name} has {sizes[0]:,} parameters, the target {target.name} {sizes[1]:,}: a student "
            "larger than its target cannot be faster; take a smaller one"
        )


def student_fields(config: Any) -> dict[str, Any]:
    """A transformers config as plain JSON, without what changes from machine to machine."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in fields.items() if key not in VOLATILE}


def fields_from(student: Student, target: TargetIdentity) -> dict[str, Any]:
    """The config of a student of these sizes where no model is at hand: for blank drafters."""
    sizes = target.decoder | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    sizes |= {"num_hidden_layers": student.layers_of(target)}
    sizes["rope_parameters"] = sizes.pop("rope", None)
    if student.mlp is not None:
        sizes["intermediate_size"] = student.mlp
    return student_fields(AutoConfig.for_model(target.model_type, **sizes))


def config_of(fields: dict[str, Any]) -> Any:
    """The transformers config that `student_fields` gave."""
    try:
        return AutoConfig.for_model(**fields)
    except LOADING_ERRORS as error:
        raise UserError(
            f"a student's config cannot be read by transformers: {error}; "
            "expected a checkpoint as it was written"
        ) from None


def new_student(fields: dict[str, Any]) -> Any:
    """A causal LM of that config, at a random start."""
    return _built(AutoModelForCausalLM, config_of(fields))


def new_decoder(fields: dict[str, Any]) -> Any:
    """Its decoder alone, with planned attention."""
    return _built(AutoModel, planned(config_of(fields)))


def _built(auto: Any, config: Any) -> Any:
    """By its class: in a ZeRO-3 run `from_config` would share it out among the processes."""
    try:
        return auto._model_mapping[type(config)](config)
    except KeyError:
        raise UserError(
            f"transformers has no causal LM of type {config.model_type!r} of its own; "
            "take a student of another type"
        ) from None


def is_ordinary(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder with tensors of these names is a causal LM that transformers knows."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except LOADING_ERRORS:
        return False
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return False
    found, _ = names_in(student_fields(config.get_text_config()))
    return found.embed in names and "fc.weight" not in names


def refuse_undrivable(model: Any) -> None:
    """Raise UserError for layers that do not see all that came before, and for scaled embeddings.

    The same layers that the target itself is refused for.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    default = ["sliding_attention" if window else "full_attention"]
    kinds = set(getattr(config, "layer_types", None) or default)
    if kinds != {"full_attention"} or type(model.get_input_embeddings()) is not nn.Embedding:
        raise UserError(
            f"a student of type {config.model_type} has layers of type "
            f"{', '.join(sorted(kinds))} and an embedding of type "
            f"{type(model.get_input_embeddings()).__name__}; only full attention and plain "
            "embeddings are followed here: take another student"
        )


class Names(NamedTuple):
    """How an ordinary folder of a student names things; `head` is None where it is the embedding.

    `decoder` ends with a dot.
    """

    architecture: str
    decoder: str
    embed: str
    head: str | None


def names_in(fields: dict[str, Any]) -> tuple[Names, dict[str, tuple[int, ...]]]:
    """The names of such a folder, and every tensor that it holds with its shape."""
    with torch.device("meta"):
        model = new_student(fields)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    named: dict[str, Any] = dict(model.named_modules())

    def name_of(module: Any) -> str:
        return next(name for name, found in named.items() if found is module)

    decoder, embed, head = (
        name_of(found())
        for found in (model.get_decoder, model.get_input_embeddings, model.get_output_embeddings)
    )
    tied = bool(model.config.tie_word_embeddings)
    if tied:
        shapes = {name: shape for name, shape in shapes.items() if name != f"{head}.weight"}
    last = None if tied else f"{head}.weight"
    return Names(type(model).__name__, f"{decoder}.", f"{embed}.weight", last), shapes
