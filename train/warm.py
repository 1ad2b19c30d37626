"""Warm starts: a run that begins with a drafter that exists, one of ours or a public one."""

from dataclasses import dataclass

from heads.base import Drafter, DrafterConfig
from heads.errors import UserError
from heads.vocab import VocabMap, label
from infer.opening import checkpoint_of, read_drafter
from infer.target import TargetModel
from train.recipe import Recipe


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

    Its own sizes and flags hold where the recipe leaves them open; what only training reads comes
    from the recipe. Raises UserError for another kind and for fields that differ.
    """
    if recipe.start is None:
        return None
    found = read_drafter(recipe.start)
    if found is None:
        raise UserError(f"start {recipe.start} needs no training; give a drafter that was trained")
    notes: list[str] = []
    drafter = checkpoint_of(found, target, notes.append).drafter
    if drafter.kind != kind:
        raise UserError(
            f"start {recipe.start} is a drafter of kind {drafter.kind!r}, this run trains "
            f"{kind!r}; run train/{drafter.kind}.py"
        )
    drafter.config = _continued(recipe.start, drafter.config, recipe.drafter_config(kind))
    drafter.float().train().bind(target.shared)
    ids = getattr(drafter, "draft_ids", None)
    vocab = None if ids is None else VocabMap(ids.cpu(), target.identity.vocab_size)
    notes.append(f"starts with the drafter {recipe.start}")
    return WarmStart(recipe.start, drafter, vocab, notes)


def _continued(source: str, own: DrafterConfig, asked: DrafterConfig) -> DrafterConfig:
    """The drafter's own config with the training-only fields of the recipe."""
    differing = [
        f"drafter.{name} is {getattr(asked, name)!r} and its own {getattr(own, name)!r}"
        for name in type(own).model_fields
        if name not in own.training_only
        and getattr(asked, name) is not None
        and getattr(asked, name) != getattr(own, name)
    ]
    if differing:
        raise UserError(
            f"start {source} is built otherwise than the recipe asks for: {'; '.join(differing)}; "
            "give its own values (null takes them where a field may be null)"
        )
    return own.model_copy(update={name: getattr(asked, name) for name in own.training_only})
