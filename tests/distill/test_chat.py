from collections.abc import Callable
from typing import Any

import pytest

from distill.chat import (
    check_template,
    continue_ids,
    mask_from_template,
    masked_runs,
    prompt_ids,
    render_chat,
    user_opening,
)
from heads.errors import UserError
from infer.target import TargetModel

Make = Callable[..., Any]
START, END = "<|im_start|>", "<|im_end|>"
SYSTEM = f"{START}system\nYou are a helpful assistant{END}\n"

# Adds an empty thinking block to the last answer and cuts the thinking out of earlier ones.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = '' %}{% set said = m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = m.content.split('</think>')[-1].strip() %}{% endif %}"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Strips contents, knows no system message, closes an answer without a special token.
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ 'Q: ' if m.role == 'user' else ' A: ' }}{{ m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %} A:{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TOO_WIDE = MARKED.replace("{% generation %}", "{% generation %}<think>\n\n</think>\n\n")


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    roles = ["user", "assistant"]
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def learned(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    return [tokenizer.decode(run) for run in masked_runs(*mask_from_template(tokenizer, messages))]


def test_prompt_holds_the_template_once_and_opens_the_answer(tiny_target: TargetModel) -> None:
    tokenizer = tiny_target.tokenizer
    text = tokenizer.decode(prompt_ids(tokenizer, talk("Hi you")))
    assert text == f"{SYSTEM}{START}user\nHi you{END}\n{START}assistant\n"


def test_special_tokens_are_not_added_twice(make_tokenizer: Make) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, 1)]
    )
    assert tokenizer("a")["input_ids"][0] == 1
    assert prompt_ids(tokenizer, talk("Hi"))[:2].count(1) == 1
    assert mask_from_template(tokenizer, talk("Hi", "Yo"))[0][:2].count(1) == 1


def test_user_opening_ends_where_the_user_begins(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode(user_opening(tokenizer)) == f"{SYSTEM}{START}user\n"
    plain = make_tokenizer(PLAIN)
    assert plain.decode(user_opening(plain)) == "Q:", "the space belongs to the user's first token"


def test_the_next_turn_is_appended_to_what_was_generated(tiny_target: TargetModel) -> None:
    tokenizer = tiny_target.tokenizer
    messages = talk("One") + talk("Two")
    end = tiny_target.end_tokens
    for answer in ([40, 41, 2], [40, 41]):
        rest = continue_ids(tokenizer, messages, answer, end)
        assert rest is not None
        whole = prompt_ids(tokenizer, messages[:1]) + answer + rest
        closed = tokenizer.decode(answer).removesuffix(END)
        assert tokenizer.decode(whole) == (
            f"{SYSTEM}{START}user\nOne{END}\n{START}assistant\n{closed}{END}\n"
            f"{START}user\nTwo{END}\n{START}assistant\n"
        )


def test_an_end_that_the_template_does_not_write_ends_the_conversation(
    tiny_target: TargetModel, make_tokenizer: Make
) -> None:
    messages = talk("One") + talk("Two")
    assert continue_ids(tiny_target.tokenizer, messages, [40, 0], frozenset({0, 2})) is None
    assert continue_ids(make_tokenizer(PLAIN), messages, [40, 2], frozenset({2})) is None


@pytest.mark.parametrize("template", [None, MARKED, MARKED_TOO_WIDE])
def test_only_answers_and_their_end_tokens_are_masked(
    make_tokenizer: Make, template: str | None
) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    messages = talk("user said", "assistant said", "user", " user \n", system="user")
    assert learned(tokenizer, messages) == [f"assistant said{END}", f" user \n{END}"]


def test_an_empty_thinking_block_is_not_learned(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(THINKING)
    messages = talk("Hi", "<think>\nhm\n</think>\n\nHello", "And", "Yes.")
    assert "<think>\n\n</think>\n\nYes." in render_chat(
        tokenizer, messages, generation_prompt=False
    )
    assert learned(tokenizer, messages) == [f"Hello{END}", f"Yes.{END}"]


def test_thinking_that_the_template_keeps_is_learned(make_tokenizer: Make) -> None:
    messages = talk("Hi", "<think>hm</think>Yes.")
    expected = [f"<think>\nhm\n</think>\n\nYes.{END}"]
    assert learned(make_tokenizer(THINKING), messages) == expected


def test_a_template_that_strips_and_closes_with_nothing_is_masked(make_tokenizer: Make) -> None:
    messages = talk("Hi", " Three of them. ", "And", "Yes")
    texts = [text.strip() for text in learned(make_tokenizer(PLAIN), messages)]
    assert texts == ["Three of them.", "Yes"]


def test_templates_of_the_field_pass_the_check(make_tokenizer: Make) -> None:
    for template in (THINKING, PLAIN, MARKED):
        check_template(make_tokenizer(template), turns=2)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "cannot be masked"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "cannot be masked"),
        ("{{ raise_exception('roles') }}", "refused a conversation .* roles"),
        ("{% for m in messages %}", "refused a conversation"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
            "does not open the assistant's answer",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(
    make_tokenizer: Make, template: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_template(make_tokenizer(template))


def test_an_answer_that_is_rewritten_cannot_be_masked(make_tokenizer: Make) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | replace('l', 'L') }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(UserError, match=r"cannot be masked.*where the answer is 'Hello'"):
        mask_from_template(make_tokenizer(template), talk("Hi", "Hello"))


def test_a_conversation_without_answers_has_nothing_to_mask(tiny_target: TargetModel) -> None:
    with pytest.raises(UserError, match="without an assistant message"):
        mask_from_template(tiny_target.tokenizer, talk("Hi"))
