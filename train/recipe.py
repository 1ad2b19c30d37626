"""What a training run is made from: a strict schema read from YAML with dotted overrides."""

import argparse
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from distill.losses import LossSettings
from heads.base import DrafterConfig, drafter_class, drafter_kinds
from heads.errors import UserError, unknown_name
from heads.schema import Strict, load_recipe, parse
from infer.target import DType

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MAY_CHANGE = {"stop", "eval", "save", "log_every", "trackers", "resume", "output"}
"""Sections that a resumed run may bring anew; they do not touch what a step computes."""


class TargetSection(Strict):
    """The frozen target: demo, a folder or a Hugging Face id. No `device`: what is there."""

    name: str = "demo"
    dtype: DType = "bfloat16"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


def _as_list(value: Any) -> Any:
    """A single value as a list of one."""
    return value if isinstance(value, list | tuple) else [value]


class OnPolicySection(Strict):
    """The drafter's own responses (2310.08461), for drafters that can write.

    `share` of the conversations get their last response anew, of `max_new_tokens` at most and
    drawn at `temperature`, and no longer than the one it replaces. From `begin`, a share of the
    run, on: at once, or with `schedule` linear in a straight line from none then to all at the
    end. A copy of the drafter writes for `every` steps at once.
    """

    share: float = Field(default=0.25, gt=0, le=1)
    begin: float = Field(default=0.0, ge=0, lt=1)
    schedule: Literal["constant", "linear"] = "constant"
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    every: int = Field(default=16, ge=1)

    def share_at(self, progress: float) -> float:
        """The share when that much of the run lies behind."""
        if progress < self.begin:
            return 0.0
        if self.schedule == "constant":
            return self.share
        return self.share * (progress - self.begin) / (1 - self.begin)


class DataSection(Strict):
    """The response stores at `path`: one path, or a list of them whose rows are joined in order.

    `respond`: a respond recipe that is run first when the first store is missing or incomplete.
    `validation_share` of the conversations is held out. Conversations are packed into rows of
    `sequence_length` tokens. The target's states are kept in memory up to `feature_cache_gib` for
    all processes of a machine together, and computed anew each epoch beyond. `on_policy`: a share
    of the responses is the drafter's own.
    """

    path: Annotated[tuple[Path, ...], BeforeValidator(_as_list), Field(min_length=1)]
    respond: Path | None = None
    validation_share: float = Field(default=0.05, gt=0, lt=1)
    sequence_length: int = Field(default=1024, ge=8)
    feature_cache_gib: float = Field(default=4.0, ge=0)
    on_policy: OnPolicySection | None = None

    @field_validator("path")
    @classmethod
    def _names_no_store_twice(cls, path: tuple[Path, ...]) -> tuple[Path, ...]:
        if len(set(path)) < len(path):
            raise ValueError("a store is named twice; name each once")
        return path


class LossSection(Strict):
    """Losses by name with their weights (0 leaves one out); draft step k weighs `step_decay ** k`.

    `normalise_steps` divides the steps' weights by their sum. `temperature` softens both
    distributions of losses with a teacher; `top_k` is how many of the teacher's best tokens topk_ce
    reads. `per_sequence`: every conversation counts alike, whatever its length; else every
    supervised position does.
    """

    terms: dict[str, float] = Field(default_factory=lambda: {"ce": 1.0})
    step_decay: float = Field(default=0.8, gt=0)
    normalise_steps: bool = False
    temperature: float = 1.0
    chunk_size: int = 512
    top_k: int = 10
    per_sequence: bool = False

    @property
    def settings(self) -> LossSettings:
        """The part that the loss itself reads; refuses unknown names."""
        return LossSettings(
            self.terms, self.temperature, self.chunk_size, self.top_k, self.per_sequence
        )

    def step_weights(self, steps: int) -> list[float]:
        """What each of so many draft steps weighs.

        step_decay 0.6, normalise_steps, 3 steps  ->  [0.51, 0.31, 0.18]
        """
        weights = [self.step_decay**k for k in range(steps)]
        return [w / sum(weights) for w in weights] if self.normalise_steps else weights

    @model_validator(mode="after")
    def _is_known(self) -> "LossSection":
        assert self.settings
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Strict):
    """AdamW. A step learns from micro_batch x accumulation x processes packed rows.

    `warmup` is the share of the run in which lr rises; `grad_clip` bounds the gradient's norm.
    """

    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.1, ge=0, lt=1)
    accumulation: int = Field(default=1, ge=1)
    micro_batch: int = Field(default=4, ge=1)


