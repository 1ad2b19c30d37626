"""The real command: killed and resumed, on two processes, refused."""

import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.runs import (
    ROOT,
    Recipes,
    assert_close,
    command,
    environment,
    launcher,
    records,
    run_training,
    train_here,
    trajectory,
)


def test_run_killed_by_kill_9_resumes_bit_for_bit(recipes: Recipes) -> None:
    changes = {
        "stop": {"max_steps": 60},
        "eval__eval_every": 7,
        "save": {"every": 3},
        "log_every": 2,
        "precision": "bf16",
    }
    whole = train_here(recipes("whole", **changes))
    killed = recipes("killed", **changes)
    output = killed.with_suffix("")
    process = subprocess.Popen(
        command(killed), env=environment(), stdout=subprocess.DEVNULL, cwd=killed.parent
    )
    while process.poll() is None and not any(r["step"] >= 20 for r in records(output, "train")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert not (output / "summary.json").exists()
    again = run_training(killed)
    assert again.returncode == 0, again.stderr
    assert "resumed after step" in again.stdout
    assert trajectory(output) == trajectory(whole)
    for name in ("best", "last"):
        a, b = (load_file(run / name / "model.safetensors") for run in (output, whole))
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_two_processes_are_one_run(recipes: Recipes, engine: str) -> None:
    """Two processes x accumulation 2 equal one x 4; then the run goes on from a snapshot."""
    changes: dict[str, Any] = {"drafter__lm_head": "own", "stop": {"max_steps": 4}}
    if engine == "ddp":
        changes["loss"] = {"terms": {"ce": 0.5, "forward_kl": 1.0}, "per_sequence": True}
    optimizer = {"lr": 0.01, "micro_batch": 1}
    alone = train_here(recipes("alone", optimizer=optimizer | {"accumulation": 4}, **changes))
    pair = recipes("pair", optimizer=optimizer | {"accumulation": 2}, **changes)
    output = pair.with_suffix("")
    os.symlink(ROOT / "configs", pair.parent / "configs")
    done = run_training(pair, launcher=launcher(engine))
    assert done.returncode == 0, done.stderr
    assert_close(output, alone)
    if engine != "zero3":
        return
    before = trajectory(output)
    (output / "summary.json").unlink()
    shutil.rmtree(output / "snapshots" / "step-00000004")
    again = run_training(pair, launcher=launcher(engine))
    assert again.returncode == 0, again.stderr
    assert "resumed after step 2" in again.stdout
    assert trajectory(output) == before


@pytest.mark.parametrize(("kind", "engine"), [("eagle3", "ddp"), ("eagle3", "zero3")])
def test_two_processes_are_one_run_for_a_drafter_that_feeds_on_itself(
    kind: str, engine: str, recipes: Recipes
) -> None:
    """Its output matrix and its own embedding are read several times a step."""
    changes: dict[str, Any] = {
        "drafter": {"num_steps": 2, "embedding": "own"},
        "loss": {"terms": {"forward_kl": 1.0}},
        "stop": {"max_steps": 4},
    }
    optimizer = {"lr": 0.001, "micro_batch": 1}
    one = recipes("alone", optimizer=optimizer | {"accumulation": 4}, **changes)
    alone = train_here(one, kind=kind)
    pair = recipes("pair", optimizer=optimizer | {"accumulation": 2}, **changes)
    os.symlink(ROOT / "configs", pair.parent / "configs")
    done = run_training(pair, launcher=launcher(engine), kind=kind)
    assert done.returncode == 0, done.stderr
    assert_close(pair.with_suffix(""), alone)


def test_command_refuses_a_bad_recipe_with_status_2(recipes: Recipes) -> None:
    done = run_training(recipes(), "optimizer.rate=1")
    assert done.returncode == 2
    assert "optimizer.rate" in done.stderr and "Traceback" not in done.stderr
    assert json.dumps(done.stdout) == '""'
