"""The drafter protocol, the contract, and how a drafter is saved and loaded.

The folder is the registry: a file `heads/<kind>.py` with a `Drafter` subclass whose `kind` is the
file's name is a drafter kind. Nothing else lists them.

Shapes: B rows, T positions, D target hidden size, A captured layers, V vocabulary, N tree nodes.
"""

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads.errors import UserError, unknown_name
from heads.files import whole_folder
from heads.schema import Strict, parse
from heads.tree import DynamicTree, TokenTree, TreeShape
from heads.vocab import VocabMap, label

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


class TargetIdentity(Strict):
    """All that must agree between a drafter's target and the model it is served with.

    The hashes are hex sha256 prefixes; `weights_hash` samples the target's own tensors, so that two
    fine-tunes of one base differ.
    """

    name: str
    revision: str | None = None
    config_hash: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    dtype: str
    decoder: dict[str, Any] = Field(default_factory=dict)
    """The sizes of its layers and its rope, which a drafter's own layers take over."""


class Contract(Strict):
    """What a checkpoint promises about how it was trained and must be served.

    `captured_layers` count transformers' way: k is the residual stream after k layers
    (`hidden_states[k]`). `rope` is empty for drafters without attention of their own.
    """

    target: TargetIdentity
    captured_layers: tuple[int, ...] = ()
    captured_layer_convention: str = "hidden_states[k]: the residual stream after k layers"
    hidden: str = "after the final norm"
    recurrence: str = "none"
    rope: dict[str, Any] = Field(default_factory=dict)
    norm_flags: dict[str, bool] = Field(default_factory=dict)
    draft_vocab: str = "full"


@dataclass(frozen=True)
class SharedWeights:
    """The target's frozen tensors a drafter reads: `lm_head_VD`, `embed_VD` (never trained).

    `final_norm_D`: the scale of its final norm, where a new drafter starts from it.
    `model` and `tokenizer` are the target's own, as transformers gives them, for kinds that are
    made from a whole target; None where only the tensors are at hand.
    """

    lm_head_VD: Tensor
    embed_VD: Tensor
    final_norm_D: Tensor | None = None
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Needs:
    """What a drafter wants of the target at every processed position."""

    final_hidden: bool = False
    captured_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingBatch:
    """One packed micro-batch.

    `tokens_BT` int64; `loss_mask_BT` bool, true on the assistant's tokens; `segments_BT` int64, the
    conversation within the row from 1, 0 for padding; `positions_BT` int64, restarting with each
    conversation; `hidden_BTD` the target's states after its final norm; `captured_BTAD` its
    captured layers in ascending order, or None; `rows` the data set's row ids, for error messages.
    """

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    segments_BT: Tensor
    positions_BT: Tensor
    hidden_BTD: Tensor
    captured_BTAD: Tensor | None = None
    rows: tuple[str, ...] = ()


class StepLoss(NamedTuple):
    """What one draft step adds to the loss, as sums: divided once, after the reduce.

    A tuple, because ZeRO-3 finds the tensors that a module gives only in tuples and lists.

    `loss_sum` is a float32 scalar with grad, in which positions may weigh differently. Detached:
    `num_positions` supervised positions (those whose target is outside the draft vocabulary too:
    they count as wrong), `rank_counts_K` how often the target token is the drafter's rank-k
    candidate, k < K (K is 1 while training), `plain_sum` the loss with every position alike.
    """

    loss_sum: Tensor
    num_positions: Tensor
    rank_counts_K: Tensor
    plain_sum: Tensor


class Criterion(Protocol):
    """The loss of one draft step, computed in chunks of positions."""

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        *,
        step: int,
        vocab: VocabMap | None = None,
        features_BTD: Tensor | None = None,
    ) -> StepLoss:
        """Loss sum and counts of draft step `step` (from 0; targets: `heads.align.draft_targets`).

        `hidden_BTD` is what the drafter feeds its output matrix `weight_VD`; `vocab` tells the
        target id of each row of the matrix when it covers a draft vocabulary only.
        `features_BTD` is the drafter's guess of the target's own state one position before the
        predicted token (`heads.align.teacher_positions`), from a drafter that makes one.
        """
        ...


@dataclass
class DraftState:
    """What the loop knows when it asks for a proposal (one request).

    `tokens`: all committed ids, prompt included; the last one is committed but **not yet
    processed** by the target. `hidden_TD` / `captured_TAD`: the target's states at the positions
    that were processed since the last proposal (after prefill: the whole prompt), the last row
    being position `len(tokens) - 2`. `memory` is the drafter's own record of the request (its
    cache), None at the start.
    """

    tokens: list[int]
    hidden_TD: Tensor | None = None
    captured_TAD: Tensor | None = None
    memory: Any = None


