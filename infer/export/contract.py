"""The completeness proof of an exported folder, and how such a folder is written whole.

Engines notice little: some loaders leave a missing tensor at its random start, others drop what
they do not know. So what a folder must hold is derived from its **written config alone** and
compared with what lies there; nothing of the drafter that it was made from is asked.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FILES = (CONFIG, WEIGHTS)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor must be; floating-point values must be finite too.

    `fault` says what is wrong with the values of a tensor of that shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fault: Callable[[Tensor], str | None] | None = None

    def faults(self, name: str, tensor: Tensor) -> Iterator[str]:
        """What is wrong with a tensor of that name."""
        if tuple(tensor.shape) != self.shape:
            yield f"{name} has shape {list(tensor.shape)}, expected {list(self.shape)}"
        elif tensor.dtype != self.dtype:
            yield f"{name} is {tensor.dtype}, expected {self.dtype}"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name} holds NaN or infinity"
        elif self.fault is not None and (reason := self.fault(tensor)):
            yield f"{name} {reason}"


Expected = dict[str, TensorSpec]
"""The tensors that a config promises, by name."""


@dataclass(frozen=True)
class Traps:
    """Strings in a folder's path by which an engine overrides the method that it was told.

    `methods`: the method that each string stands for.
    """

    engine: str
    methods: Mapping[str, str]

    def refuse(self, folder: Path, method: str) -> None:
        """Raise UserError when the absolute path holds the string of another method."""
        path = os.path.abspath(folder)
        others = [string for string, stands_for in self.methods.items() if stands_for != method]
        found = [string for string in others if string in path.lower()]
        if found:
            raise UserError(
                f"{path} contains {found[0]!r}: {self.engine} would take the drafter for one of "
                f"another method by its path; use a path without {', '.join(others)}"
            )


def dtype_named(name: object, where: str) -> torch.dtype:
    """The floating-point dtype of that name."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"{where}: dtype {name!r} given; expected float32, bfloat16 or float16")
    return dtype


def prove_files(
    folder: Path,
    expected: Callable[[Mapping[str, Any]], Expected],
    beside: Callable[[Mapping[str, Any]], Mapping[str, bool]] = lambda config: {},
) -> None:
    """Prove a folder complete and exact, or raise UserError with every fault found.

    `expected` gives the tensors that a config promises, `beside` the files that may lie beside
    them, true for those that must. Nothing may be missing or extra; shapes, dtypes and values are
    checked. Where the folder lies is another question (`Traps`).
    """
    try:
        config = read_config(folder)
        specs, allowed = expected(config), beside(config)
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / CONFIG} lacks a key or holds a wrong one: {error!r}") from None
    found = sorted(path.name for path in folder.iterdir())
    strange = [name for name in found if name not in {*FILES, *allowed}]
    faults = [f"file {name} is no part of the contract" for name in strange]
    faults += [
        f"file {name} is missing" for name, must in allowed.items() if must > (name in found)
    ]
    faults += list(_tensor_faults(folder / WEIGHTS, specs))
    if faults:
        raise UserError(
            f"{folder} is not what its {CONFIG} promises: {'; '.join(faults)}; export it again"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The config of an exported folder."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is not an exported drafter: {CONFIG} cannot be read ({error}); "
            "give a folder written by outrider export"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def _tensor_faults(path: Path, specs: Expected) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            yield from (f"tensor {name} is missing" for name in sorted(specs.keys() - names))
            yield from (f"tensor {name} is unexpected" for name in sorted(names - specs.keys()))
            for name in sorted(names & specs.keys()):
                yield from specs[name].faults(name, file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        yield f"{path.name} cannot be read as safetensors: {error}"


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config and tensors; tensors that share memory are written out each."""
    separate = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(separate, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def names(items: Iterable[str]) -> str:
    """A list for a message."""
    return ", ".join(sorted(items)) or "none"
