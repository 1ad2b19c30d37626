"""Prompts from files and data sets.

    {"id": "a", "category": "math", "messages": [{"role": "user", "content": ".."}]}   chat
    {"question_id": 81, "category": "writing", "turns": ["..", ".."]}                  Spec-Bench
    What is the capital of France?                                                     plain text
    datasets:HuggingFaceH4/mt_bench_prompts:train:prompt                               a data set

Responses are the target's own, so the assistant messages of a chat row are dropped: its user turns
are answered one after another.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.errors import UserError

DATASETS = "datasets:"
# Columns of a data set that may hold prompts, the first found is taken.
COLUMNS = ("messages", "turns", "conversation", "prompt", "question", "instruction", "text")
EXPECTED = (
    'expected {"messages": [{"role": "user", "content": ..}, ..]} or {"turns": [..]} a line, '
    "or a .txt file with a prompt a line"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """User messages (and system messages) in order; each user message is a turn to be answered."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]

    @property
    def turns(self) -> list[int]:
        """For each turn, how many messages the target has been shown when it answers."""
        return [i + 1 for i, message in enumerate(self.messages) if message["role"] == "user"]

    @property
    def text(self) -> str:
        """The user's messages, one paragraph each."""
        return "\n\n".join(m["content"] for m in self.messages if m["role"] == "user")


def load_prompts(
    source: str | Path, limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """Prompts of a JSONL or text file, or of a `datasets:ID[:split[:column]]`.

    At most `per_category` of each category, then at most `limit`, in their order. Assistant
    messages are dropped. Raises UserError that names the line for what cannot be read.
    """
    if str(source).startswith(DATASETS):
        prompts = _from_dataset(str(source))
    else:
        prompts = _from_file(Path(source))
    if not prompts:
        raise UserError(f"{source} holds no prompts; {EXPECTED}")
    if per_category is not None:
        prompts = list(_first_of_each(prompts, per_category))
    return prompts[:limit]


def _first_of_each(prompts: Iterable[Prompt], per_category: int) -> Iterator[Prompt]:
    taken: dict[str, int] = {}
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= per_category:
            yield prompt


def _from_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"no such prompt file: {path}; {EXPECTED}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}; {EXPECTED}") from None
    numbered = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    plain = path.suffix == ".txt"
    seen: dict[str, str] = {}
    prompts = []
    for number, line in numbered:
        where = f"{path}, line {number}"
        row = {"prompt": line} if plain else _json_row(line, where)
        prompt = _prompt(row, f"{path.stem}-{number}", where)
        _refuse_duplicate(prompt, where, seen)
        prompts.append(prompt)
    return prompts


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): {line[:80]!r}; {EXPECTED}") from None
    if not isinstance(row, dict) or not ("messages" in row or "turns" in row):
        found = f"the keys {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{where} holds {found}; {EXPECTED}")
    return row


def _refuse_duplicate(prompt: Prompt, where: str, seen: dict[str, str]) -> None:
    if prompt.id in seen:
        raise UserError(
            f"{where} has the id {prompt.id!r} of {seen[prompt.id]}; expected a different id a row"
        )
    seen[prompt.id] = where


def _prompt(row: dict[str, Any], default_id: str, where: str, column: str | None = None) -> Prompt:
    """A row of any form as a Prompt; `column` names what holds the content."""
    column = column or next((name for name in COLUMNS if row.get(name)), None)
    content = row.get(column) if column else None
    items = [content] if isinstance(content, str) else content
    if not isinstance(items, list):
        raise UserError(f"{where} has no content; {EXPECTED}")
    messages = [m for item in items if (m := _message(item, where))["role"] != "assistant"]
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where} has no user message; {EXPECTED}")
    while messages[-1]["role"] != "user":
        messages.pop()
    identifier = next((row[k] for k in ("id", "question_id") if row.get(k) is not None), default_id)
    return Prompt(str(identifier), str(row.get("category") or "none"), tuple(messages))


def _message(item: Any, where: str) -> dict[str, str]:
    """A message; plain text is the user's."""
    item = {"role": "user", "content": item} if isinstance(item, str) else item
    role = item.get("role") if isinstance(item, dict) else None
    if role not in ("user", "system", "assistant"):
        raise UserError(
            f"{where} has a message of the role {role!r}; expected user, system or assistant"
        )
    content = item.get("content")
    if role != "assistant" and not (isinstance(content, str) and content.strip()):
        raise UserError(f"{where} has a {role} message without content; {EXPECTED}")
    text = content if isinstance(content, str) else ""
    if text.encode("utf-8", "replace").decode("utf-8") != text:
        raise UserError(f"{where} has a {role} message that is not valid Unicode; {EXPECTED}")
    return {"role": role, "content": text}


def _from_dataset(source: str) -> list[Prompt]:
    name, _, rest = source.removeprefix(DATASETS).partition(":")
    split, _, column = rest.partition(":")
    if not name:
        raise UserError(f"{source!r} names no data set; expected datasets:ID[:SPLIT[:COLUMN]]")
    rows = _load_dataset(name, split or "train")
    available = list(rows.column_names)
    wanted = [column] if column else COLUMNS
    chosen = next((name for name in wanted if name in available), None)
    if chosen is None:
        raise UserError(
            f"{source} has the columns {', '.join(available)}; expected {' or '.join(wanted)}: "
            "name the one with the prompts as datasets:ID:SPLIT:COLUMN"
        )
    stem = name.rsplit("/", 1)[-1]
    prompts, seen = [], dict[str, str]()
    for index, row in enumerate(rows):
        where = f"{source}, row {index}"
        prompt = _prompt(row, f"{stem}-{index}", where, chosen)
        _refuse_duplicate(prompt, where, seen)
        prompts.append(prompt)
    return prompts


def _load_dataset(name: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"data set {name!r}, split {split!r}, could not be loaded: {reason}; "
            "expected an id or a folder that `datasets.load_dataset` takes, as datasets:ID:SPLIT"
        ) from error
