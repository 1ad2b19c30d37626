"""What a run says: a progress line, `metrics.jsonl`, trackers; and the sums they are made from."""

import importlib.util
import json
import netrc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from distill.store import write_whole
from heads.errors import UserError
from train.engine import Engine
from train.recipe import LossSection, Recipe, flatten

METRICS = "metrics.jsonl"
EXTRAS = {"wandb": "outrider[wandb]", "tensorboard": "tensorboard"}


@dataclass
class Meter:
    """Sums since the last reading: divided once, when read.

    `sums_SX` [draft steps, 2 + K] as `train.engine.Forward` gives them, summed over processes.
    """

    sums_SX: Tensor | None = None
    steps: int = 0
    tokens: int = 0
    step_s: float = 0.0
    data_s: float = 0.0

    def add(self, sums_SX: Tensor, tokens: int, step_s: float, data_s: float) -> None:
        """One training step."""
        self.sums_SX = sums_SX.clone() if self.sums_SX is None else self.sums_SX + sums_SX
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.step_s, self.data_s = self.step_s + step_s, self.data_s + data_s

    def to_json(self) -> dict[str, Any]:
        """All of it, to go on exactly after a resume."""
        sums = None if self.sums_SX is None else self.sums_SX.tolist()
        return vars(self) | {"sums_SX": sums}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Meter":
        """What `to_json` gave."""
        sums = data["sums_SX"]
        tensor = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        return cls(**(data | {"sums_SX": tensor}))


def step_losses(sums_SX: Tensor) -> list[float]:
    """Mean loss of each draft step."""
    means: list[float] = (sums_SX[:, 0] / sums_SX[:, 1].clamp(min=1)).tolist()
    return means


def objective(sums_SX: Tensor, loss: LossSection) -> float:
    """The steps' weighted loss sums over the first step's positions.

    What is minimised, unless conversations count alike: here every position does.
    """
    weights = torch.tensor(loss.step_weights(len(sums_SX)), dtype=torch.float64)
    return float((weights * sums_SX[:, 0]).sum() / sums_SX[0, 1].clamp(min=1))


def accuracies(sums_SX: Tensor) -> list[list[float]]:
    """Rates [steps][K]: how often the target's token is the rank-k candidate."""
    rates: list[list[float]] = (sums_SX[:, 2:] / sums_SX[:, 1:2].clamp(min=1)).tolist()
    return rates


def train_line(record: dict[str, Any]) -> str:
    """The progress line of a training record.

    step 00120/02000 | loss 2.3141 | acc@1 .61 .43 | tau 2.41 | lr 3.0e-4 | 41,200 tok/s | data 3 %
    | eta 12 min
    """
    tau = "-" if record["tau"] is None else f"{record['tau']:.2f}"
    parts = [
        f"step {record['step']:05d}/{record['planned_steps']:05d}",
        f"loss {record['loss']:.4f}",
        "acc@1 " + " ".join(_share(a) for a in record["acc@1"]),
        f"tau {tau}",
        f"lr {_rate(record['lr'])}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"data {100 * record['data_share']:.0f} %",
        f"eta {_duration(record['eta_s'])}",
    ]
    return " | ".join(parts)


def eval_line(record: dict[str, Any]) -> str:
    """An evaluation's line: train and validation loss side by side, per draft step too."""
    train, val = record["train_loss"], record["val_loss"]
    return " | ".join(
        [
            f"eval {record['step']:05d}",
            f"loss train {'-' if train is None else f'{train:.4f}'} val {val:.4f}",
            f"a step: train {_losses(record['train_losses'])} val {_losses(record['val_losses'])}",
            "val acc@1 " + " ".join(_share(row[0]) for row in record["accuracies_HK"]),
            f"tau {record['tau']:.2f}" + (" (best so far)" if record["best"] else ""),
            f"{record['eval_s']:.0f} s",
        ]
    )


def _losses(values: list[float] | None) -> str:
    return "-" if values is None else " ".join(f"{value:.2f}" for value in values)


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _rate(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"tracker {name!r} is asked for and its package is not installed; "
                f"pip install '{EXTRAS[name]}' or drop it from trackers"
            )


def wandb_has_key() -> bool:
    """Whether wandb could log in without asking: a key in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2]
    try:
        return netrc.netrc().authenticators(host.partition("/")[0]) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@dataclass
class Logbook:
    """Speaks and writes on the main process only; elsewhere every call does nothing."""

    recipe: Recipe
    engine: Engine
    bar: Progress | None = field(default=None, init=False)

    def open(self) -> None:
        """Start the trackers, and a progress bar on a terminal."""
        if self.recipe.trackers:
            if self.engine.is_main and "wandb" in self.recipe.trackers:
                self._prepare_wandb()
            self.engine.accelerator.init_trackers(
                "outrider",
                config=flatten(self.recipe),
                init_kwargs={"wandb": {"dir": str(self.recipe.output)}},
            )
        if self.engine.is_main and sys.stdout.isatty():
            self.bar = Progress(TextColumn("{task.description}"), BarColumn(), transient=True)
            self.bar.add_task("training", total=1.0)
            self.bar.start()

    def _prepare_wandb(self) -> None:
        if "WANDB_MODE" not in os.environ and not wandb_has_key():
            os.environ["WANDB_MODE"] = "offline"
            self.say(
                f"wandb: no API key (WANDB_API_KEY), so it runs offline under {self.recipe.output};"
                " send it later by wandb sync"
            )

    def say(self, line: str) -> None:
        """One line for people."""
        if not self.engine.is_main:
            return
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def write(self, record: dict[str, Any], line: str, progress: float) -> None:
        """A record into metrics.jsonl and the trackers, its line to people."""
        if self.engine.is_main:
            with (self.recipe.output / METRICS).open("a") as file:
                file.write(json.dumps(record) + "\n")
        self.say(line)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=progress)
        if self.recipe.trackers:
            self.engine.accelerator.log(scalars(record), step=record["step"])

    def finish(self) -> None:
        """Let the trackers end their run."""
        if self.recipe.trackers:
            self.engine.accelerator.end_training()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self.bar is not None:
            self.bar.stop()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record as trackers take it: lists become key/0, key/1, ...; what is no number is left."""
    flat: dict[str, float] = {}
    kind = record["kind"]
    for key, value in record.items():
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for place, item in items:
            if isinstance(item, (int, float)) and key != "step":
                flat[f"{kind}/{key}" + ("" if place is None else f"/{place}")] = float(item)
    return flat


def cut_metrics(output: Path, step: int) -> None:
    """Drop the records behind `step`: a resumed run writes them again."""
    path = output / METRICS
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that the kill cut short
    write_whole(path, lambda file: file.write_text("".join(kept)))
