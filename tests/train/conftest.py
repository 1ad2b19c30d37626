"""A small response store and recipes for the tiny target."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def write_store(path: Path, target: TargetModel, num: int = 40) -> Path:
    """A complete store of such conversations, as `outrider respond` leaves one."""
    rows = make_rows(num, target.identity.vocab_size)
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


@pytest.fixture(scope="session")
def store(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")
    return write_store(tmp_path_factory.mktemp("store") / "data", target)


Recipes = Callable[..., Path]


@pytest.fixture
def recipes(store: Path, tiny_target_folder: Path, tmp_path: Path) -> Recipes:
    """Writes a recipe of the tiny run with changed fields (dotted); gives its path."""

    def write(name: str = "run", **changes: Any) -> Path:
        recipe: dict[str, Any] = {
            "target": {"name": str(tiny_target_folder), "dtype": "float32", "device": "cpu"},
            "data": {"path": str(store), "validation_share": 0.2, "sequence_length": 64},
            "drafter": {"num_heads": 2},
            "optimizer": {"lr": 0.01, "micro_batch": 1, "accumulation": 2},
            "stop": {"max_steps": 6},
            "eval": {"eval_every": 4, "prompts": 2, "max_new_tokens": 8, "tree_nodes": 4},
            "save": {"every": 2},
            "precision": "fp32",
            "output": str(tmp_path / name),
            "log_every": 1,
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if field:
                recipe[section] = recipe.get(section, {}) | {field: value}
            else:
                recipe[section] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    return write


def command(recipe: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> list[str]:
    script = str(ROOT / "train" / "medusa.py")
    return [sys.executable, *launcher, script, "--config", str(recipe), *overrides]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "WANDB_"))}
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | more


def run_training(
    recipe: Path, *overrides: str, launcher: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """The real command, to its end."""
    return subprocess.run(
        command(recipe, *overrides, launcher=launcher),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(**env),
        cwd=recipe.parent,
    )


def records(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]
