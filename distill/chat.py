"""Everything about the chat template: prompts, the next turn, and which tokens are the answer.

Nothing here knows a template. What surrounds a message is found by rendering the template with a
sentinel as the content and cutting at it, so that default system messages, empty thinking blocks
and stripped contents come out as the template has them.

A template's text already holds its special tokens: it is always tokenised without adding any.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from heads.errors import UserError

Message = dict[str, str]
Conversation = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is the assistant's."""

# Starts and ends with a letter (tokenizers split between letters and what surrounds them), holds
# nothing that a template could look for, and does not change when it is stripped.
SENTINEL = "Qzx7Vk0Jwq"
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\b")


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool
) -> str:
    """The conversation as the template writes it, with the opening of an answer on request.

    Raises UserError without a template, or when the template refuses the messages.
    """
    _require_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        roles = ", ".join(message.get("role", "?") for message in messages)
        raise UserError(
            f"the chat template refused a conversation with the roles {roles}: {error}; "
            "expected user and assistant turns in alternation after an optional system message"
        ) from None
    return str(text)


def check_template(tokenizer: PreTrainedTokenizerBase, turns: int = 1) -> None:
    """Raise UserError for a template that is missing, or whose answers cannot be told apart.

    Also for one that does not open the answer when asked to: the target would be left to write
    the template's own tokens, and they would be taken for the answer's.
    """
    user_opening(tokenizer)
    question = [_user("question")]
    answered = [*question, {"role": "assistant", "content": SENTINEL}]
    whole = render_chat(tokenizer, answered, generation_prompt=False)
    before = whole[: _cut(whole)[0]]
    opened = render_chat(tokenizer, question, generation_prompt=True)
    ignored = opened == render_chat(tokenizer, question, generation_prompt=False)
    if ignored and before.removeprefix(opened).strip():
        raise UserError(
            "the chat template does not open the assistant's answer: add_generation_prompt changes "
            f"nothing, and {before.removeprefix(opened)!r} would be missing before the answer"
        )
    if turns > 1:
        continue_ids(tokenizer, [*question, _user("another")], [], frozenset())


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of the conversation so far and the opening of the assistant's answer."""
    return _encode(tokenizer, render_chat(tokenizer, messages, generation_prompt=True))


