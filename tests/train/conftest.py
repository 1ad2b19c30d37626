"""A small response store and recipes for the tiny target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from infer.target import TargetModel
from tests.train.runs import Recipes, write_store


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def store(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")
    return write_store(tmp_path_factory.mktemp("store") / "data", target)


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