@dataclass(frozen=True)
class DraftBudget:
    """What the loop asks for.

    `shape`: the chain or static tree to fill, or the size of a tree that the drafter shapes by its
    own confidence; it may return a smaller tree, never a larger one. `probs`: None for
    deterministic drafts (the drafter's best candidates, by rank); else the map from logits [..., V]
    to probabilities (same temperature and truncation as the target): the drafts are then drawn from
    it with `generator` and come with their `draft_probs_NV`. The children of a node are drawn in
    their order, with or without `replacement`; where q has fewer tokens than a node has children
    without it, the others are left out.
    """

    shape: TreeShape | DynamicTree
    probs: Callable[[Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    replacement: bool = True


class DrafterConfig(Strict):
    """Fields that every kind has; each kind adds its own.

    `draft_vocab_size`: logits over that many frequent tokens only; None is the whole vocabulary.
    """

    training_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that only training reads: a drafter may be trained on with others."""

    kind: str
    draft_vocab_size: int | None = Field(default=None, ge=1)


class Drafter(nn.Module, ABC):
    """What proposes tokens. Its parameters are its own; the target's tensors come by `bind`."""

    kind: ClassVar[str]
    Config: ClassVar[type[DrafterConfig]]
    trainable: ClassVar[bool] = True
    can_sample: ClassVar[bool] = False
    """Whether it can draw drafts at random and tell their true probabilities."""
    draws_trees: ClassVar[bool] = True
    """Whether drafts drawn at random can be a tree."""
    reduces_vocab: ClassVar[bool] = True
    """Whether it can draft over a draft vocabulary."""
    can_grow: ClassVar[bool] = False
    """Whether it can shape a tree by its own confidence (`heads.tree.DynamicTree`)."""
    native_tensors: ClassVar[Mapping[str, str]] = {}
    """Where targets that are born with such a drafter keep it: the beginning of a tensor's name in
    the target's files -> its beginning in ours."""
    can_write: ClassVar[bool] = False
    """Whether it is a language model that can answer a prompt by itself (`writer`)."""

    config: DrafterConfig
    shared: SharedWeights | None = None

    def bind(self, shared: SharedWeights) -> None:
        """Give the drafter the target's frozen tensors (not registered as its own)."""
        object.__setattr__(self, "shared", shared)

    @classmethod
    @abstractmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "Drafter":
        """A new drafter for this target, bound, at its training start.

        `config` is of the class's own `Config`; `vocab` comes with a `draft_vocab_size`.
        """

    @classmethod
    @abstractmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "Drafter":
        """A drafter of the same tensors without values (NaN), to be filled from a checkpoint."""

    @property
    def core(self) -> "Drafter":
        """The drafter whose forwards take the time: itself, unless it wraps another."""
        return self

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it wants of the target."""

    @property
    @abstractmethod
    def max_depth(self) -> int | None:
        """The longest path it can draft; None when there is no limit."""

    @abstractmethod
    def propose(self, state: DraftState, budget: DraftBudget) -> TokenTree:
        """A tree whose root is `state.tokens[-1]`."""

    def propose_batch(self, states: Sequence[DraftState], budget: DraftBudget) -> list[TokenTree]:
        """A tree for each of several requests; deterministic drafts are the same as one by one."""
        return [self.propose(state, budget) for state in states]

    @property
    def trained_steps(self) -> int | None:
        """Draft steps that training runs where an evaluation measures more; None: all of them."""
        return None

    def writer(self, end_tokens: frozenset[int]) -> Any:
        """What writes texts with it (`heads.writing.Writer`), each up to an end token."""
        raise UserError(f"a drafter of kind {self.kind!r} cannot write a text by itself")

    def contract_fields(self) -> dict[str, Any]:
        """The kind's own part of the contract."""
        return {
            "captured_layers": self.needs.captured_layers,
            "draft_vocab": label(getattr(self, "draft_ids", None)),
        }

    def forward(self, batch: TrainingBatch, criterion: Criterion) -> list[StepLoss]:
        """The training forward: one StepLoss a draft step."""
        raise UserError(f"a drafter of kind {self.kind!r} has nothing to train")


def drafter_kinds() -> list[str]:
    """Every kind that has a file in this folder.

    Such a file has a config with `kind: Literal["<the file's name>"]`.
    """
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if f'kind: Literal["{path.stem}"]' in path.read_text("utf-8")
    )


def drafter_class(kind: str) -> type[Drafter]:
    """The drafter class of a kind."""
    if kind not in drafter_kinds():
        raise unknown_name("drafter kind", kind, drafter_kinds())
    module = importlib.import_module(f"heads.{kind}")
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, Drafter)
            and vars(value).get("kind") == kind
        ):
            return value
    raise AssertionError(f"heads/{kind}.py holds no Drafter with kind = {kind!r}")


