"""Prompts from the target itself: shown only the opening of a user turn, it writes the question.

A chat model has seen so many user turns that it goes on with one. What it writes is close to what
it was tuned on, which is the traffic that a drafter without better data should learn first.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from distill.chat import special_ids, user_opening
from distill.generate import batched_generate
from distill.store import write_whole
from heads.errors import UserError
from heads.schema import Strict, parse
from infer.degenerate import is_degenerate, repeated_share
from infer.sampling import Sampling
from infer.target import TargetModel

MIN_CHARACTERS = 8
MAX_REPEATED_SHARE = 0.5
# A target is given up when fewer of its last questions than this were usable and new.
MIN_USABLE_SHARE = 0.02
QUESTIONS_LOOKED_AT = 200


class SelfPromptConfig(Strict):
    """How many questions to keep, and how they are drawn."""

    count: int = Field(ge=1)
    max_question_tokens: int = Field(default=96, ge=4)
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)


class QuestionRound(Strict):
    """What came of one batch of questions: the usable ones, and how many were dropped for what."""

    texts: tuple[str, ...]
    written: int
    dropped: dict[str, int]


def write_questions(
    target: TargetModel, config: SelfPromptConfig, seeds: Sequence[int]
) -> QuestionRound:
    """One question a seed, without the broken ones."""
    opening = user_opening(target.tokenizer)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    written = batched_generate(
        target, [opening] * len(seeds), config.max_question_tokens, sampling, seeds
    )
    special = special_ids(target.tokenizer)
    kept, dropped = [], Counter[str]()
    for tokens in written:
        reason = _broken(target, tokens, special)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(_text(target, tokens[:-1]))
    return QuestionRound(texts=tuple(kept), written=len(seeds), dropped=dict(dropped))


def save_round(file: Path, questions: QuestionRound) -> None:
    """Write a round of questions, whole or not at all."""
    text = json.dumps(questions.model_dump(mode="json"), indent=1) + "\n"
    write_whole(file, lambda path: path.write_text(text))


def load_round(file: Path) -> QuestionRound | None:
    """A round that was saved, or None when it was not."""
    if not file.is_file():
        return None
    try:
        return parse(QuestionRound, json.loads(file.read_text()), str(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; remove the data set's folder") from None


def _broken(target: TargetModel, tokens: Sequence[int], special: Iterable[int]) -> str | None:
    """Why a question is not used; None when it is."""
    if not tokens or tokens[-1] not in target.end_tokens:
        return "no_end"
    if set(tokens[:-1]) & set(special):
        return "special_tokens"
    if len(_text(target, tokens[:-1])) < MIN_CHARACTERS:
        return "too_short"
    if is_degenerate(tokens[:-1]) or repeated_share([], tokens[:-1]) > MAX_REPEATED_SHARE:
        return "loop"
    return None


def _text(target: TargetModel, tokens: Sequence[int]) -> str:
    return str(target.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)).strip()


def refuse_unproductive(kept: Sequence[int], written: Sequence[int]) -> None:
    """Raise UserError when hardly any of the last questions was usable and new.

    Both count a round's questions: those kept, and those written.
    """
    recent = tried = 0
    for new, asked in zip(reversed(kept), reversed(written), strict=True):
        recent, tried = recent + new, tried + asked
        if tried >= QUESTIONS_LOOKED_AT:
            break
    if tried >= QUESTIONS_LOOKED_AT and recent < MIN_USABLE_SHARE * tried:
        raise UserError(
            f"of the last {tried} questions that the target wrote {recent} were usable and new; "
            f"expected {MIN_USABLE_SHARE:.0%} or more: raise self_prompt.max_question_tokens, "
            "lower self_prompt.count, or give prompts of your own (prompts=FILE self_prompt=null)"
        )
