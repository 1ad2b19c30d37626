"""Batch after batch into a data set's folder, going on where an earlier run stopped.

Batches are fixed beforehand and visited in an order of their own: prompts of similar length are
answered together, yet a run that stops early has answered short and long ones alike.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from distill.answer import Answering, answer_batch, row_seed
from distill.chat import prompt_ids
from distill.prompts import Prompt
from distill.self_prompt import (
    QuestionRound,
    SelfPromptConfig,
    load_round,
    refuse_unproductive,
    save_round,
    write_questions,
)
from distill.store import (
    Counts,
    Manifest,
    Row,
    dropped_in,
    normalised,
    read_shard,
    shard_path,
    write_manifest,
    write_shard,
)
from infer.degenerate import is_degenerate
from infer.target import TargetModel

QUESTIONS, ANSWERS = "questions", "answers"
# Batches of answers that one round of questions is meant to fill.
BATCHES_PER_ROUND = 4

Batch = tuple[str, list[Prompt]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be written: answers to `prompts`, or to questions of the target's own."""

    prompts: tuple[Prompt, ...]
    self_prompt: SelfPromptConfig | None
    answering: Answering
    batch_size: int
    max_tokens: int | None


@dataclass
class Clock:
    """A budget of wall clock: work begins when the last piece of its kind would have fitted.

    Every call may answer one batch, so that it gets on and the data set is not empty.
    """

    limit_minutes: float | None
    started_s: float = field(default_factory=time.monotonic)
    last_s: dict[str, float] = field(default_factory=dict)

    def allows(self, kind: str) -> bool:
        """Whether another piece of this kind may begin."""
        if self.limit_minutes is None or ANSWERS not in self.last_s:
            return True
        expected_s = time.monotonic() - self.started_s + self.last_s.get(kind, 0.0)
        return expected_s <= self.limit_minutes * 60

    def spent(self, kind: str, since_s: float) -> float:
        """Note how long a piece took."""
        self.last_s[kind] = time.monotonic() - since_s
        return self.last_s[kind]