def native_prefixes() -> tuple[str, ...]:
    """How the names of tensors begin that a target ships for a drafter of its own, of any kind."""
    return tuple(name for kind in drafter_kinds() for name in drafter_class(kind).native_tensors)


@dataclass
class Checkpoint:
    """A drafter with what is known about it.

    `calibration` is measured, never trained: `accuracies_HK` (cumulative counts as rates: row h,
    entry k: how often the target's token is the rank-k candidate at draft step h).
    """

    drafter: Drafter
    contract: Contract
    calibration: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def save_drafter(
    checkpoint: Checkpoint, folder: Path, tensors: dict[str, Tensor] | None = None
) -> None:
    """Write `folder` whole or not at all, replacing an earlier checkpoint there.

    `tensors` replaces the drafter's own state dict (a gathered one of a sharded run).
    """
    state = checkpoint.drafter.state_dict() if tensors is None else tensors
    record = {
        "format": FORMAT,
        "kind": checkpoint.drafter.kind,
        "drafter": checkpoint.drafter.config.model_dump(mode="json"),
        "contract": checkpoint.contract.model_dump(mode="json"),
        "calibration": checkpoint.calibration,
    }
    with whole_folder(folder, replace=True) as whole:
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, whole / WEIGHTS)
        (whole / CONFIG).write_text(json.dumps(record, indent=2) + "\n")


def load_drafter(folder: Path) -> Checkpoint:
    """Read a drafter written by `save_drafter`; it is not bound to a target yet.

    Raises UserError for a folder that is not a drafter, an unknown kind, and tensors that are
    missing, extra, misshapen or not finite.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is not a drafter: no {CONFIG} in it; "
            "expected a folder written by outrider train"
        )
    try:
        record = json.loads((folder / CONFIG).read_text())
        kind, form = record["kind"], record["format"]
        fields, promised, calibration = (
            dict(record["drafter"]),
            dict(record["contract"]),
            dict(record.get("calibration", {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / CONFIG} is not a drafter's config: {error!r}") from None
    if form != FORMAT:
        raise UserError(f"{folder}: checkpoint format {form}, this version reads {FORMAT}")
    cls = drafter_class(kind)
    config = parse(cls.Config, fields, f"{folder / CONFIG} (drafter)")
    contract = parse(Contract, promised, f"{folder / CONFIG} (contract)")
    drafter = cls.blank(config, contract.target)
    fill(drafter, _read_tensors(folder / WEIGHTS), str(folder))
    drafter.eval()
    for name, value in drafter.contract_fields().items():
        if getattr(contract, name) != value:
            raise UserError(
                f"{folder}: its contract says {name} {getattr(contract, name)!r}, its drafter "
                f"needs {value!r}; the config was edited: take the checkpoint as it was written"
            )
    return Checkpoint(drafter, contract, calibration, folder)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None


def fill(drafter: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Put `tensors` into the drafter: nothing missing, nothing extra, exact shapes, all finite."""
    expected = drafter.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise UserError(
            f"{where}: missing tensors {missing or 'none'}, unexpected tensors {extra or 'none'}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, "
                f"expected {list(expected[name].shape)}"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise UserError(
                f"{where}: tensor {name} is {tensor.dtype}, expected {expected[name].dtype}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{where}: tensor {name} holds NaN or infinity; "
                "train it again or take another checkpoint"
            )
    drafter.load_state_dict(tensors)


def check_contract(contract: Contract, target: TargetIdentity, where: str) -> None:
    """Refuse a drafter that was trained for another target, tokenizer or chat template."""
    reasons = {
        "config_hash": "another model configuration",
        "weights_hash": "other target weights",
        "tokenizer_hash": "another tokenizer",
        "template_hash": "another chat template",
    }
    for name, reason in reasons.items():
        trained, given = getattr(contract.target, name), getattr(target, name)
        if trained != given:
            raise UserError(
                f"{where} was trained for {contract.target.name} with {reason} "
                f"({name} {trained}) than {target.name} ({given}); "
                "use its own target or train again"
            )
