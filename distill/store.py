"""The data set on disk: token ids, loss masks and where they come from.

    manifest.json          format, target, prompt source, settings, counts, whether it is complete
    shards/00000.parquet   id, category, tokens, loss_mask, turns, finished, prompt

A shard is one batch of responses. Every file is written beside its place and moved there, so that
what exists is whole, whenever the writer was stopped.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import Field

from heads import files
from heads.base import TargetIdentity
from heads.errors import UserError
from heads.schema import Strict, parse

FORMAT = 1
MANIFEST = "manifest.json"
SHARDS = "shards"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("turns", pa.int32()),
        ("finished", pa.bool_()),
        ("prompt", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation as the target wrote it.

    `loss_mask` is true on the tokens that the target generated, end tokens included; `finished`
    says whether every answer ended with one; `prompt` is the user's text.
    """

    id: str
    category: str
    tokens: list[int]
    loss_mask: list[bool]
    turns: int
    finished: bool
    prompt: str


class PromptSource(Strict):
    """Where the prompts come from; `sha256` is over the prompts as they were read."""

    kind: Literal["prompts", "self_prompt"]
    name: str
    sha256: str


class Counts(Strict):
    """What the shards hold, and what was left out of them."""

    rows: int = 0
    turns: int = 0
    tokens: int = 0
    response_tokens: int = 0
    unfinished: int = 0
    degenerate: int = 0
    dropped_empty: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """The counts of both."""
        mine, its = self.model_dump(), other.model_dump()
        return Counts(**{name: mine[name] + its[name] for name in mine})


class Manifest(Strict):
    """The provenance of a data set. `settings` holds all that the data depends on."""

    format: int = FORMAT
    target: TargetIdentity
    source: PromptSource
    settings: dict[str, Any]
    created: str
    counts: Counts = Counts()
    questions: dict[str, int] = Field(default_factory=dict)
    complete: bool = False
    stopped: str | None = None


class Store:
    """A data set that is there; its rows are read and checked by `rows`."""

    def __init__(self, path: Path, manifest: Manifest, shards: Sequence[Path]) -> None:
        self.path, self.manifest, self.shards = path, manifest, list(shards)

    @property
    def identity(self) -> TargetIdentity:
        """The target that wrote the responses."""
        return self.manifest.target

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is there."""
        return self.manifest.complete

    def __len__(self) -> int:
        """How many rows there are."""
        return sum(rows_in(shard) for shard in self.shards)

    def rows(self) -> list[Row]:
        """Every row, in the order of the shards.

        Raises UserError for a row whose mask is empty or of another length, or with token ids
        that the target does not have.
        """
        rows = [row for shard in self.shards for row in read_shard(shard)]
        for row in rows:
            check_row(row, self.identity.vocab_size)
        return rows


def open_store(path: str | Path) -> Store:
    """The data set in a folder, complete or not.

    Raises UserError when there is none, it is of another format, or shards are missing.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest is None:
        raise UserError(
            f"{path} is not a data set: no {MANIFEST} in it; expected a folder written by "
            "outrider respond"
        )
    store = Store(path, manifest, shard_files(path))
    found = len(store)
    if found < manifest.counts.rows:
        raise UserError(
            f"{path} holds {found} rows where its manifest counts {manifest.counts.rows}: shards "
            "are missing; run outrider respond again with the same settings to write them anew"
        )
    if not found:
        raise UserError(f"{path} holds no rows yet; run outrider respond until it has written some")
    return store


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a folder, or None when it has none."""
    file = path / MANIFEST
    try:
        data = json.loads(file.read_text())
        form = data["format"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a data set's manifest: {error!r}") from None
    if form != FORMAT:
        raise UserError(f"{path}: data set format {form}, this version reads {FORMAT}")
    return parse(Manifest, data, str(file))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Put the manifest into a folder."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2) + "\n"
    write_whole(path / MANIFEST, lambda file: file.write_text(text))


def shard_files(path: Path) -> list[Path]:
    """The shards that are there, in their order."""
    return sorted((path / SHARDS).glob("*.parquet"))


def shard_path(path: Path, name: str) -> Path:
    """Where the shard of a batch lies."""
    return path / SHARDS / f"{name}.parquet"


def write_shard(file: Path, rows: Iterable[Row], dropped_empty: int = 0) -> None:
    """Write rows as one shard, with how many of its batch were dropped."""
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(Row)}
    for row in rows:
        for name, value in asdict(row).items():
            columns[name].append(value)
    schema = SCHEMA.with_metadata({"dropped_empty": str(dropped_empty)})
    table = pa.table(columns, schema=schema)
    write_whole(file, lambda path: pq.write_table(table, path, compression="zstd"))


def read_shard(file: Path) -> list[Row]:
    """The rows of a shard."""
    table = _reading(file, pq.read_table)
    missing = set(SCHEMA.names) - set(table.column_names)
    if missing:
        raise UserError(f"{file} lacks the columns {', '.join(sorted(missing))}")
    columns = [table.column(field.name).to_pylist() for field in fields(Row)]
    return [Row(*values) for values in zip(*columns, strict=True)]


def rows_in(file: Path) -> int:
    """How many rows a shard holds."""
    return int(_reading(file, pq.read_metadata).num_rows)


def dropped_in(file: Path) -> int:
    """How many rows of a shard's batch were dropped."""
    metadata = _reading(file, pq.read_schema).metadata or {}
    return int(metadata.get(b"dropped_empty", 0))


