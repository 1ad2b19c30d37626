"""On-policy data (DistillSpec, 2310.08461): the drafter's own responses among a batch's.

A share of each step's conversations gets its last response anew, from the drafter as it stands;
the target then scores that text like any other. A copy of the drafter writes for `every` steps at
once, in one batch. Which conversations, and with which random numbers, the recipe's seed and their
place in the data decide; what was written goes into the snapshots, so a resumed run is the same.

Shapes: T positions of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import gather_object

from distill.features import FeatureSource, PackedRow, RowStates
from distill.generate import batched_generate
from distill.losses import LOSSES
from heads.base import Drafter, fill
from heads.errors import UserError
from infer.sampling import Sampling
from infer.target import TargetModel
from train.batches import Packing, RowStream, derive, share
from train.engine import Engine
from train.recipe import OnPolicySection, Recipe

CHOICE, DRAWS = 3, 4
"""Which derived seeds choose conversations and draw their tokens."""
RANGE = 2**56


def check_on_policy(recipe: Recipe, drafter: Drafter) -> None:
    """Raise UserError for a drafter that cannot write, and for losses that its own text teaches."""
    if recipe.data.on_policy is None:
        return
    if not drafter.can_write:
        raise UserError(
            f"data.on_policy is set, and a drafter of kind {drafter.kind!r} cannot write a text by "
            "itself; drop it, or train a kind that is a language model of its own"
        )
    terms = [name for name, weight in recipe.loss.terms.items() if weight]
    blind = [name for name in terms if name in LOSSES and not LOSSES[name].teacher]
    if blind:
        raise UserError(
            f"data.on_policy is set with the loss {', '.join(blind)}, which would teach the "
            "drafter its own tokens; take losses with a teacher, such as forward_kl"
        )


@dataclass
class Rewriter:
    """Puts the drafter's own responses into rows; `texts` by step, place and conversation."""

    recipe: Recipe
    section: OnPolicySection
    engine: Engine
    target: TargetModel
    packing: Packing
    features: FeatureSource
    stream: RowStream
    texts: dict[str, list[int]] = field(default_factory=dict)
    until: int = 0
    seconds: float = 0.0
    written: int = 0
    _copy: Drafter | None = None

    def states(self, step: int, place: int, index: int) -> RowStates:
        """The states of the row at a place of a step, with what was written for it."""
        row = self.packing.rows[index]
        new = {
            segment: text
            for segment in range(1, len(row.ids) + 1)
            if (text := self.texts.get(f"{step}:{place}:{segment}")) is not None
        }
        if not new:
            return self.features.states(row)
        return self.features.changed(with_responses(row, new), new, row)

    def prepare(self, step: int, progress: float) -> None:
        """Write for the next steps where that has not been done; all processes take part."""
        if step < self.until:
            return
        began = perf_counter()
        self.until = step + self.section.every
        self.texts.clear()
        share_now = self.section.share_at(progress)
        if share_now:
            self._write(range(step, self.until), share_now)
        self.seconds += perf_counter() - began

    def _write(self, steps: range, share_now: float) -> None:
        chosen = [found for step in steps for found in self._chosen(step, share_now)]
        tensors = self.engine.whole_state()
        if not chosen:
            return
        drafter = self._as_it_stands(tensors)
        most = min(self.section.max_new_tokens, max(one.room for one in chosen))
        texts = batched_generate(
            drafter.writer(self.target.end_tokens),
            [one.prompt for one in chosen],
            most,
            Sampling(self.section.temperature),
            [one.seed for one in chosen],
        )
        for one, text in zip(chosen, texts, strict=True):
            self.texts[one.key] = text[: one.room]
        self.written += len(chosen)

    def _chosen(self, step: int, share_now: float) -> list["Chosen"]:
        """This process's conversations of a step that are written anew."""
        indices = self.stream.rows(step)
        size, engine = self.recipe.optimizer.micro_batch, self.engine
        shares = share(range(len(indices)), engine.process, engine.processes, size)
        found = []
        for place in (place for places in shares for place in places):
            row = self.packing.rows[indices[place]]
            where = step * self.stream.per_step + place
            for segment in range(1, len(row.ids) + 1):
                if derive(self.recipe.seed, CHOICE, where, segment) >= share_now * RANGE:
                    continue
                start, begin, end = last_response(row, segment)
                if start < begin < end:
                    prompt = row.tokens_T[start:begin].tolist()
                    seed = derive(self.recipe.seed, DRAWS, where, segment)
                    key = f"{step}:{place}:{segment}"
                    found.append(Chosen(key, prompt, end - begin, seed))
        return found

    def _as_it_stands(self, tensors: dict[str, torch.Tensor]) -> Drafter:
        """A copy of the drafter in the target's dtype, as it drafts."""
        trained = self.engine.drafter
        if self._copy is None:
            self._copy = type(trained).blank(trained.config, self.target.identity)
            self._copy.to(device=self.target.device, dtype=self.target.dtype).eval()
            self._copy.bind(self.target.shared)
        fill(self._copy, tensors, "the trained drafter")
        return self._copy

    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs, of all processes together; all call it."""
        texts = dict(gather_object(list(self.texts.items())))
        return {
            "texts": texts,
            "until": self.until,
            "seconds": self.seconds,
            "written": self.written,
        }

    def fill_from(self, state: dict[str, Any]) -> None:
        """Take up what `to_json` gave."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Chosen:
    """A conversation to be written anew: prompt, and room for so many tokens."""

    key: str
    prompt: list[int]
    room: int
    seed: int


def last_response(row: PackedRow, segment: int) -> tuple[int, int, int]:
    """Where a conversation starts, where its last response does, and where that ends.

    tokens a b c d e f, mask 0 1 0 0 1 1  ->  (0, 4, 6)
    """
    where = (row.segments_T == segment).nonzero()[:, 0].tolist()
    start, stop = where[0], where[-1] + 1
    mask = row.loss_mask_T.tolist()
    end = next((place + 1 for place in range(stop - 1, start - 1, -1) if mask[place]), start)
    begin = end
    while begin > start and mask[begin - 1]:
        begin -= 1
    return start, begin, end


def with_responses(row: PackedRow, texts: Mapping[int, Sequence[int]]) -> PackedRow:
    """The row with other last responses, no longer than those they replace; the rest closes up.

    segments 1 1 1 2 2, mask 0 1 1 0 1, {1: [x]}  ->  tokens a x d e 0, segments 1 1 2 2 0
    """
    tokens, mask, segments, positions = (torch.zeros_like(row.tokens_T) for _ in range(4))
    at = 0
    for segment in range(1, len(row.ids) + 1):
        start, begin, end = last_response(row, segment)
        if segment in texts:
            own = torch.as_tensor(list(texts[segment]), dtype=torch.long)
            assert len(own) <= end - begin, "a response fits in the place of the one it replaces"
            new = torch.cat([row.tokens_T[start:begin], own])
            learned = torch.cat([row.loss_mask_T[start:begin].long(), torch.ones_like(own)])
        else:
            place = row.segments_T == segment
            new, learned = row.tokens_T[place], row.loss_mask_T[place].long()
        to = slice(at, at + len(new))
        tokens[to], mask[to], segments[to] = new, learned, segment
        positions[to] = torch.arange(len(new))
        at += len(new)
    return PackedRow(row.index, tokens, mask.bool(), segments, positions, row.ids)
