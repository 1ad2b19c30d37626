"""Acceptance reports: raw counts first, then figures that are divided once.

acceptance_length = 1 + accepted / rounds: tokens emitted per target forward over a tree, the bonus
token included, the prefill's token not. Micro pools the rounds of all prompts, macro is the mean
over prompts (algorithms: Spec-Bench reports micro).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from infer.loop import PARTS, Generation

DECODE_PARTS = tuple(part for part in PARTS if part != "prefill")
NEW_TEXT_SHARE = 0.25
"""At most this share of tokens may complete a 3-gram seen before for a text to count as new."""


@dataclass(frozen=True)
class Question:
    """A prompt that is measured: its rendered token ids and what it is about."""

    id: str
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptRecord:
    """What one prompt gave: counts of the rule (see `infer.loop.Generation`), times in seconds.

    `first_divergence` is the first new token that differs from plain greedy decoding (None when the
    texts are identical or were not compared), `margin` the target's top-1 less top-2 logit there.
    `degenerate` marks a text that ends in a loop, `repeated_share` the tokens that complete a
    3-gram seen before; both of the plain text where it was decoded too.
    """

    id: str
    category: str
    prompt_tokens: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    proposed_per_position: list[int]
    accepted_per_position: list[int]
    seconds: dict[str, float]
    baseline_tokens: int | None = None
    baseline_seconds: float | None = None
    compared: bool = False
    first_divergence: int | None = None
    margin: float | None = None
    degenerate: bool = False
    repeated_share: float = 0.0
    text: str = ""

    @property
    def total_seconds(self) -> float:
        """Wall clock of the request, prefill included."""
        return sum(self.seconds.values())

    @property
    def new_text(self) -> bool:
        """Whether the text neither loops nor repeats itself much."""
        return not self.degenerate and self.repeated_share <= NEW_TEXT_SHARE

    def to_json(self) -> dict[str, Any]:
        """The fields and the prompt's own acceptance length."""
        return asdict(self) | {"acceptance_length": acceptance_length([self])}

    @classmethod
    def of(cls, question: Question, generation: Generation, **more: Any) -> "PromptRecord":
        """A question's record of one generation."""
        return cls(
            id=question.id,
            category=question.category,
            prompt_tokens=len(question.token_ids),
            tokens=len(generation.tokens),
            rounds=generation.rounds,
            drafted=generation.drafted,
            accepted=generation.accepted,
            proposed_per_position=generation.proposed_per_position,
            accepted_per_position=generation.accepted_per_position,
            seconds=generation.seconds,
            **more,
        )


@dataclass(frozen=True)
class Counts:
    """Sums over prompts."""

    rounds: int
    drafted: int
    accepted: int
    proposed_per_position: list[int]
    accepted_per_position: list[int]
    tokens: int
    prompts: int

    @classmethod
    def of(cls, records: Sequence[PromptRecord]) -> "Counts":
        """The sums of some records."""
        return cls(
            rounds=sum(r.rounds for r in records),
            drafted=sum(r.drafted for r in records),
            accepted=sum(r.accepted for r in records),
            proposed_per_position=_sum_lists([r.proposed_per_position for r in records]),
            accepted_per_position=_sum_lists([r.accepted_per_position for r in records]),
            tokens=sum(r.tokens for r in records),
            prompts=len(records),
        )

    @property
    def acceptance_length(self) -> float:
        """Micro, bonus included; NaN without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> list[float]:
        """Per position: accepted / proposed there (cumulative: every position before held too)."""
        pairs = zip(self._padded(), self.proposed_per_position, strict=True)
        return [a / p if p else 0.0 for a, p in pairs]

    @property
    def conditional_rate(self) -> list[float]:
        """Per position: accepted / accepted at the position before (the first: / proposed).

        NaN where the position before was never accepted.
        """
        accepted = self._padded()
        before = [*self.proposed_per_position[:1], *accepted]
        return [a / b if b else float("nan") for a, b in zip(accepted, before, strict=False)]

    def _padded(self) -> list[int]:
        missing = len(self.proposed_per_position) - len(self.accepted_per_position)
        return self.accepted_per_position + [0] * missing


@dataclass(frozen=True)
class AcceptanceReport:
    """One drafter's figures on some prompts, with everything they were made from."""

    name: str
    settings: dict[str, Any]
    prompts: list[PromptRecord] = field(default_factory=list)

    @property
    def counts(self) -> Counts:
        """Sums over all prompts."""
        return Counts.of(self.prompts)

    @property
    def acceptance_length(self) -> float:
        """Micro, bonus included."""
        return self.counts.acceptance_length

    def subset(self, keep: Callable[[PromptRecord], bool]) -> "AcceptanceReport":
        """The same report over some of the prompts."""
        return AcceptanceReport(self.name, self.settings, [r for r in self.prompts if keep(r)])

    def figures(self) -> dict[str, Any]:
        """The figures, by the names that the JSON uses."""
        counts, records = self.counts, self.prompts
        return {
            "acceptance_length": counts.acceptance_length,
            "acceptance_length_interval": bootstrap(records, acceptance_length),
            "acceptance_length_macro": macro_acceptance_length(records),
            "acceptance_length_macro_interval": bootstrap(records, macro_acceptance_length),
            "acceptance_rate": counts.acceptance_rate,
            "conditional_acceptance_rate": counts.conditional_rate,
            "counts": asdict(counts),
            "tokens_per_second": _median([_speed(r.tokens, r.total_seconds) for r in records]),
            "baseline_tokens_per_second": _median(
                [_speed(r.baseline_tokens, r.baseline_seconds) for r in records]
            ),
            "speedup": speedup(records),
            "speedup_interval": bootstrap(records, speedup),
            "time_share": time_share(records),
        }

    def to_json(self) -> dict[str, Any]:
        """The whole record: figures, figures of the parts, and one record a prompt."""
        categories = sorted({r.category for r in self.prompts})
        return {
            "name": self.name,
            **self.figures(),
            "degenerate_share": _mean([float(r.degenerate) for r in self.prompts]),
            "without_degenerate": self.subset(lambda r: not r.degenerate).figures(),
            "new_text": self.subset(lambda r: r.new_text).figures(),
            "categories": {
                name: self.subset(lambda r, name=name: r.category == name).figures()  # type: ignore[misc]
                for name in categories
            },
            "lossless": self.divergence(),
            "settings": self.settings,
            "prompts": [r.to_json() for r in self.prompts],
        }

    def divergence(self) -> dict[str, Any]:
        """How many texts equal plain greedy decoding, and the margin where one parts from it."""
        compared = [r for r in self.prompts if r.compared]
        diverged = [r for r in compared if r.first_divergence is not None]
        return {
            "compared": len(compared),
            "identical": len(compared) - len(diverged),
            "diverged": [
                {"id": r.id, "first_divergence": r.first_divergence, "margin": r.margin}
                for r in diverged
            ],
        }


