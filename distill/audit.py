"""What is in a data set: rows with the learned part coloured, lengths, overlap with an evaluation.

An evaluation prompt that shares a run of words with the training data measures memory.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from distill.chat import masked_runs
from distill.prompts import Prompt, load_prompts
from distill.store import Row, Store, normalised, open_store
from heads.errors import UserError
from infer.degenerate import is_degenerate, repeated_share
from infer.target import resolve

LEARNED = "bold green"
CONTEXT = "dim"
PERCENTILES = (0, 25, 50, 75, 95, 100)
WORST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Overlap:
    """Evaluation prompts that share a run of `n` words with the data.

    Prompts with fewer words can only be equal to a training prompt; `num_short` counts them.
    `shared` maps the id of each prompt that overlaps to the share of its runs found in the data.
    """

    name: str
    n: int
    num_prompts: int
    num_short: int
    shared: dict[str, float]
    examples: dict[str, str]

    @property
    def share(self) -> float:
        """Share of the evaluation prompts that overlap."""
        return len(self.shared) / self.num_prompts

    @property
    def worst(self) -> list[tuple[str, float, str]]:
        """Id, share and one shared run of words of every prompt that overlaps, worst first."""
        ordered = sorted(self.shared.items(), key=lambda item: (-item[1], item[0]))
        return [(name, share, self.examples[name]) for name, share in ordered]


@dataclass(frozen=True)
class AuditReport:
    """What an audit found. Lengths are in tokens, by percentile."""

    path: Path
    num_rows: int
    complete: bool
    distinct_prompts: int
    num_learned: int
    share_finished: float
    share_loops: float
    share_repeated: float
    prompt_lengths: dict[int, int]
    response_lengths: dict[int, int]
    categories: dict[str, int]
    overlap: Overlap | None
    shown: list[Text]

    def render(self) -> RenderableType:
        """The report for a terminal."""
        parts: list[RenderableType] = [*self.shown, self._figures(), self._lengths()]
        if self.overlap:
            parts.extend(_rendered(self.overlap))
        return Group(*parts)

    def _figures(self) -> Table:
        table = Table("figure", "value", title=Text(str(self.path)))
        state = "" if self.complete else " (not complete)"
        table.add_row("rows", f"{self.num_rows:,}{state}")
        table.add_row("distinct prompts", f"{self.distinct_prompts:,}")
        table.add_row("learned tokens", f"{self.num_learned:,}")
        table.add_row("answers finished", f"{self.share_finished:.1%}")
        table.add_row("answers that end in a loop", f"{self.share_loops:.1%}")
        table.add_row("tokens that repeat a trigram", f"{self.share_repeated:.1%}")
        named = [f"{name} {count:,}" for name, count in self.categories.items()]
        table.add_row("categories", Text(", ".join(named)))
        return table

    def _lengths(self) -> Table:
        columns = ["least", *(f"p{p}" for p in PERCENTILES[1:-1]), "most"]
        table = Table("tokens a row", *columns, title="lengths")
        for name, lengths in (("prompt", self.prompt_lengths), ("response", self.response_lengths)):
            table.add_row(name, *(f"{lengths[p]:,}" for p in PERCENTILES))
        return table


def audit(
    store_path: str | Path,
    evaluation: str | Path | None = None,
    limit: int = 3,
    tokenizer: PreTrainedTokenizerBase | None = None,
    n: int = 13,
) -> AuditReport:
    """Look through a data set; show `limit` rows, and its overlap with an evaluation prompt file.

    `tokenizer`: None loads the one of the target that the data set names.
    """
    if n < 1:
        raise UserError(f"n-grams of {n} words asked for; expected 1 or more (13 is usual)")
    store = open_store(store_path)
    prompts = load_prompts(evaluation) if evaluation is not None else []
    tokenizer = tokenizer or _tokenizer_of(store)
    rows = store.rows()
    overlap = None
    if evaluation is not None:
        overlap = _overlap(prompts, rows, tokenizer, n, str(evaluation))
    return _report(store, rows, tokenizer, limit, overlap)


def _tokenizer_of(store: Store) -> PreTrainedTokenizerBase:
    name = store.identity.name
    try:
        return AutoTokenizer.from_pretrained(resolve(name), revision=store.identity.revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer of the target {name!r}, which wrote {store.path}, could not be loaded: "
            f"{str(error).splitlines()[0]}; bring the target back to that place"
        ) from None


def _report(
    store: Store,
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    overlap: Overlap | None,
) -> AuditReport:
    learned = [sum(row.loss_mask) for row in rows]
    answers = [masked_runs(row.tokens, row.loss_mask)[-1] for row in rows]
    repeated = [repeated_share(*_parts(row)) for row in rows]
    categories: dict[str, int] = {}
    for row in rows:
        categories[row.category] = categories.get(row.category, 0) + 1
    return AuditReport(
        path=store.path,
        num_rows=len(rows),
        complete=store.complete,
        distinct_prompts=len({normalised(row.prompt) for row in rows}),
        num_learned=sum(learned),
        share_finished=sum(row.finished for row in rows) / len(rows),
        share_loops=sum(
            is_degenerate(answer[:-1] if row.finished else answer)
            for row, answer in zip(rows, answers, strict=True)
        )
        / len(rows),
        share_repeated=sum(s * n for s, n in zip(repeated, learned, strict=True)) / sum(learned),
        prompt_lengths=_percentiles([row.loss_mask.index(True) for row in rows]),
        response_lengths=_percentiles(learned),
        categories=dict(sorted(categories.items())),
        overlap=overlap,
        shown=[coloured(row, tokenizer) for row in rows[:limit]],
    )


def _parts(row: Row) -> tuple[list[int], list[int]]:
    """What stands before the first answer, and all learned tokens."""
    first = row.loss_mask.index(True)
    return row.tokens[:first], [t for t, m in zip(row.tokens, row.loss_mask, strict=True) if m]


def _percentiles(values: Sequence[int]) -> dict[int, int]:
    """Nearest-rank percentiles."""
    ordered = sorted(values)
    return {p: ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}


def coloured(row: Row, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A row's text as the model sees it, with what is learned coloured."""
    mark = "finished" if row.finished else "cut off"
    text = Text(f"\n{row.id} | {row.category} | {row.turns} turn(s) | {mark}\n", style="bold")
    start = 0
    for end in range(1, len(row.tokens) + 1):
        if end == len(row.tokens) or row.loss_mask[end] != row.loss_mask[start]:
            piece = str(tokenizer.decode(row.tokens[start:end], clean_up_tokenization_spaces=False))
            text.append(piece, style=LEARNED if row.loss_mask[start] else CONTEXT)
            start = end
    return text


