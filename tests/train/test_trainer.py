"""The trainer: what it leaves, what it refuses, and that resumed and split runs are the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.base import load_drafter
from infer.target import TargetModel
from tests.train.runs import Recipes, records, refused, train_here, trajectory
from train.engine import Engine, Forward
from train.snapshots import Snapshots


class Killed(BaseException):
    """Stands for the end of the process."""


def tensors_of(output: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(output / name / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit."""
    assert trajectory(a) == trajectory(b)
    for name in ("best", "last"):
        left, right = tensors_of(a, name), tensors_of(b, name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_run_leaves_a_drafter_that_loads_with_contract_and_calibration(
    recipes: Recipes, tiny_target_folder: Path
) -> None:
    output = train_here(recipes(stop={"max_steps": 40}, eval__eval_every=20))
    target = TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")
    best, last = (load_drafter(output / name) for name in ("best", "last"))
    assert last.contract.target == target.identity
    assert last.calibration["step"] == 40
    assert len(last.calibration["accuracies_HK"]) == 2
    assert len(last.calibration["accuracies_HK"][0]) == 10
    evaluations = records(output, "eval")
    assert [r["step"] for r in evaluations] == [20, 40]
    assert best.calibration["tau"] == max(r["tau"] for r in evaluations)
    assert evaluations[-1]["val_losses"][0] < evaluations[0]["train_losses"][0]
    assert [r["step"] for r in records(output, "train")] == list(range(1, 41))
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 40 and (output / "recipe.yaml").is_file()
    assert len(list((output / "snapshots").iterdir())) == 2


def test_progress_line_has_its_fixed_form(
    recipes: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(recipes(stop={"max_steps": 2}))
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("step"))
    parts = [part.split()[0] for part in line.split(" | ")]
    assert line.startswith("step 00001/00002 | loss ")
    assert [*parts[:5], parts[6]] == ["step", "loss", "acc@1", "tau", "lr", "data"]
    assert parts[7] == "eta" and line.split(" | ")[5].endswith("tok/s")
    for said in ("supervised positions", "plan:", "memory a process:"):
        assert said in out


def test_draft_vocabulary_is_counted_and_its_coverage_told(
    recipes: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train_here(recipes(drafter__draft_vocab_size=60, stop={"max_steps": 1}))
    ids = load_drafter(output / "last").drafter.state_dict()["draft_ids"].tolist()
    assert len(ids) == 60 and {0, 1, 2} <= set(ids)
    assert "draft vocabulary of 60 covers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss__terms": {"forward_kl": 1.0}, "drafter__lm_head": "own"},
        {"loss": {"terms": {"ce": 0.5, "tv": 1.0}, "per_sequence": True}},
    ],
    ids=["ce", "taught", "by conversation"],
)
def test_eight_small_batches_equal_one_large_one(recipes: Recipes, changes: dict[str, Any]) -> None:
    small = recipes("small", optimizer={"lr": 0.01, "micro_batch": 1, "accumulation": 8}, **changes)
    large = recipes("large", optimizer={"lr": 0.01, "micro_batch": 8, "accumulation": 1}, **changes)
    a, b = trajectory(train_here(small)), trajectory(train_here(large))
    assert len(a) == 6
    torch.testing.assert_close(torch.tensor(flat(a)), torch.tensor(flat(b)), rtol=1e-4, atol=1e-5)


def flat(rows: list[tuple[Any, ...]]) -> list[list[float]]:
    return [[0.0 if value is None else float(value) for value in row] for row in rows]


