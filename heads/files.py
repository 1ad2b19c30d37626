"""Files and folders that are written whole or not at all, and read quietly."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from heads.errors import UserError

Failures = tuple[type[BaseException], ...]


def write_whole(
    file: Path, write: Callable[[Path], Any], failures: Failures = (), advice: str = ""
) -> None:
    """Let `write` fill a file beside its place, then move it there; UserError when it cannot.

    `failures` are exceptions that mean the same as an OSError; `advice` ends the message.
    """
    expected: Failures = (OSError, *failures)
    temporary: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, file)
    except expected as error:
        advice = advice or "free some space or choose another place"
        raise UserError(f"could not write {file}: {error}; {advice}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def refuse_unwritable(file: Path) -> None:
    """Raise UserError where `file` could not be written: asked before a long run, not after it."""
    try:
        if file.is_dir():
            raise IsADirectoryError("it is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise UserError(f"could not write {file}: {error}; choose another place") from None


def refuse_existing(out: Path) -> None:
    """Raise UserError when there is something at `out`."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists; remove it or choose another folder")


@contextmanager
def whole_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end of the block, or vanishes when it raises.

    It lies beside `out`, so that the last step is one rename: a process that is killed leaves no
    half-written `out`. Folders above it are made, and go again with it. What lies at `out` is an
    error, or with `replace` it makes room at the very end.
    """
    if not replace:
        refuse_existing(out)
    temporary: Path | None = None
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        whole = temporary / "whole"
        whole.mkdir()
        yield whole
        for file in whole.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner alone; servers run as others
        if replace and out.exists():
            os.replace(out, temporary / "old")
        os.replace(whole, out)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"could not write {out}: {error}; free some space or choose another folder"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in made if not out.exists() else []:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings while a model loads."""
    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
