"""Recipes: what is refused, and what a resumed run may change."""

from pathlib import Path

import pytest

from heads.errors import UserError
from tests.train.runs import Recipes
from train.pacing import Pace
from train.recipe import (
    CONFIGS,
    LossSection,
    OptimizerSection,
    StopSection,
    differences,
    load_training_recipe,
    read_arguments,
)


def test_shipped_recipes_are_valid() -> None:
    kinds = [path.stem for path in CONFIGS.glob("*.yaml") if (path.stem != "respond")]
    assert kinds
    for kind in kinds:
        recipe = load_training_recipe(kind, None, [])
        assert recipe.drafter["kind"] == kind


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("optimiser.lr=1", "did you mean 'optimizer'"),
        ("drafter.num_head=1", "did you mean 'num_heads'"),
        ("drafter.kind=ngram", "drafter.kind is 'ngram'"),
        ("loss.terms.kl=1", "unknown loss 'kl'"),
        ("loss.name=ce", "loss.name"),
        ("loss.terms.ce=0", "nothing to learn"),
        ("stop.max_steps=null", "max_steps, max_epochs or max_minutes"),
        ("stop.max_steps=0", "greater than or equal to 1"),
        ("eval.prompts=0", "expected at least 1"),
        ("precision=fp16", "precision"),
        ("trackers=[mlflow]", "trackers"),
        ("data.validation_share=1.5", "validation_share"),
        ("log_every", "key.sub=value"),
    ],
)
def test_bad_recipe_is_refused(recipes: Recipes, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_training_recipe("medusa", recipes(), [override])
    assert message in str(caught.value)


def test_kind_that_needs_no_training_is_refused() -> None:
    with pytest.raises(UserError, match="unknown drafter kind to train 'ngram'"):
        load_training_recipe("ngram", None, [])


def test_drafter_section_is_written_whole(recipes: Recipes) -> None:
    recipe = load_training_recipe("medusa", recipes(), [])
    assert recipe.drafter["lm_head"] == "shared" and recipe.drafter["num_heads"] == 2


def test_only_what_no_step_depends_on_may_change_on_resume(recipes: Recipes) -> None:
    path = recipes()
    before = load_training_recipe("medusa", path, [])
    free = ["stop.max_steps=9", "eval.eval_every=1", "log_every=3", "data.feature_cache_gib=0"]
    assert differences(load_training_recipe("medusa", path, free), before) == []
    bound = ["optimizer.lr=1", "drafter.num_heads=3", "seed=2"]
    changed = differences(load_training_recipe("medusa", path, bound), before)
    assert changed == ["drafter.num_heads", "optimizer.lr", "seed"]


def test_help_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_arguments("medusa", ["--help"])
    assert caught.value.code == 0
    assert "optimizer" in capsys.readouterr().out


def test_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        read_arguments("medusa", ["--config", str(tmp_path / "nowhere.yaml")])


def pace(schedule: str = "cosine", **stop: float) -> Pace:
    optimizer = OptimizerSection(lr=1.0, schedule=schedule, warmup=0.1)  # type: ignore[arg-type]
    return Pace(StopSection(**stop), optimizer, steps_per_epoch=10)  # type: ignore[arg-type]


def test_whichever_stop_comes_first_ends_the_run() -> None:
    both = pace(max_steps=100, max_epochs=2, max_minutes=1)
    assert both.max_steps == 20
    assert not both.finished(19, 59) and both.finished(20, 0) and both.finished(1, 60)
    assert pace(max_epochs=0.01).max_steps == 1
    assert pace(max_minutes=2).max_steps is None


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedule_rises_and_ends_where_the_run_ends(schedule: str) -> None:
    by_steps = pace(schedule, max_steps=100)
    rates = [by_steps.learning_rate(step, 0) for step in range(100)]
    assert rates[0] > 0 and max(rates) == pytest.approx(1, abs=0.02)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    by_time = pace(schedule, max_minutes=1)
    assert by_time.learning_rate(0, 59.9) < 0.01 < by_time.learning_rate(0, 30)


def test_wall_clock_and_steps_shape_one_schedule() -> None:
    both = pace(max_steps=100, max_minutes=1)
    assert both.learning_rate(10, 45) == both.learning_rate(74.5, 0)
    assert both.planned_steps(50, 15) == 100
    assert both.planned_steps(30, 30) == 60
    assert both.remaining_s(30, 30) == pytest.approx(30)


def test_weights_of_draft_steps_decay_and_sum_to_one_where_asked() -> None:
    """FastMTP's (2509.18362): 0.6^k over their sum."""
    loss = LossSection(step_decay=0.6, normalise_steps=True)
    assert [round(weight, 2) for weight in loss.step_weights(3)] == [0.51, 0.31, 0.18]
    assert LossSection(step_decay=0.5).step_weights(3) == [1.0, 0.5, 0.25]
