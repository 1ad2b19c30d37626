"""A batch of prompts answered by the target, turn after turn."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from distill.chat import continue_ids, prompt_ids
from distill.generate import batched_generate
from distill.prompts import Prompt
from distill.store import Row
from infer.sampling import Sampling
from infer.target import TargetModel


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are drawn. A conversation is at most `max_length` tokens long."""

    sampling: Sampling
    max_new_tokens: int
    max_length: int
    seed: int


@dataclass
class _Conversation:
    """A conversation as it grows: only ever appended to, so answers keep their token ids."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    turns: int = 0
    finished: bool = True
    open: bool = True

    def append(self, tokens: Sequence[int], masked: bool) -> None:
        self.tokens.extend(tokens)
        self.loss_mask.extend([masked] * len(tokens))

    def opening(self, target: TargetModel) -> list[int] | None:
        """What has to be appended before the next turn's answer."""
        shown = self.prompt.messages[: self.prompt.turns[self.turns]]
        if not self.turns:
            return prompt_ids(target.tokenizer, shown)
        return continue_ids(target.tokenizer, shown, self.answer, target.end_tokens)


def row_seed(seed: int, row: str, turn: int | str) -> int:
    """The seed of a row's turn: it does not depend on the batch that the row is in."""
    digest = hashlib.sha256(f"{seed}\n{row}\n{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def answer_batch(target: TargetModel, prompts: Sequence[Prompt], how: Answering) -> list[Row]:
    """A row a prompt, in their order, without those whose first answer was empty.

    A conversation ends early when a later answer is empty, when the next turn no longer fits, or
    when the answer ended in a way that the template cannot go on from.
    """
    conversations = [_Conversation(prompt) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        _answer_turn(target, [c for c in conversations if c.open], turn, how)
    return [_row(c) for c in conversations if c.turns]


def _answer_turn(
    target: TargetModel, conversations: list[_Conversation], turn: int, how: Answering
) -> None:
    asked, openings = [], []
    for conversation in conversations:
        more = turn < len(conversation.prompt.turns)
        opening = conversation.opening(target) if more else None
        room = how.max_length - len(conversation.tokens) - len(opening or ())
        conversation.open = opening is not None and room > 0
        if opening is not None and conversation.open:
            asked.append(conversation)
            openings.append(opening)
    answers = batched_generate(
        target,
        [c.tokens + opening for c, opening in zip(asked, openings, strict=True)],
        how.max_new_tokens,
        how.sampling,
        [row_seed(how.seed, c.prompt.id, turn) for c in asked],
        how.max_length,
    )
    for conversation, opening, answer in zip(asked, openings, answers, strict=True):
        ended = answer[-1] in target.end_tokens
        text = target.tokenizer.decode(answer[:-1] if ended else answer)
        if not str(text).strip():
            conversation.open = False
            continue
        conversation.append(opening, masked=False)
        conversation.append(answer, masked=True)
        conversation.answer = answer
        conversation.turns += 1
        conversation.finished &= ended


def _row(conversation: _Conversation) -> Row:
    prompt = conversation.prompt
    return Row(
        id=prompt.id,
        category=prompt.category,
        tokens=conversation.tokens,
        loss_mask=conversation.loss_mask,
        turns=conversation.turns,
        finished=conversation.finished,
        prompt=prompt.text,
    )