def acceptance_length(records: Sequence[PromptRecord]) -> float:
    """Micro acceptance length of some prompts."""
    rounds = sum(r.rounds for r in records)
    return 1 + sum(r.accepted for r in records) / rounds if rounds else float("nan")


def macro_acceptance_length(records: Sequence[PromptRecord]) -> float:
    """Mean over prompts of their acceptance lengths (prompts without a round are left out)."""
    return _mean([1 + r.accepted / r.rounds for r in records if r.rounds])


def speedup(records: Sequence[PromptRecord]) -> float:
    """Median over prompts of tokens per second against plain decoding of the same prompt."""
    return _median(
        [
            _speed(r.tokens, r.total_seconds) / _speed(r.baseline_tokens, r.baseline_seconds)
            for r in records
            if r.baseline_seconds and r.baseline_tokens
        ]
    )


def time_share(records: Sequence[PromptRecord]) -> dict[str, float]:
    """Each part's share of the decoding time (prefill left out)."""
    sums = {part: sum(r.seconds[part] for r in records) for part in DECODE_PARTS}
    total = sum(sums.values())
    return {part: value / total if total else 0.0 for part, value in sums.items()}


def bootstrap(
    records: Sequence[PromptRecord],
    statistic: Callable[[Sequence[PromptRecord]], float],
    resamples: int = 500,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % percentile interval of a statistic over resampled prompts; None under two prompts."""
    if len(records) < 2:
        return None
    picks = np.random.default_rng(seed).integers(0, len(records), (resamples, len(records)))
    values = np.array([statistic([records[i] for i in pick]) for pick in picks])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def paired_difference(a: AcceptanceReport, b: AcceptanceReport) -> dict[str, Any]:
    """Acceptance length of `a` less that of `b` on the same prompts, with a paired interval."""
    others = {r.id: r for r in b.prompts}
    pairs = [(r, others[r.id]) for r in a.prompts if r.id in others]
    picks = np.random.default_rng(0).integers(0, max(len(pairs), 1), (500, len(pairs)))
    values = [_pair_difference([pairs[i] for i in pick]) for pick in picks]
    finite = [v for v in values if np.isfinite(v)]
    interval = [float(v) for v in np.percentile(finite, [2.5, 97.5])] if finite else None
    return {"a": a.name, "b": b.name, "difference": _pair_difference(pairs), "interval": interval}


def _pair_difference(pairs: Sequence[tuple[PromptRecord, PromptRecord]]) -> float:
    return acceptance_length([a for a, _ in pairs]) - acceptance_length([b for _, b in pairs])


def _sum_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    length = max((len(values) for values in lists), default=0)
    return [sum(v[i] for v in lists if i < len(v)) for i in range(length)]


def _speed(tokens: int | None, seconds: float | None) -> float:
    return tokens / seconds if tokens and seconds else float("nan")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _median(values: Sequence[float]) -> float:
    finite = [v for v in values if np.isfinite(v)]
    return float(np.median(finite)) if finite else float("nan")