class StopSection(Strict):
    """Whichever comes first; the schedule ends there. `max_minutes`: wall clock of the loop."""

    max_steps: int | None = Field(default=None, ge=1)
    max_epochs: float | None = Field(default=None, gt=0)
    max_minutes: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ends(self) -> "StopSection":
        if self.max_steps is None and self.max_epochs is None and self.max_minutes is None:
            raise ValueError("set max_steps, max_epochs or max_minutes")
        return self


class EvalSection(Strict):
    """Every `eval_every` steps and at the end: validation loss, then the real tree loop.

    `prompts`: how many held-out conversations' prompts, or a prompt file. The tree of `tree_nodes`
    drafts is grown from the accuracies measured just before.
    """

    eval_every: int = Field(default=200, ge=1)
    prompts: int | Path = Field(default=8)
    max_new_tokens: int = Field(default=64, ge=1)
    tree_nodes: int = Field(default=16, ge=1)

    @model_validator(mode="after")
    def _asks_for_some(self) -> "EvalSection":
        if isinstance(self.prompts, int) and self.prompts < 1:
            raise ValueError("prompts: expected at least 1, or a prompt file")
        return self


class SaveSection(Strict):
    """Checkpoints to resume from: every so many steps, the newest `keep` of them kept."""

    every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)


class Recipe(Strict):
    """A training run. `drafter` holds the fields of the kind's own config.

    `start`: a drafter to go on from, a folder (ours, exported or public), a model hub id, or
    `target` for the drafter that the target itself ships.
    """

    target: TargetSection = TargetSection()
    data: DataSection
    drafter: dict[str, Any] = Field(default_factory=dict)
    start: str | None = None
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    stop: StopSection
    eval: EvalSection = EvalSection()
    save: SaveSection = SaveSection()
    precision: Literal["fp32", "bf16"] = "bf16"
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    output: Path
    seed: int = 0
    resume: bool = True
    log_every: int = Field(default=10, ge=1)

    def drafter_config(self, kind: str) -> DrafterConfig:
        """The drafter section in the schema of its kind."""
        return parse(drafter_class(kind).Config, self.drafter | {"kind": kind}, "drafter")


def load_training_recipe(kind: str, config: Path | None, overrides: list[str]) -> Recipe:
    """The kind's recipe (None: `configs/<kind>.yaml`) with overrides, its drafter section checked.

    The drafter section comes back whole, with the kind's defaults filled in.
    """
    trainable = [name for name in drafter_kinds() if drafter_class(name).trainable]
    if kind not in trainable:
        raise unknown_name("drafter kind to train", kind, trainable)
    recipe = load_recipe(Recipe, config or CONFIGS / f"{kind}.yaml", overrides)
    given = recipe.drafter.get("kind", kind)
    if given != kind:
        raise UserError(
            f"drafter.kind is {given!r} in a recipe for {kind!r}; "
            f"run train/{given}.py or drop the field"
        )
    whole = recipe.drafter_config(kind).model_dump(mode="json")
    return recipe.model_copy(update={"drafter": whole})


def differences(recipe: Recipe, other: Recipe) -> list[str]:
    """Dotted fields that differ and that a resumed run may not change."""
    a, b = _flat(recipe.model_dump(mode="json")), _flat(other.model_dump(mode="json"))
    changed = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    free = ("data.feature_cache_gib", "data.respond")
    return [key for key in changed if key.partition(".")[0] not in MAY_CHANGE and key not in free]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flatten(recipe: Recipe) -> dict[str, str | int | float]:
    """Dotted fields as trackers take them."""
    flat = _flat(recipe.model_dump(mode="json"))
    return {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in flat.items()}


def read_arguments(kind: str, arguments: list[str]) -> Recipe:
    """The recipe that a training script's command line asks for."""
    parser = argparse.ArgumentParser(
        prog=f"train/{kind}.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            f"Trains a drafter of kind {kind} and measures it in the real loop as it learns.\n\n"
            f"    accelerate launch train/{kind}.py [--config FILE] [key.sub=value ...]\n\n"
            "Sections of a recipe: "
            + ", ".join(Recipe.model_fields)
            + f";\ntheir fields are in train/recipe.py, an example is configs/{kind}.yaml."
        ),
    )
    default = f"configs/{kind}.yaml of the repository"
    parser.add_argument("--config", type=Path, help=f"recipe to read (default: {default})")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="laid over the recipe"
    )
    given = parser.parse_args(arguments)
    return load_training_recipe(kind, given.config, given.overrides)