@pytest.mark.parametrize("at", [1, 2, 5])
def test_run_that_dies_within_a_snapshot_resumes_bit_for_bit(
    recipes: Recipes, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    changes = {"stop": {"max_steps": 11}, "log_every": 3, "precision": "bf16"}
    whole = train_here(recipes("whole", **changes))
    broken = recipes("broken", **changes)

    def die(self: Snapshots, *args: Any) -> None:
        raise Killed

    saves, save = 0, Snapshots.save

    def save_some(self: Snapshots, *args: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == at:
            monkeypatch.setattr(Snapshots, "_drop_old", die)
            monkeypatch.setattr("train.snapshots.os.replace", die)
        save(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "save", save_some)
        with pytest.raises(Killed):
            train_here(broken)
    monkeypatch.undo()
    train_here(broken)
    assert_same_run(whole, broken.with_suffix(""))


def test_features_computed_anew_each_epoch_change_nothing(recipes: Recipes) -> None:
    kept = train_here(recipes("kept", stop={"max_epochs": 2}))
    anew = train_here(recipes("anew", stop={"max_epochs": 2}, data__feature_cache_gib=0))
    assert_same_run(kept, anew)


def test_evaluating_more_often_changes_no_step(recipes: Recipes) -> None:
    seldom = train_here(recipes("seldom"))
    often = train_here(recipes("often", eval__eval_every=1))
    a, b = ([row[:-1] for row in trajectory(output)] for output in (seldom, often))
    assert a == b


def test_target_is_neither_optimised_nor_changed(
    recipes: Recipes, tiny_target_folder: Path
) -> None:
    before = load_file(tiny_target_folder / "model.safetensors")
    output = train_here(recipes(drafter__lm_head="own"))
    state = load_file(next((output / "snapshots").glob("*6/optimizer.safetensors")))
    own = {name: t.shape for name, t in tensors_of(output).items()}
    moments = [t.shape for name, t in state.items() if name.endswith("exp_avg")]
    assert sorted(moments) == sorted(own.values())
    after = load_file(tiny_target_folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_missing_responses_are_written_first(recipes: Recipes, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"What is {number}?" for number in range(12)))
    respond = tmp_path / "respond.yaml"
    respond.write_text(
        f"target: demo\noutput: elsewhere\nprompts: {prompts}\nmax_new_tokens: 12\ntemperature: 1\n"
    )
    path = recipes(
        data={
            "path": str(tmp_path / "answers"),
            "respond": str(respond),
            "validation_share": 0.3,
            "sequence_length": 96,
        },
        stop={"max_steps": 1},
    )
    output = train_here(path)
    assert (tmp_path / "answers" / "manifest.json").is_file()
    assert (output / "best").is_dir() and not Path("elsewhere").exists()


def test_wall_clock_ends_a_run_and_its_schedule(recipes: Recipes) -> None:
    output = train_here(
        recipes(stop={"max_minutes": 0.02}, eval__eval_every=10_000, save={"every": 10_000})
    )
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] > 1 and 1.2 <= summary["elapsed_s"] < 60
    rates = [record["lr"] for record in records(output, "train")]
    assert rates[-1] < max(rates)


def test_occupied_output_is_refused(recipes: Recipes, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipes(stop={"max_steps": 2})
    output = train_here(path)
    assert "holds a finished run" in refused(capsys, path)
    (output / "summary.json").unlink()
    error = refused(capsys, path, "optimizer.lr=0.5", "seed=3")
    assert "optimizer.lr, seed differ" in error
    assert "resume is false" in refused(capsys, path, "resume=false")
    error = refused(capsys, path, "optimizer.accumulation=1", "optimizer.micro_batch=1")
    assert "optimizer.accumulation differ" in error
    (output / "recipe.yaml").unlink()
    assert "holds no run" in refused(capsys, path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.name=/nowhere", "could not be loaded as a causal LM"),
        ("data.path=/nowhere", "not a data set"),
        ("eval.max_new_tokens=512", "leaves room"),
        ("drafter.draft_vocab_size=100000", "of 100000 was asked for; expected 1 to 160"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    path = recipes()
    assert message in refused(capsys, path, override)
    assert not path.with_suffix("").exists()


def test_tracker_without_its_package_is_refused(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipes(trackers=["wandb"])
    monkeypatch.setattr("train.logbook.importlib.util.find_spec", lambda name: None)
    assert "pip install 'outrider[wandb]'" in refused(capsys, path)
    assert not path.with_suffix("").exists()


def test_wandb_without_a_key_runs_offline_and_says_so(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = train_here(recipes(trackers=["wandb"], stop={"max_steps": 1}))
    assert "wandb: no API key" in capsys.readouterr().out
    assert list((output / "wandb").glob("offline-run-*"))


def test_loss_that_turns_nan_stops_the_run_and_names_step_and_conversations(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Forward.forward

    def poisoned(self: Forward, batch: Any, criterion: Any) -> Any:
        objective, sums = forward(self, batch, criterion)
        if "c7" in batch.rows:
            return objective * float("nan"), sums * float("nan")
        return objective, sums

    monkeypatch.setattr(Forward, "forward", poisoned)
    path = recipes(eval__eval_every=100)
    error = refused(capsys, path)
    assert "the loss of step" in error and "c7" in error
    step = int(error.partition("the loss of step ")[2].split()[0])
    assert step == len(records(path.with_suffix(""), "train")) + 1


def test_infinite_gradient_stops_the_run(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "gradient_norm", lambda self: float("inf"))
    assert "the gradient of step 1 is not a number" in refused(capsys, recipes())


def test_full_disk_ends_with_one_message(
    recipes: Recipes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.snapshots.save_file", full)
    path = recipes()
    assert "No space left" in refused(capsys, path)
    assert not list((path.with_suffix("") / "snapshots").glob("step-*"))
    monkeypatch.undo()
    train_here(path)


def test_metrics_go_to_tensorboard(recipes: Recipes) -> None:
    output = train_here(recipes(trackers=["tensorboard"], stop={"max_steps": 1}))
    assert list((output / "logs").rglob("events.out.tfevents*"))
