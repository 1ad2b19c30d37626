"""Small response stores, and the real training command run on them."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from distill.store import (
    Counts,
    Manifest,
    PromptSource,
    Row,
    shard_path,
    write_manifest,
    write_shard,
)
from infer.target import TargetModel
from train.trainer import main

ROOT = Path(__file__).resolve().parents[2]
Recipes = Callable[..., Path]
"""Writes a recipe with changed fields; gives its path (the fixture `recipes`)."""


def make_rows(num: int, vocab_size: int, seed: int = 0) -> list[Row]:
    """Conversations whose responses count upwards, so that there is something to learn."""
    make = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(num):
        prompt_length, response_length = torch.randint(3, 18, (2,), generator=make).tolist()
        prompt = torch.randint(3, vocab_size, (prompt_length,), generator=make).tolist()
        first = int(torch.randint(3, vocab_size, (), generator=make))
        response = [3 + (first + i) % (vocab_size - 3) for i in range(response_length)] + [2]
        mask = [False] * prompt_length + [True] * len(response)
        row = Row(f"c{number}", "count", prompt + response, mask, 1, True, f"question {number}")
        rows.append(row)
    return rows


def write_store(
    path: Path, target: TargetModel, num: int = 40, rows: list[Row] | None = None
) -> Path:
    """A complete store of such conversations, as `outrider respond` leaves one."""
    rows = make_rows(num, target.identity.vocab_size) if rows is None else rows
    num = len(rows)
    (path / "shards").mkdir(parents=True)
    write_shard(shard_path(path, "00000"), rows)
    write_manifest(
        path,
        Manifest(
            target=target.identity,
            source=PromptSource(kind="prompts", name="made", sha256="0"),
            settings={},
            created=datetime.datetime(2026, 1, 1).isoformat(),
            counts=Counts(rows=num, turns=num, tokens=sum(len(r.tokens) for r in rows)),
            complete=True,
        ),
    )
    return path


def command(
    recipe: Path, *overrides: str, launcher: tuple[str, ...] = (), kind: str = "medusa"
) -> list[str]:
    script = str(ROOT / "train" / f"{kind}.py")
    return [sys.executable, *launcher, script, "--config", str(recipe), *overrides]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "WANDB_"))}
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | more


def run_training(
    recipe: Path,
    *overrides: str,
    launcher: tuple[str, ...] = (),
    kind: str = "medusa",
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """The real command, to its end."""
    return subprocess.run(
        command(recipe, *overrides, launcher=launcher, kind=kind),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(**env),
        cwd=recipe.parent,
    )


def train_here(recipe: Path, *overrides: str, kind: str = "medusa") -> Path:
    """The same in this process; gives the output folder."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    main(kind, ["--config", str(recipe), *overrides])
    return recipe.with_suffix("")


def refused(capsys: pytest.CaptureFixture[str], recipe: Path, *overrides: str) -> str:
    """What a run says that is refused with exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        train_here(recipe, *overrides)
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error


def launcher(name: str) -> tuple[str, ...]:
    """`accelerate launch` with one of the shipped configs."""
    config = str(ROOT / "configs" / "accelerate" / f"{name}.yaml")
    return ("-m", "accelerate.commands.launch", "--config_file", config)


def assert_close(output: Path, reference: Path) -> None:
    """Two runs that computed the same in another order."""
    a, b = (
        torch.tensor([[float(v or 0) for v in row] for row in trajectory(run)])
        for run in (output, reference)
    )
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    left, right = (load_file(run / "last" / "model.safetensors") for run in (output, reference))
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=1e-2, atol=1e-4)


def trajectory(output: Path) -> list[tuple[Any, ...]]:
    """What a run computed, step by step, without what depends on the clock."""
    return [
        (r["step"], r["loss"], *r["losses"], *r["acc@1"], r["lr"], r["grad_norm"], r["tau"])
        for r in records(output, "train")
    ]


def records(output: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in metrics.jsonl, as far as they are written."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in whole if record["kind"] == kind]
