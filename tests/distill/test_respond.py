import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.chat import prompt_ids
from distill.respond import RespondConfig, respond
from distill.store import Row, open_store
from heads.errors import UserError
from heads.schema import parse
from infer.target import TargetModel

ROOT = Path(__file__).parents[2]


def quiet(line: str) -> None:
    """Say nothing."""


def prompt_file(path: Path, count: int = 10) -> Path:
    rows = [{"id": f"r{i}", "turns": [f"What is {'very ' * (i % 4)}{i}?"]} for i in range(count)]
    rows[1]["turns"] = ["First?", "Second?", "Third?"]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config(folder: Path, **changes: Any) -> RespondConfig:
    base = {
        "target": "tiny",
        "dtype": "float32",
        "output": str(folder / "data"),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": 24,
        "batch_size": 4,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    return parse(RespondConfig, base | changes, "test")


def rows_of(folder: Path) -> list[Row]:
    return open_store(folder).rows()


def shards_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "shards").iterdir())}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prompt_file(tmp_path / "prompts.jsonl")
    return tmp_path


def test_every_prompt_gets_a_row_with_the_answer_masked(
    folder: Path, tiny_target: TargetModel
) -> None:
    data = respond(config(folder), tiny_target, quiet)
    rows = {row.id: row for row in rows_of(data)}
    assert sorted(rows) == sorted(f"r{i}" for i in range(10))
    row = rows["r2"]
    prompt = prompt_ids(tiny_target.tokenizer, [{"role": "user", "content": row.prompt}])
    assert row.tokens[: len(prompt)] == prompt
    assert row.loss_mask == [False] * len(prompt) + [True] * (len(row.tokens) - len(prompt))
    assert row.finished == (row.tokens[-1] in tiny_target.end_tokens)


def test_the_manifest_tells_where_the_data_come_from(
    folder: Path, tiny_target: TargetModel
) -> None:
    manifest = open_store(respond(config(folder, seed=5), tiny_target, quiet)).manifest
    assert manifest.target == tiny_target.identity
    assert manifest.complete
    assert (manifest.settings["seed"], manifest.settings["temperature"]) == (5, 1.0)
    assert len(manifest.source.sha256) == 64
    assert manifest.counts.rows == 10
    assert manifest.counts.response_tokens > 100


def test_several_turns_are_answered_one_after_another(
    folder: Path, tiny_target: TargetModel
) -> None:
    data = respond(config(folder, temperature=0.0), tiny_target, quiet)
    (row,) = [row for row in rows_of(data) if row.id == "r1"]
    text = tiny_target.tokenizer.decode(row.tokens)
    assert row.turns == 3
    assert [q in text for q in ("First?", "Second?", "Third?")] == [True] * 3
    assert text.count("<|im_start|>assistant\n") == 3
    starts = [i for i in range(1, len(row.tokens)) if row.loss_mask[i] and not row.loss_mask[i - 1]]
    assert len(starts) == 3
    # The last answer is what the target says after everything before it.
    ids = row.tokens[: starts[-1]]
    again = respond_alone(tiny_target, ids, len(row.tokens) - len(ids))
    assert row.tokens[starts[-1] :] == again


def respond_alone(target: TargetModel, ids: list[int], count: int) -> list[int]:
    from distill.respond import batched_generate
    from infer.sampling import Sampling

    return batched_generate(target, [ids], count, Sampling(), [0])[0]


def test_a_row_does_not_depend_on_its_batch(folder: Path, tiny_target: TargetModel) -> None:
    first = rows_of(respond(config(folder), tiny_target, quiet))
    other = config(folder, output=str(folder / "other"), batch_size=1)
    key = {row.id: row for row in rows_of(respond(other, tiny_target, quiet))}
    assert all(key[row.id] == row for row in first)


