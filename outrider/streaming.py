"""`outrider generate`: an answer as it is written, accepted drafts coloured."""

from typing import Any

from rich.console import Console
from rich.text import Text

from heads.errors import UserError
from outrider.measuring import RunOptions, open_contenders

DRAFTED = "green"


class TokenPrinter:
    """Prints tokens as text as soon as their characters are whole."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.tokenizer, self.console = tokenizer, console
        self.tokens: list[int] = []
        self.shown = ""

    def __call__(self, tokens: list[int], from_draft: list[bool]) -> None:
        """Print new tokens, the drafted ones in colour."""
        for token, drafted in zip(tokens, from_draft, strict=True):
            self.tokens.append(token)
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith("\ufffd"):
                continue
            piece, self.shown = text[len(self.shown) :], text
            self.console.print(Text(piece, style=DRAFTED if drafted else ""), end="")


def stream_answer(spec: str, prompt: str, options: RunOptions, console: Console) -> None:
    """Answer one prompt; then say what the drafts were worth."""
    if not prompt.strip():
        raise UserError("the prompt is empty; give the text of a user turn")
    from distill.chat import prompt_ids
    from infer.loop import speculative_generate
    from infer.verify import rule_by_name

    target, contenders = open_contenders([spec], options, console)
    contender = contenders[0]
    rule = rule_by_name(contender.settings.rule)
    if not rule.lossless:
        console.print(f"rule {rule.name} is LOSSY: the target's distribution changes", style="red")
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": prompt}])
    printer = TokenPrinter(target.tokenizer, console)
    result = speculative_generate(target, contender.drafter, ids, contender.settings, printer)
    length = 1 + result.accepted / result.rounds if result.rounds else 1.0
    speed = len(result.tokens) / result.total_seconds
    console.print(
        f"\n\n{len(result.tokens)} tokens, {sum(result.from_draft)} of them drafted; "
        f"acceptance length {length:.2f}, {speed:.1f} tokens/s",
        style="dim",
    )
