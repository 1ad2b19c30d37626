"""Warm starts: a run that begins with a drafter that exists, one of ours or a public one."""

from dataclasses import dataclass

from heads.base import Drafter, DrafterConfig
from heads.errors import UserError
from heads.vocab import VocabMap, label
from infer.native import native_drafter
from infer.opening import checkpoint_of, read_drafter
from infer.target import TargetModel
from train.recipe import Recipe

OWN = "target"
"""The start that means the drafter which the target itself ships."""


@dataclass(frozen=True)
class WarmStart:
    """A drafter to go on training with, bound and in float32, and notes for people.

    `vocab` is its own draft vocabulary, which its output rows belong to; None is the whole one.
    """

    source: str
    drafter: Drafter
    vocab: VocabMap | None
    notes: list[str]

    def refuse_other_vocabulary(self, built: VocabMap | None) -> None:
        """Raise UserError when the run's data give another draft vocabulary than the drafter's."""
        own = label(None if self.vocab is None else self.vocab.target_ids_Vd)
        if built is not None and label(built.target_ids_Vd) != own:
            raise UserError(
                f"{self.source} drafts over the vocabulary {own}, this run's data give "
                f"{label(built.target_ids_Vd)}: its output rows would stand for other tokens; set "
                "drafter.draft_vocab_size=null to keep the drafter's own, or start anew"
            )


def warm_start(recipe: Recipe, kind: str, target: TargetModel) -> WarmStart | None:
    """The drafter that `recipe.start` names; None without one.

    Its own sizes and flags hold, and a note names those that the recipe has otherwise; what only
    training reads comes from the recipe. Raises UserError for another kind, and for a draft
    vocabulary of another size than the recipe asks for.
    """
    if recipe.start is None:
        return None
    drafter, notes = _opened(recipe, kind, target)
    if drafter.kind != kind:
        raise UserError(
            f"start {recipe.start} is a drafter of kind {drafter.kind!r}, this run trains "
            f"{kind!r}; run train/{drafter.kind}.py"
        )
    drafter.config = _continued(recipe.start, drafter.config, recipe.drafter_config(kind), notes)
    drafter.float().train().bind(target.shared)
    ids = getattr(drafter, "draft_ids", None)
    vocab = None if ids is None else VocabMap(ids.cpu(), target.identity.vocab_size)
    notes.append(f"starts with the drafter {recipe.start}")
    return WarmStart(recipe.start, drafter, vocab, notes)


def _opened(recipe: Recipe, kind: str, target: TargetModel) -> tuple[Drafter, list[str]]:
    assert recipe.start is not None
    if recipe.start == OWN:
        native, notes = native_drafter(recipe.drafter_config(kind), target)
        return native.drafter, notes
    found = read_drafter(recipe.start)
    if found is None:
        raise UserError(f"start {recipe.start} needs no training; give a drafter that was trained")
    notes = []
    return checkpoint_of(found, target, notes.append).drafter, notes


def _continued(
    source: str, own: DrafterConfig, asked: DrafterConfig, notes: list[str]
) -> DrafterConfig:
    """The drafter's own config with the training-only fields of the recipe."""
    sizes = asked.draft_vocab_size, own.draft_vocab_size
    if sizes[0] is not None and sizes[0] != sizes[1]:
        raise UserError(
            f"start {source} has draft_vocab_size {sizes[1]}, the recipe asks for {sizes[0]}; set "
            "drafter.draft_vocab_size=null to keep its own"
        )
    for name in type(own).model_fields:
        given, kept = getattr(asked, name), getattr(own, name)
        if name not in own.training_only and given is not None and given != kept:
            notes.append(f"drafter.{name} is {kept!r}, the start's own; {given!r} is not used")
    return own.model_copy(update={name: getattr(asked, name) for name in own.training_only})
