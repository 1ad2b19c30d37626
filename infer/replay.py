"""What a drafter would have proposed along a text that was written elsewhere.

In bfloat16 two correct engines soon write different texts, and acceptance differs from text to
text. Along the same text, a difference is the drafter's. Shapes: T positions, D hidden size.
"""

from dataclasses import dataclass

import torch

from heads.base import DraftBudget, Drafter, DraftState
from heads.cache import TreeCache
from heads.tree import chain
from infer.loop import Generation
from infer.target import TargetModel, TargetStates


@torch.inference_mode()
def replay(
    target: TargetModel, drafter: Drafter, prompt_ids: list[int], text_ids: list[int], depth: int
) -> Generation:
    """Count the rounds of a chain of `depth` drafts along `text_ids`, as the loop would count them.

    A draft is accepted where it equals the text. The text's last round may reach behind its end:
    there it is judged by the target's greedy continuation.

        text a b c d, K = 2, drafts after a: b x  ->  1 accepted, the next round starts at c
    """
    ids = [*prompt_ids, *text_ids]
    cache = target.new_cache(len(ids) + depth)
    states = target.forward(torch.tensor([ids], device=target.device), cache, needs=drafter.needs)
    truth = ids + _continuation(target, states, cache, depth - 1)
    result, root, processed = Generation(tokens=list(text_ids)), len(prompt_ids), 0
    state = DraftState(truth[: root + 1])
    while root < len(ids) - 1:
        span = _Span(states, processed, root)
        state.tokens = truth[: root + 1]
        state.hidden_TD = span.hidden if drafter.needs.final_hidden else None
        state.captured_TAD = span.captured
        tree = drafter.propose(state, DraftBudget(chain(depth)))
        accepted = _matching(tree.tokens_N[1:].tolist(), truth[root + 1 :])
        result.count(tree, accepted)
        root, processed = root + accepted + 1, root
    return result


@dataclass(frozen=True)
class _Span:
    """The target's states at the positions from `start` to before `end`."""

    states: TargetStates
    start: int
    end: int

    @property
    def hidden(self) -> torch.Tensor:
        return self.states.hidden_BND[0, self.start : self.end]

    @property
    def captured(self) -> torch.Tensor | None:
        captured = self.states.captured_BNAD
        return None if captured is None else captured[0, self.start : self.end]


def _continuation(
    target: TargetModel, states: TargetStates, cache: TreeCache, count: int
) -> list[int]:
    """The next `count` greedy tokens behind what the cache holds."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = int(target.logits(states.hidden_BND[0, -1]).float().argmax())
        tokens.append(token)
        if len(tokens) < count:
            states = target.forward(torch.tensor([[token]], device=target.device), cache)
    return tokens


def _matching(drafts: list[int], truth: list[int]) -> int:
    """How many drafts in a row equal the text."""
    count = 0
    while count < min(len(drafts), len(truth)) and drafts[count] == truth[count]:
        count += 1
    return count
