import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from distill.store import (
    Counts,
    Manifest,
    PromptSource,
    Row,
    open_store,
    shard_path,
    split,
    write_manifest,
    write_shard,
)
from heads.errors import UserError
from infer.target import TargetModel


def row(name: str, prompt: str = "", **changes: object) -> Row:
    base = Row(name, "math", [1, 85, 40, 2], [False, False, True, True], 1, True, prompt or name)
    return replace(base, **changes)  # type: ignore[arg-type]


def store_of(folder: Path, target: TargetModel, shards: list[list[Row]]) -> Path:
    for index, rows in enumerate(shards):
        write_shard(shard_path(folder, f"{index:05d}"), rows)
    source = PromptSource(kind="prompts", name="p.jsonl", sha256="0" * 64)
    counts = Counts(rows=sum(map(len, shards)))
    manifest = Manifest(
        target=target.identity, source=source, settings={}, created="now", counts=counts
    )
    write_manifest(folder, manifest)
    return folder


def test_rows_come_back_as_they_were_written(tmp_path: Path, tiny_target: TargetModel) -> None:
    rows = [row("a", finished=False), row("b", "Schön?\n\n日本", turns=2), row("c")]
    store = open_store(store_of(tmp_path / "d", tiny_target, [rows[:2], rows[2:]]))
    assert store.rows() == rows
    assert len(store) == 3
    assert store.identity == tiny_target.identity
    assert not store.complete


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [False] * 4}, "row 'bad' .prompt 'What is it.* has an empty loss mask"),
        ({"loss_mask": [True] * 3}, "has 4 tokens and a loss mask of 3"),
        ({"tokens": [1, 2, 3, 160]}, "token ids from 1 to 160; the target has 0 to 159"),
        ({"tokens": [-1, 2, 3, 4]}, "token ids from -1"),
    ],
)
def test_a_row_that_cannot_be_learned_is_shown(
    tmp_path: Path, tiny_target: TargetModel, changes: dict[str, object], message: str
) -> None:
    bad = row("bad", "What is it?", **changes)
    store = open_store(store_of(tmp_path / "d", tiny_target, [[row("good"), bad]]))
    with pytest.raises(UserError, match=message):
        store.rows()


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"is not a data set: no manifest\.json"):
            open_store(folder)
    folder = store_of(tmp_path / "d", tiny_target, [[row("a")]])
    whole = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(whole[:100])
    with pytest.raises(UserError, match="is not a data set's manifest"):
        open_store(folder)
    (folder / "manifest.json").write_text(json.dumps(json.loads(whole) | {"format": 99}))
    with pytest.raises(UserError, match="format 99, this version reads 1"):
        open_store(folder)


def test_missing_broken_and_no_shards_are_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    folder = store_of(tmp_path / "d", tiny_target, [[row("a")], [row("b")]])
    shard_path(folder, "00001").unlink()
    with pytest.raises(UserError, match="holds 1 rows where its manifest counts 2"):
        open_store(folder)
    shard_path(folder, "00000").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"00000\.parquet cannot be read"):
        open_store(folder)
    shutil.rmtree(folder / "shards")
    with pytest.raises(UserError, match="shards are missing"):
        open_store(folder)
    with pytest.raises(UserError, match="holds no rows yet"):
        open_store(store_of(tmp_path / "empty", tiny_target, []))


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(table: object, path: Path, **options: object) -> None:
        path.write_bytes(b"PAR1 and then")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("distill.store.pq.write_table", fail)
    with pytest.raises(UserError, match=r"could not write .*00000\.parquet: .*No space left"):
        write_shard(shard_path(tmp_path, "00000"), [row("a")])
    assert list((tmp_path / "shards").iterdir()) == []


def test_train_and_validation_never_share_a_prompt() -> None:
    rows = [row(f"{i}-{copy}", f"Question {i}{'?' * copy}") for i in range(200) for copy in (0, 1)]
    train, held_out = split(rows, 0.2, seed=1)
    assert len(train) + len(held_out) == 400
    assert 40 < len(held_out) < 130
    prompts = [{r.prompt.strip("?").lower() for r in side} for side in (train, held_out)]
    assert not prompts[0] & prompts[1]


def test_the_split_depends_on_seed_and_prompt_alone() -> None:
    rows = [row(str(i), f"Question {i}") for i in range(100)]
    held_out = {r.id for r in split(rows, 0.2, seed=1)[1]}
    assert {r.id for r in split(rows[::-1], 0.2, seed=1)[1]} == held_out
    assert {r.id for r in split(rows[:60], 0.2, seed=1)[1]} == held_out & {r.id for r in rows[:60]}
    assert {r.id for r in split(rows, 0.2, seed=2)[1]} != held_out


def test_no_side_of_the_split_is_empty_unless_asked_for() -> None:
    rows = [row(str(i), f"Question {i}") for i in range(4)]
    for share in (0.001, 0.999):
        assert all(split(rows, share))
    assert split(rows, 0.0) == (rows, [])
