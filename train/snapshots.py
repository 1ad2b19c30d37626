"""What a run leaves on disk to go on from: each snapshot whole or not at all.

    <output>/recipe.yaml                     the resolved recipe
    <output>/snapshots/step-00000120/        state.json, model and optimizer tensors
    <output>/best, <output>/last             drafters, as `heads.base.save_drafter` writes them
    <output>/metrics.jsonl                   a record a log interval and an evaluation
    <output>/summary.json                    written last: the run is finished

Random states are not among it: every micro-batch seeds its own from the recipe's seed and its
place in the data.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.store import write_whole
from heads.errors import UserError
from heads.schema import load_recipe
from train.engine import Engine
from train.recipe import Recipe, differences

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
SNAPSHOTS = "snapshots"
STATE = "state.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


def check_output(recipe: Recipe) -> Path | None:
    """The newest snapshot to resume from, None for a fresh start.

    Raises UserError when the folder holds a finished run, another recipe's, or no run at all.
    """
    output = recipe.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / RECIPE).is_file():
        raise UserError(
            f"output {output} exists and holds no run; give another output or remove it"
        )
    if (output / SUMMARY).is_file():
        raise UserError(
            f"output {output} holds a finished run; give another output or remove the folder"
        )
    if not recipe.resume:
        raise UserError(
            f"output {output} holds an unfinished run and resume is false; "
            "set resume=true, give another output or remove the folder"
        )
    changed = differences(recipe, load_recipe(Recipe, output / RECIPE))
    if changed:
        raise UserError(
            f"output {output} holds a run of another recipe: {', '.join(changed)} differ; "
            "resume with the same values, give another output or remove the folder"
        )
    found = sorted((output / SNAPSHOTS).glob("step-*"))
    return found[-1] if found else None


@contextmanager
def hold_output(output: Path) -> Iterator[None]:
    """Keep a second run out of `output` while this one writes there."""
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"output {output} is being written by another run; wait for it or give another output"
        ) from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def write_recipe(recipe: Recipe) -> None:
    """The resolved recipe, whole, into the run."""
    recipe.output.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_whole(recipe.output / RECIPE, lambda file: file.write_text(text))


def write_summary(output: Path, summary: dict[str, Any]) -> None:
    """Mark the run as finished."""
    text = json.dumps(summary, indent=2) + "\n"
    write_whole(output / SUMMARY, lambda file: file.write_text(text))


@dataclass
class Snapshots:
    """Writes and reads snapshots of one run."""

    recipe: Recipe
    engine: Engine

    def save(self, step: int, state: dict[str, Any]) -> None:
        """A snapshot after `step` steps; every process takes part."""
        folder = self.recipe.output / SNAPSHOTS / f"step-{step:08d}"
        temporary = folder.with_name(f".{folder.name}")
        if self.engine.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.engine.wait()
        if self.engine.sharded:
            self.engine.model.save_checkpoint(str(temporary), tag="sharded")
        elif self.engine.is_main:
            self._write(self.engine.whole_state(), temporary / MODEL)
            self._write(optimizer_tensors(self.engine.optimizer), temporary / OPTIMIZER)
        self.engine.wait()
        if self.engine.is_main:
            (temporary / STATE).write_text(json.dumps(state))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
            self._drop_old()
        self.engine.wait()

    def load(self, folder: Path) -> dict[str, Any]:
        """Put a snapshot's tensors in place; gives its state."""
        try:
            return self._load(folder)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"snapshot {folder} cannot be read ({error!r}); remove it, and the same command "
                "goes on from the one before"
            ) from error

    def _load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
        written = state["launch"]
        if written != self.launch:
            raise UserError(
                f"{folder} was written by {_words(written)}, this run has {_words(self.launch)}; "
                "resume with as many processes, the same accumulation and the same engine"
            )
        if state["draft_vocab"] != self.draft_vocab:
            raise UserError(
                f"{folder} has the draft vocabulary {state['draft_vocab']}, the data give "
                f"{self.draft_vocab} now (kind, size and digest of the ids): they were changed "
                "since; put back what the run began with, or give another output"
            )
        if self.engine.sharded:
            self.engine.model.load_checkpoint(str(folder), tag="sharded")
        else:
            self.engine.load_whole_state(load_file(folder / MODEL))
            fill_optimizer(self.engine.optimizer, load_file(folder / OPTIMIZER))
        return state

    @property
    def launch(self) -> dict[str, Any]:
        """What decides which rows a step takes and in what form tensors are kept."""
        section = self.recipe.optimizer
        per_step = section.micro_batch * section.accumulation * self.engine.processes
        form = f"DeepSpeed on {self.engine.processes}" if self.engine.sharded else "whole tensors"
        return {"rows_per_step": per_step, "form": form}

    @property
    def draft_vocab(self) -> str:
        """The draft vocabulary that the drafter has before a snapshot is put in place."""
        return str(self.engine.drafter.contract_fields()["draft_vocab"])

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            raise UserError(
                f"could not write {path}: {error}; free some space, the same command goes on"
            ) from error

    def _drop_old(self) -> None:
        folders = sorted((self.recipe.output / SNAPSHOTS).glob("step-*"))
        for folder in folders[: -self.recipe.save.keep]:
            shutil.rmtree(folder)


def _words(launch: dict[str, Any]) -> str:
    return f"{launch['rows_per_step']} rows a step ({launch['form']})"


def optimizer_tensors(optimizer: Any) -> dict[str, Tensor]:
    """An optimizer's state as flat tensors: `<parameter>.<name>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().cpu().clone()
        for index, values in state.items()
        for name, value in values.items()
    }


def fill_optimizer(optimizer: Any, tensors: dict[str, Tensor]) -> None:
    """Put flat tensors back into an optimizer over the same parameters."""
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict(whole | {"state": state})