class Writer:
    """Writes a plan's batches; `manifest` always tells what is there."""

    def __init__(
        self,
        target: TargetModel,
        plan: Plan,
        folder: Path,
        manifest: Manifest,
        clock: Clock,
        progress: Callable[[str], None],
    ) -> None:
        self.target, self.plan, self.folder = target, plan, folder
        self.manifest, self.clock, self.progress = manifest, clock, progress
        self.counts = Counts()
        self.questions = Counter[str]()
        self.stopped: str | None = None
        self.new_tokens, self.answering_s = 0, 0.0

    def run(self) -> Manifest:
        """Write what is missing; the manifest at the end."""
        for name, prompts in self._batches():
            file = shard_path(self.folder, name)
            if file.exists():
                rows, dropped = read_shard(file), dropped_in(file)
            elif self.clock.allows(ANSWERS):
                rows, dropped = self._answer(file, prompts)
            else:
                self.stopped = "max_minutes"
                break
            self.counts += count_rows(rows, dropped)
            self._save(complete=False)
            if self.plan.max_tokens and self.counts.response_tokens >= self.plan.max_tokens:
                break
        self._save(complete=self.stopped is None)
        return self.manifest

    def _answer(self, file: Path, prompts: Sequence[Prompt]) -> tuple[list[Row], int]:
        since_s = time.monotonic()
        rows = answer_batch(self.target, prompts, self.plan.answering)
        dropped = len(prompts) - len(rows)
        write_shard(file, rows, dropped)
        self.answering_s += self.clock.spent(ANSWERS, since_s)
        self.new_tokens += sum(sum(row.loss_mask) for row in rows)
        self.progress(self._line(self.counts + count_rows(rows, dropped)))
        return rows, dropped

    def _save(self, complete: bool) -> None:
        self.manifest = self.manifest.model_copy(
            update={
                "counts": self.counts,
                "questions": dict(sorted(self.questions.items())),
                "complete": complete,
                "stopped": self.stopped,
            }
        )
        write_manifest(self.folder, self.manifest)

    def _batches(self) -> Iterator[Batch]:
        """Every batch with its name, in the order of answering."""
        groups = self._own_questions() if self.plan.self_prompt else iter([self.plan.prompts])
        number = 0
        for group in groups:
            for prompts in self._arranged(group):
                yield f"{number:05d}", prompts
                number += 1

    def _arranged(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Batches of prompts of similar length, shuffled."""
        tokenizer = self.target.tokenizer

        def length(prompt: Prompt) -> int:
            return len(prompt_ids(tokenizer, prompt.messages[: prompt.turns[0]]))

        ordered = sorted(prompts, key=lambda prompt: (length(prompt), prompt.id))
        size = self.plan.batch_size
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        random.Random(self.plan.answering.seed).shuffle(batches)
        return batches

    def _own_questions(self) -> Iterator[list[Prompt]]:
        """Groups of new questions that fill whole batches, until there are as many as asked for."""
        config = self.plan.self_prompt
        assert config is not None
        seen: set[str] = set()
        waiting: list[Prompt] = []
        kept, written = list[int](), list[int]()
        for number in count():
            questions = self._question_round(config, number, config.count - len(seen))
            if questions is None:
                return
            before = len(seen)
            for index, text in enumerate(questions.texts):
                if normalised(text) not in seen and len(seen) < config.count:
                    seen.add(normalised(text))
                    message = {"role": "user", "content": text}
                    waiting.append(Prompt(_question_id(number, index), "self", (message,)))
            kept.append(len(seen) - before)
            written.append(questions.written)
            self._count_questions(questions, len(seen))
            refuse_unproductive(kept, written)
            done = len(seen) == config.count
            size = self.plan.batch_size
            ready = len(waiting) if done else len(waiting) // size * size
            yield waiting[:ready]
            if done:
                return
            waiting = waiting[ready:]

    def _question_round(
        self, config: SelfPromptConfig, number: int, missing: int
    ) -> QuestionRound | None:
        """A round of questions, read or written; None when the time is up."""
        file = self.folder / QUESTIONS / f"{number:04d}.json"
        saved = load_round(file)
        if saved is not None:
            return saved
        if not self.clock.allows(QUESTIONS):
            self.stopped = "max_minutes"
            return None
        since_s, batch = time.monotonic(), self.plan.batch_size
        size = min(BATCHES_PER_ROUND * batch, max(batch, missing + missing // 4))
        seed = self.plan.answering.seed
        seeds = [row_seed(seed, _question_id(number, index), "ask") for index in range(size)]
        questions = write_questions(self.target, config, seeds)
        save_round(file, questions)
        self.clock.spent(QUESTIONS, since_s)
        return questions

    def _count_questions(self, questions: QuestionRound, kept: int) -> None:
        self.questions.update(questions.dropped)
        self.questions["written"] += questions.written
        self.questions["kept"] = kept
        self.progress(f"respond | questions {kept:,} of {self.questions['written']:,} written")

    def _line(self, counts: Counts) -> str:
        """Where the run is: `respond | rows 128/900 | tokens 20,480/120,000 | 612 tok/s | ..`."""
        rows = self.plan.self_prompt.count if self.plan.self_prompt else len(self.plan.prompts)
        limit = self.plan.max_tokens
        done_rows = counts.rows + counts.dropped_empty
        done = max(done_rows / rows, counts.response_tokens / limit if limit else 0.0)
        speed = self.new_tokens / self.answering_s
        left_s = (1 / done - 1) * counts.response_tokens / speed if done and speed else 0.0
        of_limit = f"/{limit:,}" if limit else ""
        return (
            f"respond | rows {done_rows:,}/{rows:,} | "
            f"tokens {counts.response_tokens:,}{of_limit} | {speed:,.0f} tok/s | "
            f"eta {max(left_s, 0) / 60:.0f} min"
        )


def _question_id(number: int, index: int) -> str:
    return f"self-{number:04d}-{index:03d}"


def count_rows(rows: Sequence[Row], dropped_empty: int) -> Counts:
    """The counts of one shard."""
    answers = [
        [token for token, masked in zip(row.tokens, row.loss_mask, strict=True) if masked]
        for row in rows
    ]
    return Counts(
        rows=len(rows),
        turns=sum(row.turns for row in rows),
        tokens=sum(len(row.tokens) for row in rows),
        response_tokens=sum(map(len, answers)),
        unfinished=sum(not row.finished for row in rows),
        degenerate=sum(
            is_degenerate(answer[:-1] if row.finished else answer)
            for row, answer in zip(rows, answers, strict=True)
        ),
        dropped_empty=dropped_empty,
    )
