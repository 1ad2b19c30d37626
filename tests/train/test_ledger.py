"""Conversations whose states hold NaN: left out, named, counted, and too many of them refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.criterion import ChunkedCriterion
from distill.features import FeatureSource, PackedRow, RowStates, _without
from distill.losses import LossSettings
from distill.store import Row, split
from heads.base import Needs, drafter_class
from heads.errors import UserError
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer
from tests.train.runs import (
    Recipes,
    assert_close,
    launcher,
    make_rows,
    records,
    refused,
    run_training,
    train_here,
    trajectory,
    write_store,
)
from train.batches import collate, pack
from train.ledger import Ledger

POISON = 155
"""A token that only the bad conversations hold; its embedding is NaN."""


def rows_with(bad: list[int], num: int = 120) -> list[Row]:
    """Conversations of which some begin with the poison."""
    rows = make_rows(num, 150)
    for number in bad:
        rows[number] = replace(rows[number], tokens=[POISON, *rows[number].tokens[1:]])
    return rows


def save_target(folder: Path, *, sick: bool) -> Path:
    """The tiny target, which never says the poison; a sick one has NaN as its embedding."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[POISON] = 0
        if sick:
            model.get_input_embeddings().weight[POISON] = float("nan")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sick_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("sick"), sick=True)


@pytest.fixture(scope="module")
def healthy_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("healthy"), sick=False)


def recipe_of(
    recipes: Recipes, target: Path, rows: list[Row], name: str = "run", **changes: Any
) -> Path:
    path = recipes(name, **changes)
    store = path.parent / "answers"
    if not store.exists():
        loaded = TargetModel.load(str(target), dtype="float32", device="cpu")
        write_store(store, loaded, rows=rows)
    text = path.read_text()
    for section, value in (("data", str(store)), ("target", str(target))):
        key = {"data": "  path: ", "target": "  name: "}[section]
        line = next(line for line in text.splitlines() if line.startswith(key))
        text = text.replace(line, key + value)
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_dropped_conversation_leaves_the_loss_and_gradients_of_the_others(kind: str) -> None:
    healthy = TargetModel(tiny_model(), tiny_tokenizer(), "tiny")
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    sick = TargetModel(model, tiny_tokenizer(), "tiny")
    rows = rows_with([3], 9)
    results = []
    for target, kept in ((sick, rows), (healthy, rows[:3] + rows[4:])):
        cls = drafter_class(kind)
        drafter = cls.create(cls.Config(kind=kind), healthy.identity, healthy.shared)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(5))
        needs = Needs(final_hidden=True, captured_layers=drafter.needs.captured_layers)
        features = FeatureSource(target, needs, 1.0)
        states = [features.states(row) for row in pack(kept, 80, 0).rows]
        batch = collate(states, healthy.device)
        assert "c3" not in batch.rows and len(batch.rows) == 8
        steps = drafter(batch, ChunkedCriterion(batch, LossSettings(), healthy.shared.lm_head_VD))
        loss = torch.stack([step.loss_sum for step in steps]).sum()
        loss.backward()
        supervised = sum(state.row.num_supervised for state in states)
        assert supervised == int(steps[0].num_positions)
        results.append([loss.detach(), *(p.grad for p in drafter.parameters())])
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_run_goes_on_without_it_bit_for_bit_and_says_so(
    recipes: Recipes,
    sick_target: Path,
    healthy_target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"stop": {"max_epochs": 1}, "eval__eval_every": 100}
    rows = rows_with([7])
    sick = train_here(recipe_of(recipes, sick_target, rows, "sick", **changes))
    said = capsys.readouterr().out
    warnings = [line for line in said.splitlines() if line.startswith("warning: c7")]
    assert len(warnings) == 1 and "(1 of 120 conversations so far)" in warnings[0]
    assert "dropped: 1 of 120 conversations" in said
    assert records(sick, "train")[-1]["dropped"] == records(sick, "eval")[-1]["dropped"] == 1
    assert json.loads((sick / "summary.json").read_text())["dropped"] == ["c7"]
    compute = FeatureSource._compute

    def without_it(self: FeatureSource, row: PackedRow) -> RowStates:
        states = compute(self, row)
        bad = {row.ids.index("c7") + 1} if "c7" in row.ids else set()
        return _without(row, bad, states.hidden_TD, states.captured_TAD)

    monkeypatch.setattr(FeatureSource, "_compute", without_it)
    healthy = train_here(recipe_of(recipes, healthy_target, rows, "healthy", **changes))
    assert trajectory(sick) == trajectory(healthy)
    assert len({record["loss"] for record in records(sick, "train")}) > 2