def user_opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that open a conversation up to the user's first word.

    The template's default system message is part of it. A space at the very end is left to the
    user's first token, as the tokenizer would have it.
    """
    text = render_chat(tokenizer, [_user(SENTINEL)], generation_prompt=True)
    return _encode(tokenizer, text[: _cut(text)[0]].rstrip(" "))


def continue_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generated: Sequence[int],
    end_tokens: frozenset[int],
) -> list[int] | None:
    """Token ids to append to a generated answer so that the next one can be generated.

    `messages`: system and user messages up to and including the next turn, without the
    assistant's; `generated`: the ids of the last answer, of which nothing is tokenised again. When
    it ended with the token that the template closes an answer with, that one is not repeated.

        generated [.., 42, <end>]     ->  [\\n, <start>, user, \\n, .., <start>, assistant, \\n]
        generated [.., 42], cut off   ->  [<end>, \\n, <start>, user, \\n, ..]

    None when it ended with one of the target's `end_tokens` that the template does not write
    there: no server would show the model that text, so the conversation ends.
    """
    text = render_chat(tokenizer, _with_answers(messages), generation_prompt=True)
    following = _ids_from(tokenizer, text, _cut(text, last=True)[1])
    if not generated or generated[-1] not in end_tokens:
        return following
    return following[1:] if following[:1] == [generated[-1]] else None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of every special token, those added under no role included."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}


def mask_from_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> Conversation:
    """Ids and mask of a conversation given as text: true on the assistant's tokens only.

    By the template's own `{% generation %}` markers when it has them, else by rendering it with a
    sentinel in place of each answer. The token that closes an answer belongs to it. Raises
    UserError when no answer is found or the masked tokens do not decode to the answers.
    """
    template = _require_template(tokenizer)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("a conversation without an assistant message has nothing to mask")
    if GENERATION_MARKER.search(template):
        conversation = _mask_by_markers(tokenizer, messages)
        # Markers that take in more than the answer (an empty thinking block) are not followed.
        if _misread(tokenizer, messages, conversation) is None:
            return conversation
    conversation = _mask_by_sentinels(tokenizer, messages)
    if misread := _misread(tokenizer, messages, conversation):
        raise _unmaskable(*misread)
    return conversation


def _require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError(
            "the target's tokenizer has no chat template; expected one, as chat models have: "
            "take an instruction-tuned target, or put a chat_template.jinja into its folder"
        )
    return str(template)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _with_answers(messages: Sequence[Message]) -> list[Message]:
    """A sentinel answer after every user message but the last."""
    out: list[Message] = []
    for index, message in enumerate(messages):
        out.append(message)
        if message["role"] == "user" and index + 1 < len(messages):
            out.append({"role": "assistant", "content": SENTINEL})
    return out


def _cut(text: str, last: bool = False) -> tuple[int, int]:
    """Start and end of the sentinel in a rendered text."""
    start = text.rfind(SENTINEL) if last else text.find(SENTINEL)
    if start < 0:
        raise UserError(
            "the chat template does not write a message's content as it is, so the assistant's "
            f"tokens cannot be masked; it made {text[:200]!r} of the content {SENTINEL!r}"
        )
    return start, start + len(SENTINEL)


def _offsets(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a text, with the characters that each stands for."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} tells no character offsets, so the assistant's tokens "
            "cannot be masked; expected a fast tokenizer (a tokenizer.json in the target's folder)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], encoded["offset_mapping"]


def _ids_from(tokenizer: PreTrainedTokenizerBase, text: str, cut: int) -> list[int]:
    """Ids of text[cut:], as they stand in the whole text wherever no token spans the cut."""
    ids, offsets = _offsets(tokenizer, text)
    first = next((i for i, (_, end) in enumerate(offsets) if end > cut), len(ids))
    if first < len(ids) and offsets[first][0] < cut:
        return _encode(tokenizer, text[cut:])
    return ids[first:]


def _mask_by_markers(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> Conversation:
    render_chat(tokenizer, messages, generation_prompt=False)
    encoded: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]


def _mask_by_sentinels(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> Conversation:
    text = render_chat(tokenizer, messages, generation_prompt=False)
    ids, offsets = _offsets(tokenizer, text)
    special = special_ids(tokenizer)
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not message["content"].strip():
            continue
        start, end = _answer_span(tokenizer, messages, index, text)
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and a < b]
        if not inside:
            raise _unmaskable(message["content"], text[start:end])
        first, last = inside[0], inside[-1]
        if last + 1 < len(ids) and ids[last + 1] in special:
            last += 1
        mask[first : last + 1] = [True] * (last + 1 - first)
    return ids, mask


def _answer_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str
) -> tuple[int, int]:
    """The characters of `text` that the template made of message `index`.

    Everything before and after them is what it also writes around a sentinel.
    """
    probe = [dict(message) for message in messages]
    probe[index]["content"] = SENTINEL
    around = render_chat(tokenizer, probe, generation_prompt=False)
    cut_start, cut_end = _cut(around)
    start = _common(around[:cut_start], text)
    end = len(text) - _common(around[cut_end:][::-1], text[start:][::-1])
    return min(start, _reaching_back(messages[index]["content"], text, end)), end


def _reaching_back(content: str, text: str, end: int) -> int:
    """Where the part of text[:end] starts that equals the end of `content`, white space aside.

    A template that writes a thinking block anew shares its opening tag with any other answer's.
    """
    start = at = end
    wanted = list(_squeeze(content))
    while at and wanted and (text[at - 1].isspace() or text[at - 1] == wanted[-1]):
        at -= 1
        if not text[at].isspace():
            wanted.pop()
            start = at
    return start


def _misread(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], conversation: Conversation
) -> tuple[str, str] | None:
    """The first answer that its masked tokens do not decode to, and what they read; else None.

    Each unbroken run of masked tokens must be one answer, whole; only where the template itself
    left out its beginning (earlier reasoning), the rest of it. White space is not compared:
    templates strip, and a tokenizer may join an answer's first word with a space before it.
    """
    special = special_ids(tokenizer)

    def read(ids: Sequence[int]) -> str:
        kept = [i for i in ids if i not in special]
        return _squeeze(str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)))

    answers = [m["content"] for m in messages if m["role"] == "assistant" and m["content"].strip()]
    runs = masked_runs(*conversation)
    rendered = read(conversation[0])
    for index, answer in enumerate(answers):
        found = read(runs[index]) if index < len(runs) else ""
        wanted = read(_encode(tokenizer, answer))
        shortened = bool(found) and wanted not in rendered and wanted.endswith(found)
        if found != wanted and not shortened:
            return answer, found
    extra = runs[len(answers) :]
    return ("", read(extra[0])) if extra else None


def masked_runs(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """The ids of each unbroken run of masked tokens."""
    pairs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [[token for token, _ in group] for masked, group in pairs if masked]


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _unmaskable(answer: str, found: str) -> UserError:
    return UserError(
        "the chat template cannot be masked: the tokens marked as the assistant's read "
        f"{found[:200]!r} where the answer is {answer[:200]!r}; expected a template that writes "
        "the assistant's content unchanged"
    )
