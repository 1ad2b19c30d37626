"""Prompts as the loop measures them: rendered by the target's own chat template."""

from pathlib import Path

from distill.chat import prompt_ids
from distill.prompts import Prompt, load_prompts
from heads.errors import UserError
from infer.acceptance import Question
from infer.target import TargetModel


def load_questions(
    source: str | Path,
    target: TargetModel,
    *,
    limit: int | None = None,
    per_category: int | None = None,
) -> list[Question]:
    """The first user turn of each prompt, with the generation prompt behind it.

    Raises UserError for what `load_prompts` refuses and for a prompt longer than the context.
    """
    prompts = load_prompts(source, limit=limit, per_category=per_category)
    return [to_question(prompt, target) for prompt in prompts]


def to_question(prompt: Prompt, target: TargetModel) -> Question:
    """One prompt's system message, if any, and first user turn as token ids."""
    first_user = next(i for i, m in enumerate(prompt.messages) if m["role"] == "user")
    token_ids = prompt_ids(target.tokenizer, list(prompt.messages[: first_user + 1]))
    if len(token_ids) >= target.max_positions:
        raise UserError(
            f"prompt {prompt.id} has {len(token_ids)} tokens and target {target.name} takes "
            f"{target.max_positions}; shorten it or leave it out"
        )
    return Question(prompt.id, prompt.category, tuple(token_ids))
