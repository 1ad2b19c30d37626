"""Text that repeats itself: what makes a drafter look better than it is.

A small target loops under greedy decoding, and looking the text up in itself then drafts it
perfectly. Reports give every figure with and without such outputs.
"""

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 3
MIN_TOKENS = 24


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Whether the tail repeats a period of at most 64 tokens, 3 times or more, over 24 or more.

        [.., 7, 8, 9, 7, 8, 9, 7, 8, 9, ..]  with 24 tokens of it at the end  ->  True

    Only the tail counts: a loop that the text has left again is none. Give the tokens without
    their end token.
    """
    return any(_tail_repeats(tokens, period) for period in range(1, MAX_PERIOD + 1))


def _tail_repeats(tokens: Sequence[int], period: int) -> bool:
    """Whether the tail is long enough and every token in it equals the one a period before it."""
    length = max(MIN_REPEATS * period, MIN_TOKENS)
    if len(tokens) < length or tokens[-1] != tokens[-1 - period]:
        return False
    tail = list(tokens[-length:])
    return tail[period:] == tail[:-period]


def repeated_share(prompt_tokens: Sequence[int], tokens: Sequence[int], n: int = 3) -> float:
    """Share of `tokens` that complete an n-gram seen before them in prompt and output.

    n = 2, prompt [1, 2], tokens [3, 1, 2, 3]  ->  the last two do: 0.5
    """
    if not tokens:
        return 0.0
    text = [*prompt_tokens, *tokens]
    first = len(prompt_tokens)
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(n, len(text) + 1):
        gram = tuple(text[end - n : end])
        repeated += end > first and gram in seen
        seen.add(gram)
    return repeated / len(tokens)
