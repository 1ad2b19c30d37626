"""What acceptance a drafter needs to break even at its measured cost."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from heads.draft_model import DraftModel, DraftModelConfig
from infer.estimate import ChainCost, Estimate, estimate, expected_tokens
from infer.target import TargetModel
from outrider.main import app


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 3), (0.5, 2), (0.8, 5), (0.99, 1)])
def test_expected_tokens_are_the_closed_form(rate: float, drafts: int) -> None:
    closed = (1 - rate ** (drafts + 1)) / (1 - rate)
    assert expected_tokens(rate, drafts) == pytest.approx(closed)


def test_at_the_rate_that_breaks_even_it_is_as_fast_as_plain_decoding() -> None:
    """One draft at half the target's cost: 1 + a = 1.5."""
    cost = ChainCost(1, draft_s=0.5, verify_s=1.0, plain_s=1.0)
    assert cost.break_even == pytest.approx(0.5, abs=1e-3)
    for drafts in (2, 4, 8):
        cost = ChainCost(drafts, draft_s=0.3 * drafts, verify_s=1.1, plain_s=1.0)
        assert cost.break_even is not None
        assert cost.speedup(cost.break_even) == pytest.approx(1.0, abs=1e-2)


def test_a_drafter_that_cannot_win_is_named_as_such() -> None:
    dear = [ChainCost(g, draft_s=1.2 * g, verify_s=1.0, plain_s=1.0) for g in (1, 4)]
    found = Estimate("slow", dear)
    assert found.easiest is None
    assert found.verdict.startswith("slow cannot win here")
    cheap = [ChainCost(g, draft_s=0.1 * g, verify_s=1.0, plain_s=1.0) for g in (1, 4)]
    assert "10 % of its drafts accepted" in Estimate("fast", cheap).verdict
    assert "at its measured 80 %" in Estimate("fast", cheap, rate=0.8).verdict


def test_a_student_as_dear_as_its_target_needs_nearly_every_draft(
    tiny_target: TargetModel,
) -> None:
    config = DraftModelConfig.model_validate({"student": {"layers": 3}})
    drafter = DraftModel.create(config, tiny_target.identity, tiny_target.shared).eval()
    found = estimate("whole", tiny_target, drafter)
    assert [cost.drafts for cost in found.costs] == [1, 2, 3, 4, 5, 6, 8]
    assert found.costs[-1].draft_s > found.costs[0].draft_s > 0
    easiest = found.easiest
    assert easiest is None or (easiest.break_even or 0) > 0.3


def test_the_command_reads_a_recipe_before_anything_is_trained(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = {
        "target": {"name": str(tiny_target_folder)},
        "data": {"path": str(tmp_path / "none")},
        "drafter": {"student": {"layers": 1}},
        "stop": {"max_steps": 1},
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "draft_model.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = CliRunner().invoke(app, ["tune", "--estimate", str(path), "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "breaks even at" in done.output.replace("\n", " ") or "breaks" in done.output
    assert "break even here" in " ".join(done.output.split()) or "cannot win" in done.output