def test_resumed_run_drops_the_same_and_names_it_once(
    recipes: Recipes, sick_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_of(recipes, sick_target, rows_with([7]), stop={"max_epochs": 1})
    output = train_here(path)
    before = [(r["dropped"], *row) for r, row in zip_train(output)]
    assert before[-1][0] == 1
    (output / "summary.json").unlink()
    *_, earlier, newest = sorted((output / "snapshots").iterdir())
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    state = json.loads((earlier / "state.json").read_text())
    capsys.readouterr()
    train_here(path)
    assert [(r["dropped"], *row) for r, row in zip_train(output)] == before
    assert ("warning: c7" in capsys.readouterr().out) == (state["dropped"] == [])
    assert json.loads((output / "summary.json").read_text())["dropped"] == ["c7"]


def zip_train(output: Path) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    return list(zip(records(output, "train"), trajectory(output), strict=True))


def test_two_processes_drop_the_same(recipes: Recipes, sick_target: Path) -> None:
    rows, optimizer = rows_with([7]), {"lr": 0.01, "micro_batch": 1}
    changes = {"stop": {"max_epochs": 1}, "eval__eval_every": 100}
    alone = train_here(
        recipe_of(
            recipes,
            sick_target,
            rows,
            "alone",
            optimizer=optimizer | {"accumulation": 4},
            **changes,
        )
    )
    pair = recipe_of(
        recipes, sick_target, rows, "pair", optimizer=optimizer | {"accumulation": 2}, **changes
    )
    os.symlink(Path(__file__).resolve().parents[2] / "configs", pair.parent / "configs")
    done = run_training(pair, launcher=launcher("ddp"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: c7") == 1
    output = pair.with_suffix("")
    assert_close(output, alone)
    dropped = [[r["dropped"] for r in records(run, "train")] for run in (output, alone)]
    assert dropped[0] == dropped[1] and dropped[0][-1] == 1


def test_held_out_conversation_is_dropped_too(recipes: Recipes, sick_target: Path) -> None:
    rows = rows_with([])
    held_out = split(rows, 0.2, 0)[1][0]
    number = rows.index(held_out)
    path = recipe_of(recipes, sick_target, rows_with([number]), stop={"max_steps": 1})
    output = train_here(path)
    assert json.loads((output / "summary.json").read_text())["dropped"] == [held_out.id]
    assert torch.isfinite(torch.tensor(records(output, "eval")[-1]["val_losses"])).all()


def test_more_than_one_in_a_hundred_stops_the_run(
    recipes: Recipes, sick_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_of(
        recipes, sick_target, rows_with([7, 20]), stop={"max_epochs": 1}, eval__eval_every=100
    )
    error = refused(capsys, path)
    assert "states of 2 of 120 conversations hold NaN or infinity, more than 1 %: c20, c7" in error
    assert "target.dtype=float32" in error


def test_ledger_counts_a_conversation_once_and_names_a_few() -> None:
    said: list[str] = []
    ledger = Ledger(100, said.append)
    ledger.enter(["a"])
    ledger.enter(["a"])
    assert len(said) == 1 and ledger.unknown(["b", "a"]) == ["b"]
    with pytest.raises(UserError, match=r"7 of 100 .* a, b, c, d, e, \.\.; run"):
        ledger.enter("bcdefg")
