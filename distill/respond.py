"""Prompts to the target's own responses: what is asked for, checked before anything is written.

    config -> prompts (read, or written by the target) -> batches -> one shard a batch -> manifest

A batch is either there as a shard or not. What is in it depends on the settings and its prompts
alone, so a run that was stopped anywhere and started again ends with the same rows.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from pydantic import Field, model_validator

from distill.answer import Answering
from distill.chat import check_template, prompt_ids, user_opening
from distill.generate import batched_generate
from distill.prompts import DATASETS, Prompt, load_prompts
from distill.self_prompt import SelfPromptConfig
from distill.store import (
    SHARDS,
    Manifest,
    PromptSource,
    read_manifest,
    rows_in,
    shard_files,
    write_manifest,
)
from distill.writer import Clock, Plan, Writer
from heads.base import TargetIdentity
from heads.errors import UserError
from heads.schema import Strict
from infer.sampling import Sampling
from infer.target import DType, TargetModel

__all__ = ["RespondConfig", "batched_generate", "respond"]

# What the data do not depend on (the target and its dtype are compared by its identity).
NOT_OF_THE_DATA = {
    "target",
    "dtype",
    "device",
    "revision",
    "trust_remote_code",
    "output",
    "prompts",
    "max_minutes",
}


class RespondConfig(Strict):
    """A respond config.

    `prompts` (a file, or `datasets:ID[:split[:column]]`) or `self_prompt`, not both. A conversation
    is at most `max_length` tokens long (None: the target's context). The run ends after the batch
    that reaches `max_tokens` response tokens; `max_minutes` stops it before, to be gone on with by
    a second call. `device`: None takes an accelerator when there is one.
    """

    target: str = "demo"
    dtype: DType = "bfloat16"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    output: Path
    prompts: str | None = None
    self_prompt: SelfPromptConfig | None = None
    limit: int | None = Field(default=None, ge=1)
    per_category: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=192, ge=1)
    max_length: int | None = Field(default=None, ge=2)
    max_tokens: int | None = Field(default=None, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=64, ge=1)
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> "RespondConfig":
        if (self.prompts is None) == (self.self_prompt is None):
            given = "neither was" if self.prompts is None else "both were"
            raise UserError(
                f"give either prompts or self_prompt, {given} given; prompts=FILE self_prompt=null "
                "takes prompts of your own"
            )
        _ = self.sampling
        return self

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p)


def respond(
    config: RespondConfig,
    target: TargetModel | None = None,
    progress: Callable[[str], None] = print,
) -> Path:
    """Write the data set that `config` asks for, or what is missing of it; its folder.

    `progress` gets a line after each batch. Raises UserError, before anything is written, for a
    template or prompts that cannot be used, a folder of something else, and settings other than
    those that the folder's data were written with.
    """
    clock = Clock(config.max_minutes)
    folder = config.output
    manifest = read_manifest(folder)
    _refuse_foreign(folder, manifest)
    if manifest and _is_finished(folder, manifest, config, target):
        progress(f"respond | {folder} is finished: {manifest.counts.rows:,} rows; nothing to do")
        return folder
    target = target or _load_target(config)
    plan = _plan(config, target)
    wanted = _manifest(config, target, plan)
    if manifest:
        _refuse_changes(folder, manifest, config, target.identity, wanted.source)
        wanted = wanted.model_copy(update={"created": manifest.created})
    with _locked(folder):
        if manifest is None:
            write_manifest(folder, wanted)
        written = Writer(target, plan, folder, wanted, clock, progress).run()
    progress(_summary(folder, written))
    return folder


def _load_target(config: RespondConfig) -> TargetModel:
    return TargetModel.load(
        config.target,
        dtype=config.dtype,
        device=config.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )


def _plan(config: RespondConfig, target: TargetModel) -> Plan:
    """What is to be written, checked against the target."""
    longest = config.max_length or target.max_positions
    if longest > target.max_positions:
        raise UserError(
            f"max_length {longest} given; the target {target.name} has a context of "
            f"{target.max_positions} tokens"
        )
    prompts = _read_prompts(config)
    check_template(target.tokenizer, max((len(prompt.turns) for prompt in prompts), default=1))
    _refuse_long(config, target, prompts, longest)
    return Plan(
        prompts=tuple(prompts),
        self_prompt=config.self_prompt,
        answering=Answering(config.sampling, config.max_new_tokens, longest, config.seed),
        batch_size=config.batch_size,
        max_tokens=config.max_tokens,
    )


def _read_prompts(config: RespondConfig) -> list[Prompt]:
    if config.prompts is None:
        return []
    return load_prompts(config.prompts, config.limit, config.per_category)


def _refuse_long(
    config: RespondConfig, target: TargetModel, prompts: Sequence[Prompt], longest: int
) -> None:
    """Raise UserError for a prompt that leaves no room for an answer."""
    for prompt in prompts:
        length = len(prompt_ids(target.tokenizer, prompt.messages[: prompt.turns[0]]))
        if length >= longest:
            raise UserError(
                f"the prompt {prompt.id!r} of {config.prompts} is {length} tokens long; expected "
                f"fewer than {longest}, the longest conversation (the target's context, or "
                "max_length); remove or shorten the row"
            )
    if config.self_prompt:
        # The opening twice over: what a template writes after a question is no longer than that.
        surroundings = 2 * len(user_opening(target.tokenizer))
        if config.self_prompt.max_question_tokens + surroundings >= longest:
            raise UserError(
                f"self_prompt.max_question_tokens {config.self_prompt.max_question_tokens} leaves "
                f"no room for an answer in a conversation of {longest} tokens; lower it"
            )


def _manifest(config: RespondConfig, target: TargetModel, plan: Plan) -> Manifest:
    return Manifest(
        target=target.identity,
        source=_source(config, plan.prompts),
        settings=_settings(config),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _settings(config: RespondConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=NOT_OF_THE_DATA)


def _source(config: RespondConfig, prompts: Sequence[Prompt]) -> PromptSource:
    if config.prompts is None:
        return PromptSource(kind="self_prompt", name="the target", sha256="")
    text = json.dumps([[prompt.id, prompt.category, prompt.messages] for prompt in prompts])
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return PromptSource(kind="prompts", name=config.prompts, sha256=sha256)


def _is_finished(
    folder: Path, manifest: Manifest, config: RespondConfig, target: TargetModel | None
) -> bool:
    """Whether all is there; without loading the target when its name says enough."""
    if not manifest.complete or sum(map(rows_in, shard_files(folder))) < manifest.counts.rows:
        return False
    named = (manifest.target.name, manifest.target.dtype) == (config.target, config.dtype)
    if target is None and not named:
        return False
    remote = (config.prompts or "").startswith(DATASETS)
    source = None if remote else _source(config, _read_prompts(config))
    _refuse_changes(folder, manifest, config, target.identity if target else None, source)
    return True


def _refuse_changes(
    folder: Path,
    old: Manifest,
    config: RespondConfig,
    identity: TargetIdentity | None,
    source: PromptSource | None,
) -> None:
    """Raise UserError when what the data depend on is not as it was."""
    changes = _differences(old.settings, _settings(config), "")
    if identity is not None:
        before, now = (i.model_dump(exclude={"name", "revision"}) for i in (old.target, identity))
        changes += _differences(before, now, "target ")
    if source and (old.source.kind, old.source.sha256) != (source.kind, source.sha256):
        changes.append(f"prompts {old.source.name!r}, now {source.name!r} with other contents")
    if changes:
        raise UserError(
            f"{folder} holds data written with other settings: {'; '.join(changes)}; set them "
            "back, or give another output folder"
        )


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str) -> list[str]:
    return [
        f"{prefix}{name} {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _refuse_foreign(folder: Path, manifest: Manifest | None) -> None:
    if manifest is not None or not folder.exists():
        return
    if not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir()):
        raise UserError(
            f"{folder} exists and is no data set of outrider respond; give another output folder"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone, cleared of what a killed one left half-written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            for stale in [*folder.glob(".*.json-*"), *(folder / SHARDS).glob(".*.parquet-*")]:
                stale.unlink(missing_ok=True)
            yield
    except Timeout:
        raise UserError(
            f"another outrider respond is writing to {folder}; wait for it, or give another output"
        ) from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}; give another folder") from error


def _summary(folder: Path, manifest: Manifest) -> str:
    counts = manifest.counts
    state = (
        "finished" if manifest.complete else f"stopped by {manifest.stopped}; run again to go on"
    )
    return (
        f"respond | {folder} {state}: {counts.rows:,} rows, {counts.response_tokens:,} response "
        f"tokens, {counts.unfinished:,} cut off, {counts.degenerate:,} loops, "
        f"{counts.dropped_empty:,} empty ones dropped"
    )
