import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from distill.prompts import load_prompts
from heads.errors import UserError


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return fields | {"messages": [{"role": "user", "content": content}]}


def test_chat_rows_keep_system_and_user_messages_and_drop_answers(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Foreign answer."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": None},
    ]
    row = {"id": "a", "category": "math", "messages": messages}
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", [row]))
    assert (prompt.id, prompt.category) == ("a", "math")
    assert [m["content"] for m in prompt.messages] == ["Be brief.", "One?", "Two?"]
    assert prompt.turns == [2, 3]
    assert prompt.text == "One?\n\nTwo?"


def test_spec_bench_rows_are_turns(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", [row]))
    assert (prompt.id, prompt.category) == ("81", "writing")
    assert prompt.messages == (
        {"role": "user", "content": "Write."},
        {"role": "user", "content": "Rewrite."},
    )


def test_plain_text_is_a_prompt_a_line_with_stable_ids(tmp_path: Path) -> None:
    prompts = load_prompts(write(tmp_path / "p.txt", ["First", "", '{"not": "json"}']))
    assert [(p.id, p.text) for p in prompts] == [("p-1", "First"), ("p-3", '{"not": "json"}')]


def test_limits_apply_in_order(tmp_path: Path) -> None:
    rows = [chat(f"q{i}", id=str(i), category="ab"[i % 2]) for i in range(10)]
    path = write(tmp_path / "p.jsonl", rows)
    assert [p.id for p in load_prompts(path, limit=3)] == ["0", "1", "2"]
    assert [p.id for p in load_prompts(path, per_category=2)] == ["0", "1", "2", "3"]
    assert [p.id for p in load_prompts(path, limit=3, per_category=2)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        (["", "  "], "holds no prompts"),
        ([chat("a"), "{broken"], "line 2 is not JSON"),
        ([chat("a"), "", "[1]"], "line 3 holds list"),
        ([{"prompt": "a"}], "line 1 holds the keys prompt"),
        ([chat("a"), chat("  ")], "line 2 has a user message without content"),
        ([{"messages": []}], "line 1 has no content"),
        ([{"turns": []}], "line 1 has no content"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "line 1 has no user message"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], "of the role 'tool'"),
        ([{"turns": [3]}], "of the role None"),
        ([chat("a", id="x"), chat("b"), chat("c", id="x")], "line 3 has the id 'x' of .*line 1"),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_prompts(write(tmp_path / "p.jsonl", rows))


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such prompt file: .*none\.jsonl"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        load_prompts(tmp_path / "b.jsonl")
    with pytest.raises(UserError, match="cannot be read as text"):
        load_prompts(tmp_path)


@pytest.mark.parametrize(
    ("columns", "suffix", "contents"),
    [
        ({"prompt": ["a", "b"], "category": ["x", "y"]}, "", ["a", "b"]),
        ({"turns": [["a", "c"], ["b"]]}, ":train", ["a\n\nc", "b"]),
        ({"query": ["a", "b"], "prompt": ["c", "d"]}, ":train:query", ["a", "b"]),
        ({"messages": [[{"role": "user", "content": "a"}]] * 2}, "", ["a", "a"]),
    ],
)
def test_a_data_set_gives_prompts_from_its_column(
    monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], suffix: str, contents: list[str]
) -> None:
    rows = datasets.Dataset.from_dict(columns)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    prompts = load_prompts(f"datasets:owner/set{suffix}")
    assert [p.text for p in prompts] == contents
    assert [p.id for p in prompts] == ["set-0", "set-1"]


def test_a_data_set_without_the_column_or_that_fails_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = datasets.Dataset.from_dict({"score": [1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    with pytest.raises(UserError, match="has the columns score; expected messages or turns"):
        load_prompts("datasets:owner/set")

    def fail(name: str, split: str) -> None:
        raise datasets.exceptions.DatasetNotFoundError("no such data set\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"'owner/set', split 'test', .* no such data set;"):
        load_prompts("datasets:owner/set:test")