def check_row(row: Row, vocab_size: int) -> None:
    """Raise UserError for a row that cannot be trained on, showing it."""
    if None in (row.tokens, row.loss_mask, row.prompt) or None in row.tokens:
        raise UserError(
            f"row {row.id!r} holds an empty field or token; remove its shard and run outrider "
            "respond again to write it"
        )
    shown = f"row {row.id!r} (prompt {row.prompt[:120]!r}, tokens {row.tokens[:12]} ..)"
    if len(row.tokens) != len(row.loss_mask):
        raise UserError(
            f"{shown} has {len(row.tokens)} tokens and a loss mask of {len(row.loss_mask)}; "
            "expected one flag a token"
        )
    if not any(row.loss_mask):
        raise UserError(
            f"{shown} has an empty loss mask: nothing of its {len(row.tokens)} tokens would be "
            "learned; expected the assistant's tokens to be marked. Drop the row, or look at the "
            "chat template with outrider audit"
        )
    if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
        raise UserError(
            f"{shown} holds token ids from {min(row.tokens)} to {max(row.tokens)}; the target has "
            f"0 to {vocab_size - 1}: the data were written with another tokenizer"
        )


def split(
    rows: Sequence[Row], validation_share: float, seed: int = 0
) -> tuple[list[Row], list[Row]]:
    """Training and validation rows; rows of one prompt are all on one side.

    The side depends on the seed and the prompt's words alone, so it stays when rows are added.
    With two prompts or more neither side is empty, unless the share is 0.
    """
    places = [_place(row.prompt, seed) for row in rows]
    distinct = sorted(set(places))
    threshold = validation_share
    if validation_share > 0 and len(distinct) > 1:
        threshold = min(max(validation_share, distinct[0]), distinct[-2])
    held_out = [place <= threshold and validation_share > 0 for place in places]
    train = [row for row, out in zip(rows, held_out, strict=True) if not out]
    return train, [row for row, out in zip(rows, held_out, strict=True) if out]


def normalised(text: str) -> str:
    """A text's words in lower case: what makes two prompts the same."""
    return " ".join(re.findall(r"\w+", text.lower())) or text.strip()


def _place(prompt: str, seed: int) -> float:
    """A number in [0, 1) that a prompt has under a seed."""
    digest = hashlib.sha256(f"{seed}\n{normalised(prompt)}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """A file of the store, whole or not at all."""
    advice = "what was written before stays, and the same command goes on from there"
    files.write_whole(file, write, (pa.ArrowException,), advice)


def _reading(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{file} cannot be read: {error}; remove it and run outrider respond again to write it"
        ) from error
