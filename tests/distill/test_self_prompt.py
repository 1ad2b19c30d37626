from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.respond import RespondConfig, respond
from distill.self_prompt import QuestionRound, SelfPromptConfig, write_questions
from distill.store import normalised, open_store
from heads.errors import UserError
from heads.schema import parse
from infer.target import TargetModel

Respond = Callable[..., Path]


def config(output: Path, **changes: Any) -> RespondConfig:
    base = {
        "target": "tiny",
        "dtype": "float32",
        "output": str(output),
        "self_prompt": {"count": 10, "max_question_tokens": 60},
        "max_new_tokens": 16,
        "batch_size": 4,
    }
    return parse(RespondConfig, base | changes, "test")


def quiet(line: str) -> None:
    """Say nothing."""


def test_the_target_asks_and_answers_itself(tmp_path: Path, tiny_target: TargetModel) -> None:
    store = open_store(respond(config(tmp_path / "d"), tiny_target, quiet))
    rows = store.rows()
    assert store.complete
    assert len(rows) + store.manifest.counts.dropped_empty == 10
    assert len({normalised(row.prompt) for row in rows}) == len(rows)
    assert store.manifest.source.kind == "self_prompt"
    counted = store.manifest.questions
    assert counted["kept"] == 10
    assert counted["no_end"] > 0
    for row in rows:
        text = tiny_target.tokenizer.decode(row.tokens)
        opening = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
        assert text.startswith(f"{opening}{row.prompt}<|im_end|>\n<|im_start|>assistant\n")
        assert "<|" not in row.prompt


def test_a_self_prompted_run_that_was_stopped_ends_with_the_same_rows(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    whole = open_store(respond(config(tmp_path / "whole"), tiny_target, quiet))
    short = config(tmp_path / "d", max_minutes=1e-9)
    calls = 1
    while not open_store(respond(short, tiny_target, quiet)).complete:
        calls += 1
    assert calls > 2
    data = short.output
    assert open_store(data).rows() == whole.rows()
    assert open_store(data).manifest.questions == whole.manifest.questions


def test_questions_depend_on_the_seeds(tiny_target: TargetModel) -> None:
    settings = SelfPromptConfig(count=10, max_question_tokens=60)
    first = write_questions(tiny_target, settings, range(12))
    assert first == write_questions(tiny_target, settings, range(12))
    assert first.texts != write_questions(tiny_target, settings, range(12, 24)).texts
    assert len(first.texts) + sum(first.dropped.values()) == first.written == 12


@pytest.mark.parametrize(
    ("generated", "reason"),
    [
        ([40, 41, 42, 43, 44, 45, 46, 47, 48], "no_end"),
        ([40, 41, 42, 1, 44, 45, 46, 47, 48, 2], "special_tokens"),
        ([40, 41, 2], "too_short"),
        ([40, 41, 42] * 10 + [2], "loop"),
    ],
)
def test_broken_questions_are_dropped_and_counted(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch, generated: list[int], reason: str
) -> None:
    fine = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 2]
    monkeypatch.setattr("distill.self_prompt.batched_generate", lambda *given: [fine, generated])
    questions = write_questions(tiny_target, SelfPromptConfig(count=2), [0, 1])
    assert questions.texts == (tiny_target.tokenizer.decode(fine[:-1]),)
    assert questions.dropped == {reason: 1}


def test_a_target_that_asks_nothing_new_is_given_up(
    tmp_path: Path, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = QuestionRound(texts=("The same one?",), written=16, dropped={"no_end": 15})
    monkeypatch.setattr("distill.writer.write_questions", lambda *given: same)
    with pytest.raises(UserError, match=r"of the last 208 questions .* 1 were usable and new"):
        respond(config(tmp_path / "d"), tiny_target, quiet)


def test_questions_that_leave_no_room_for_answers_are_refused(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    crowded = config(tmp_path / "d", self_prompt={"count": 1, "max_question_tokens": 500})
    with pytest.raises(UserError, match="leaves no room for an answer"):
        respond(crowded, tiny_target, quiet)
    assert not (tmp_path / "d").exists()
