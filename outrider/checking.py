"""`outrider check`: what an exported folder, a target and prompts become for the comparison."""

from pathlib import Path

from infer.serving import CheckResult
from infer.target import DType
from outrider.measuring import DEFAULT_PROMPTS


def run_check(
    exported: Path,
    *,
    engine: str,
    endpoint: str | None,
    prompts: str | None,
    limit: int | None,
    per_category: int | None,
    chain: int | None,
    max_new_tokens: int,
    dtype: DType,
    target: str | None,
) -> CheckResult:
    """The engine's acceptance beside ours on the same prompts."""
    from distill.questions import load_questions
    from heads.errors import unknown_name
    from infer.export import ENGINES
    from infer.opening import open_target
    from infer.serving import CheckSettings, check, open_exported

    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    opened = open_exported(exported, engine)
    model = open_target([opened.checkpoint], target, dtype, None)
    questions = load_questions(
        prompts or DEFAULT_PROMPTS, model, limit=limit, per_category=per_category
    )
    settings = CheckSettings(num_speculative_tokens=chain, max_new_tokens=max_new_tokens)
    return check(opened, model, questions, settings, endpoint=endpoint)
