"""Draft models in the real training command."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.base import load_drafter
from heads.draft_model import DraftModel
from tests.train.runs import (
    ROOT,
    Recipes,
    assert_close,
    launcher,
    records,
    run_training,
    train_here,
    trajectory,
)
from train.snapshots import Snapshots

KIND = "draft_model"
STUDENT = {"student": {"layers": 2}}


def drafter_of(output: Path) -> DraftModel:
    drafter = load_drafter(output / "best").drafter
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize(
    "loss",
    [
        {"terms": {"forward_kl": 1.0, "smooth_l1": 1.0}},
        {"terms": {"reverse_kl": 1.0}, "temperature": 2.0},
        {"terms": {"lk_hybrid": 1.0}},
        {"terms": {"ce": 1.0}},
    ],
    ids=["states", "reverse", "hybrid", "ce"],
)
def test_a_cut_student_learns(loss: dict[str, Any], recipes: Recipes) -> None:
    path = recipes(drafter=STUDENT, loss=loss, stop={"max_steps": 16}, eval__eval_every=16)
    output = train_here(path, kind=KIND)
    losses = [record["loss"] for record in records(output, "train")]
    assert sum(losses[-4:]) < sum(losses[:4])
    (evaluation,) = records(output, "eval")
    rates = evaluation["accuracies_HK"]
    assert len(rates) > 1 and all(row == rates[0] for row in rates)
    assert evaluation["tau"] >= 1
    assert json.loads((output / "best" / "config.json").read_text())["kind"] == KIND
    assert drafter_of(output).num_layers == 2


def test_hidden_states_of_a_model_from_elsewhere_are_not_matched(
    recipes: Recipes, tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipes(
        drafter={"student": {"model": str(tiny_target_folder)}},
        loss={"terms": {"smooth_l1": 1.0, "ce": 1.0}},
    )
    with pytest.raises(SystemExit) as caught:
        train_here(path, kind=KIND)
    assert caught.value.code == 2
    assert "predicts no features" in capsys.readouterr().err


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_and_resumed(path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that dies after its snapshot of step `after`, and the same command again."""
    save = Snapshots.save

    def save_and_die(self: Snapshots, step: int, state: dict[str, Any]) -> None:
        save(self, step, state)
        if step == after:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "save", save_and_die)
        with pytest.raises(Killed):
            train_here(path, kind=KIND)
    return train_here(path, kind=KIND)


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit."""
    assert trajectory(a) == trajectory(b)
    left, right = (load_file(run / "last" / "model.safetensors") for run in (a, b))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_resumed_run_is_the_uninterrupted_one(
    recipes: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_here(recipes("whole", drafter=STUDENT), kind=KIND)
    parts = killed_and_resumed(recipes("parts", drafter=STUDENT), 4, monkeypatch)
    assert_same_run(whole, parts)


@pytest.mark.parametrize(("engine", "embedding"), [("ddp", "own"), ("zero3", "shared")])
def test_two_processes_are_one_run(engine: str, embedding: str, recipes: Recipes) -> None:
    """With an embedding of its own, which is read as tokens go in and as logits come out."""
    changes: dict[str, Any] = {
        "drafter": STUDENT | {"embedding": embedding},
        "loss": {"terms": {"forward_kl": 1.0}},
        "stop": {"max_steps": 4},
    }
    optimizer = {"lr": 0.001, "micro_batch": 1}
    one = recipes("alone", optimizer=optimizer | {"accumulation": 4}, **changes)
    alone = train_here(one, kind=KIND)
    pair = recipes("pair", optimizer=optimizer | {"accumulation": 2}, **changes)
    os.symlink(ROOT / "configs", pair.parent / "configs")
    done = run_training(pair, launcher=launcher(engine), kind=KIND)
    assert done.returncode == 0, done.stderr
    assert_close(pair.with_suffix(""), alone)


def test_an_embedding_of_its_own_is_refused_under_zero3(recipes: Recipes) -> None:
    own = STUDENT | {"embedding": "own"}
    pair = recipes("pair", drafter=own, loss={"terms": {"forward_kl": 1.0}}, stop={"max_steps": 1})
    os.symlink(ROOT / "configs", pair.parent / "configs")
    done = run_training(pair, launcher=launcher("zero3"), kind=KIND)
    assert done.returncode != 0
    assert "launch with DDP or ZeRO-2" in done.stderr


ON_POLICY = {"share": 0.6, "max_new_tokens": 6, "every": 3}
TAUGHT = {"terms": {"forward_kl": 1.0}}


def test_on_policy_resumes_bit_for_bit_in_the_middle_of_what_was_written(
    recipes: Recipes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"drafter": STUDENT, "loss": TAUGHT, "data__on_policy": ON_POLICY}
    whole = train_here(recipes("whole", **changes), kind=KIND)
    assert "responses written by the drafter" in capsys.readouterr().out
    parts = killed_and_resumed(recipes("parts", **changes), 4, monkeypatch)
    assert_same_run(whole, parts)
    off = train_here(recipes("off", drafter=STUDENT, loss=TAUGHT), kind=KIND)
    assert trajectory(off) != trajectory(whole)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", {"loss": TAUGHT}, "cannot write a text by itself"),
        (KIND, {"drafter": STUDENT}, "would teach the drafter its own tokens"),
    ],
)
def test_on_policy_that_makes_no_sense_is_refused(
    kind: str,
    changes: dict[str, Any],
    message: str,
    recipes: Recipes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_here(recipes(data__on_policy=ON_POLICY, **changes), kind=kind)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
