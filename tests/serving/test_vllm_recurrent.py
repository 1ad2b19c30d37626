"""Drafters that feed on themselves in real vLLM beside ours. Run by `make test-serving`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.questions import load_questions
from infer.acceptance import Question
from infer.serving import CheckSettings, check, open_exported
from infer.target import TargetModel
from tests.serving.conftest import PROMPTS
from tests.serving.test_vllm_parity import assert_same_figures, show

pytestmark = pytest.mark.serving

DEPTHS = {
    **dict.fromkeys(("plain", "fused", "reduced"), (1, 2, 3, 4, 5)),
    **dict.fromkeys(("whole", "student"), (1, 3, 5)),
}
WORKERS = {"fused": "reduced"}
"""Which tests share a process, where that is not their form's own: `fused` is made of `reduced`."""


def case(form: str, *values: int) -> Any:
    """A case of a form; those of one worker find what is trained for it there."""
    return pytest.param(form, *values, marks=pytest.mark.xdist_group(WORKERS.get(form, form)))


def questions(target: TargetModel, num: int) -> list[Question]:
    """The first prompts of every category in turn."""
    return load_questions(PROMPTS, target, per_category=1 + num // 8)[:num]


@pytest.mark.parametrize(
    ("form", "depth"), [case(form, depth) for form, depths in DEPTHS.items() for depth in depths]
)
def test_float32_acceptance_in_vllm_is_ours(
    form: str, depth: int, exported_by_form: Callable[[str], Path], target: TargetModel
) -> None:
    num, tokens = (8, 32) if depth == 3 else (6, 24)
    opened = open_exported(exported_by_form(form))
    settings = CheckSettings(num_speculative_tokens=depth, max_new_tokens=tokens)
    result = check(opened, target, questions(target, num), settings)
    assert_same_figures(result)
    assert depth == 1 or sum(result.ours.accepted_per_position[1:]) > 0
    if result.identical == num:
        assert result.engines == result.ours


@pytest.mark.parametrize("form", [case(form) for form in DEPTHS])
def test_bfloat16_acceptance_in_vllm_is_ours(
    form: str, exported_by_form: Callable[[str], Path], rough_target: TargetModel
) -> None:
    opened = open_exported(exported_by_form(form))
    settings = CheckSettings(num_speculative_tokens=3, max_new_tokens=32)
    result = check(opened, rough_target, questions(rough_target, 12), settings)
    show(result)
    assert result.ours.accepted > 0
    assert result.passed, result.verdict
