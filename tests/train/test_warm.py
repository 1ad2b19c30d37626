"""Drafters that feed on themselves, trained by the real command and gone on with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.base import load_drafter
from infer.export import export_drafter
from infer.target import TargetModel
from tests.infer.test_native import born_with, head_tensors
from tests.train.runs import Recipes, make_rows, train_here, write_store

SOFT = {"terms": {"forward_kl": 1.0}}


def run(kind: str, recipe: Path, *overrides: str) -> Path:
    """The training script of a kind in this process; the output folder."""
    return train_here(recipe, *overrides, kind=kind)


def refused(kind: str, capsys: pytest.CaptureFixture[str], recipe: Path, *overrides: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(kind, recipe, *overrides)
    assert caught.value.code == 2
    return capsys.readouterr().err


def records(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(
    ("kind", "drafter", "loss"),
    [
        ("eagle", {}, {"terms": {"smooth_l1": 1.0, "forward_kl": 0.1}}),
        ("eagle", {"num_steps": 3}, {"terms": {"smooth_l1": 1.0, "topk_ce": 1.0}}),
        ("eagle3", {"draft_vocab_size": 90}, SOFT | {"per_sequence": True}),
        ("eagle3", {"num_steps": 2, "norm_before_residual": True}, {"terms": {"lk_hybrid": 1.0}}),
        ("mtp", {}, SOFT | {"step_decay": 0.6, "normalise_steps": True}),
        ("mtp", {"num_modules": 2, "target_state": "after_norm"}, {"terms": {"ce": 1.0}}),
    ],
    ids=["features", "alignment", "reduced", "full", "recursive", "modules"],
)
def test_a_run_learns_and_measures_deeper_than_it_trains(
    kind: str, drafter: dict[str, Any], loss: dict[str, Any], recipes: Recipes
) -> None:
    recipe = recipes(drafter=drafter, loss=loss, stop={"max_steps": 30}, eval__eval_every=30)
    output = run(kind, recipe)
    losses = [line["loss"] for line in records(output, "train")]
    assert sum(losses[-5:]) < sum(losses[:5])
    (found,) = records(output, "eval")
    assert len(found["accuracies_HK"]) == 6
    assert len(found["train_losses"]) == len(records(output, "train")[0]["losses"])
    assert load_drafter(output / "best").drafter.kind == kind


def test_a_stopped_run_goes_on_bit_for_bit(recipes: Recipes) -> None:
    steady = {"lr": 0.01, "micro_batch": 1, "schedule": "constant", "warmup": 0}
    fields: dict[str, Any] = {"drafter": {"num_steps": 2}, "loss": SOFT, "optimizer": steady}
    whole = run("eagle", recipes("whole", stop={"max_steps": 6}, **fields))
    part = recipes("part", stop={"max_steps": 4}, **fields)
    output = run("eagle", part)
    (output / "summary.json").unlink()
    run("eagle", part, "stop.max_steps=6")
    one, other = (load_file(x / "last" / "model.safetensors") for x in (whole, output))
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor)


@pytest.mark.parametrize("exported", [False, True], ids=["ours", "exported"])
def test_a_warm_start_begins_with_the_drafter_it_names(
    exported: bool, recipes: Recipes, tiny_target_folder: Path, tmp_path: Path
) -> None:
    drafter = {"draft_vocab_size": 90, "norm_before_residual": True}
    first = run("eagle3", recipes("first", drafter=drafter, loss=SOFT))
    start = first / "best"
    if exported:
        target = TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")
        start = export_drafter(
            load_drafter(start), "vllm", tmp_path / "served", lambda: target, "float32"
        )
    second = recipes(
        "second",
        drafter={"norm_before_residual": True, "num_steps": 2},
        loss=SOFT,
        start=str(start),
        stop={"max_steps": 1},
        optimizer={"lr": 1e-12, "micro_batch": 1, "schedule": "constant", "warmup": 0},
    )
    output = run("eagle3", second)
    before = load_file(first / "best" / "model.safetensors")
    after = load_file(output / "best" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)
    config: Any = load_drafter(output / "best").drafter.config
    assert (config.num_steps, config.draft_vocab_size) == (2, 90)


def test_a_warm_start_keeps_its_own_flags_and_says_so(
    recipes: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run("eagle3", recipes("first", drafter={"fc_norm": True}, loss=SOFT))
    flags = {"norm_before_residual": True}
    run("eagle3", recipes("second", drafter=flags, loss=SOFT, start=str(first / "best")))
    said = capsys.readouterr().out
    assert "drafter.fc_norm is True, the start's own; False is not used" in said
    assert "drafter.norm_before_residual is False, the start's own; True is not used" in said


def test_a_warm_start_that_does_not_fit_is_refused(
    recipes: Recipes,
    tiny_target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = run("eagle3", recipes("first", drafter={"draft_vocab_size": 90}, loss=SOFT))
    second = recipes("second", drafter={}, loss=SOFT, start=str(first / "best"))
    assert "run train/eagle3.py" in refused("eagle", capsys, second)
    size = "drafter.draft_vocab_size=80"
    assert "has draft_vocab_size 90, the recipe asks for 80" in refused(
        "eagle3", capsys, second, size
    )
    target = TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")
    rows = make_rows(40, 60, seed=9)
    other = write_store(tmp_path / "other", target, rows=rows)
    message = refused("eagle3", capsys, second, f"data.path={other}", "drafter.draft_vocab_size=90")
    assert "reduced:90:" in message and "stand for other tokens" in message
    assert "no such drafter" in refused("eagle3", capsys, second, f"start={tmp_path}/nothing")
    assert not (tmp_path / "second").exists()


def test_a_run_goes_on_from_the_head_that_its_target_ships(
    recipes: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is loaded whole, then moves; and is exported with its target."""
    folder = born_with(tmp_path / "born")
    target = TargetModel.load(str(folder), dtype="float32", device="cpu")
    store = write_store(tmp_path / "data", target)
    fields: dict[str, Any] = {
        "target": {"name": str(folder), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(store), "validation_share": 0.2, "sequence_length": 64},
        "drafter": {},
        "loss": SOFT | {"step_decay": 0.6},
        "start": "target",
    }
    still = {"lr": 1e-12, "micro_batch": 1, "schedule": "constant", "warmup": 0}
    output = run("mtp", recipes("still", stop={"max_steps": 1}, optimizer=still, **fields))
    assert "starts with the drafter target" in capsys.readouterr().out
    own = head_tensors()
    for name, tensor in load_file(output / "best" / "model.safetensors").items():
        torch.testing.assert_close(tensor, own[f"model.{name}"], rtol=0, atol=1e-9)
    tuned = run("mtp", recipes("tuned", stop={"max_steps": 20}, **fields))
    losses = [line["loss"] for line in records(tuned, "train")]
    assert sum(losses[-4:]) < sum(losses[:4])
    out = export_drafter(
        load_drafter(tuned / "best"), "vllm", tmp_path / "served", lambda: target, "float32"
    )
    merged = load_file(out / "model.safetensors")
    assert not torch.equal(
        merged["model.mtp_layers.0.input_proj.weight"], own["model.mtp_layers.0.input_proj.weight"]
    )
    message = refused("eagle3", capsys, recipes("other", **fields))
    assert "ships no drafter of kind 'eagle3'" in message