def _overlap(
    prompts: Sequence[Prompt],
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    name: str,
) -> Overlap:
    """Runs of words are taken from the evaluation, so memory does not grow with the data."""
    wanted: dict[str, set[str]] = {}
    short = {p.id: normalised(p.text) for p in prompts if len(_words(p.text)) < n}
    for prompt in prompts:
        wanted[prompt.id] = set(_ngrams(prompt.text, n))
    everything = set[str]().union(*wanted.values())
    found: set[str] = set()
    asked: set[str] = set()
    for row in rows:
        asked.add(normalised(row.prompt))
        answer = str(tokenizer.decode(_parts(row)[1], skip_special_tokens=True))
        for text in (row.prompt, answer):
            found.update(gram for gram in _ngrams(text, n) if gram in everything)
    shared, examples = {}, {}
    for name_, grams in wanted.items():
        common = grams & found
        if common:
            shared[name_], examples[name_] = len(common) / len(grams), min(common)
        elif short.get(name_) in asked:
            shared[name_], examples[name_] = 1.0, short[name_]
    return Overlap(name, n, len(prompts), len(short), shared, examples)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(text: str, n: int) -> Iterable[str]:
    words = _words(text)
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


def _rendered(overlap: Overlap) -> list[RenderableType]:
    """The overlap in a sentence, and the worst of it in a table."""
    sentence = (
        f"\n{len(overlap.shared):,} of {overlap.num_prompts:,} prompts of {overlap.name} "
        f"({overlap.share:.1%}) share {overlap.n} words in a row with the data"
    )
    if overlap.num_short:
        sentence += f"; {overlap.num_short:,} are shorter and were compared as a whole"
    if not overlap.shared:
        return [Text(sentence)]
    table = Table("prompt", "runs shared", "for example")
    for name, share, example in overlap.worst[:WORST_SHOWN]:
        table.add_row(Text(name), f"{share:.0%}", Text(example[:100]))
    return [Text(sentence), table]