@pytest.mark.parametrize("stop_at", [0, 1, 2, 4, 5])
def test_a_run_stopped_at_any_write_ends_with_the_same_bytes(
    folder: Path, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    whole = respond(config(folder, output=str(folder / "whole")), tiny_target, quiet)
    writes = 0

    def replace(source: Path, destination: Path, move: Callable[..., None] = os.replace) -> None:
        nonlocal writes
        if writes == stop_at:
            raise KeyboardInterrupt
        writes += 1
        move(source, destination)

    monkeypatch.setattr("heads.files.os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        respond(config(folder), tiny_target, quiet)
    monkeypatch.undo()
    data = respond(config(folder), tiny_target, quiet)
    assert shards_of(data) == shards_of(whole)
    assert open_store(data).manifest.counts == open_store(whole).manifest.counts
    assert open_store(data).complete


def test_a_killed_process_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, tiny_target_folder: Path, tiny_target: TargetModel
) -> None:
    prompt_file(tmp_path / "prompts.jsonl", 40)
    settings = config(tmp_path, target=str(tiny_target_folder), batch_size=2)
    (tmp_path / "config.json").write_text(settings.model_dump_json())
    code = (
        "import sys; from distill.respond import *; text = open(sys.argv[1]).read();"
        "respond(RespondConfig.model_validate_json(text))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "config.json")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    shards = settings.output / "shards"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if shards.is_dir() and len(list(shards.glob("*.parquet"))) >= 3:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 3 <= len(shards_of(settings.output)) < 20
    assert not open_store(settings.output).complete
    whole = respond(settings.model_copy(update={"output": tmp_path / "whole"}), tiny_target, quiet)
    data = respond(settings, tiny_target, quiet)
    assert shards_of(data) == shards_of(whole)


def test_a_time_budget_stops_cleanly_and_a_second_call_goes_on(
    folder: Path, tiny_target: TargetModel
) -> None:
    lines: list[str] = []
    short = config(folder, max_minutes=1e-9)
    data = respond(short, tiny_target, lines.append)
    manifest = open_store(data).manifest
    assert (manifest.complete, manifest.stopped) == (False, "max_minutes")
    assert 0 < manifest.counts.rows < 10
    assert "stopped by max_minutes" in lines[-1]
    respond(config(folder), tiny_target, quiet)
    whole = respond(config(folder, output=str(folder / "whole")), tiny_target, quiet)
    assert shards_of(data) == shards_of(whole)


def test_a_token_budget_ends_after_the_batch_that_reaches_it(
    folder: Path, tiny_target: TargetModel
) -> None:
    data = respond(config(folder, max_tokens=30), tiny_target, quiet)
    assert open_store(data).complete
    assert len(shards_of(data)) == 1
    assert open_store(data).manifest.counts.response_tokens >= 30


def test_a_finished_folder_is_left_alone(folder: Path, tiny_target: TargetModel) -> None:
    respond(config(folder), tiny_target, quiet)
    lines: list[str] = []
    # Without a target: it would fail to load one named tiny.
    data = respond(config(folder, max_minutes=3.0), None, lines.append)
    assert "is finished: 10 rows; nothing to do" in lines[0]
    assert len(rows_of(data)) == 10


def test_a_removed_shard_is_written_anew(folder: Path, tiny_target: TargetModel) -> None:
    data = respond(config(folder), tiny_target, quiet)
    before = shards_of(data)
    (data / "shards" / "00001.parquet").unlink()
    with pytest.raises(UserError, match="shards are missing"):
        open_store(data)
    respond(config(folder), tiny_target, quiet)
    assert shards_of(data) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "temperature 1.0, now 0.5"),
        ({"batch_size": 2}, "batch_size 4, now 2"),
        ({"seed": 1, "max_new_tokens": 3}, "max_new_tokens 24, now 3; seed 0, now 1"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_for_a_folder_with_data_are_refused(
    folder: Path,
    tiny_target: TargetModel,
    changes: dict[str, Any],
    message: str,
    finished: bool,
) -> None:
    limit = {} if finished else {"max_minutes": 1e-9}
    data = respond(config(folder, **limit), tiny_target, quiet)
    before = shards_of(data)
    with pytest.raises(UserError, match=message):
        respond(config(folder, **changes), tiny_target, quiet)
    assert shards_of(data) == before


def test_other_prompts_or_another_target_are_refused(
    folder: Path, tiny_target: TargetModel, make_model: Callable[..., Any]
) -> None:
    respond(config(folder), tiny_target, quiet)
    other = TargetModel(make_model(seed=1), tiny_target.tokenizer, "tiny")
    with pytest.raises(UserError, match="target weights_hash"):
        respond(config(folder), other, quiet)
    prompt_file(folder / "prompts.jsonl", 11)
    with pytest.raises(UserError, match=r"now .* with other contents"):
        respond(config(folder), None, quiet)


def test_a_folder_of_something_else_is_refused(folder: Path, tiny_target: TargetModel) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is no data set of outrider respond"):
        respond(config(folder), tiny_target, quiet)
    assert [p.name for p in (folder / "data").iterdir()] == ["notes.txt"]


def test_two_runs_at_once_are_refused(folder: Path, tiny_target: TargetModel) -> None:
    messages = []

    def again(line: str) -> None:
        if not messages:
            with pytest.raises(UserError) as caught:
                respond(config(folder), tiny_target, quiet)
            messages.append(str(caught.value))

    respond(config(folder), tiny_target, again)
    assert "another outrider respond is writing" in messages[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 30}, r"the prompt 'r\d' of .* tokens long; expected fewer than 30"),
        ({"max_length": 5000}, "has a context of 512 tokens"),
        ({"prompts": "none.jsonl"}, "no such prompt file"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_written(
    folder: Path, tiny_target: TargetModel, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        respond(config(folder, **changes), tiny_target, quiet)
    assert not (folder / "data").exists()


def test_a_target_without_a_template_is_refused(
    folder: Path, tiny_target: TargetModel, make_tokenizer: Callable[..., Any]
) -> None:
    bare = TargetModel(tiny_target.model, make_tokenizer(None), "bare")
    with pytest.raises(UserError, match="has no chat template"):
        respond(config(folder), bare, quiet)
    assert not (folder / "data").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"self_prompt": {"count": 3}}, "either prompts or self_prompt, both were given"),
        ({"prompts": None}, "either prompts or self_prompt, neither was given"),
        ({"temperature": -1}, "temperature -1"),
        ({"batch_sise": 3}, "did you mean 'batch_size'"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config(folder, **changes)


def test_a_conversation_ends_where_the_next_turn_does_not_fit(
    folder: Path, tiny_target: TargetModel
) -> None:
    data = respond(config(folder, max_length=75, max_new_tokens=20), tiny_target, quiet)
    row = next(row for row in rows_of(data) if row.id == "r1")
    assert row.turns == 1
    assert all(len(row.tokens) <= 75 for row in rows_of(data))
