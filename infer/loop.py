"""Speculative generation: draft a tree, verify it in one forward, keep what holds.

Committed text and processed positions are kept apart: the last committed token (the bonus) is the
root of the next tree and is processed with it.

Shapes: T prompt positions, N tree nodes, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from heads.base import DraftBudget, Drafter, DraftState, Needs
from heads.cache import TreeCache
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.sampling import Sampling
from infer.target import TargetModel, TargetStates
from infer.verdict import RandomChoices, TargetView
from infer.verify import Rule, check_rule, rule_by_name

PARTS = ("prefill", "target", "draft", "verify", "commit", "other")


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate: `shape` is the chain or static tree that every round drafts.

    A dynamic tree says how large the trees may be that the drafter shapes by its own confidence.
    """

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    rule: str = "greedy"
    shape: TreeShape | DynamicTree = field(default_factory=lambda: chain(3))
    seed: int = 0


@dataclass
class Generation:
    """One request's result.

    `tokens`: the new ids, cut after an end token and at the limit; `from_draft[i]` whether token i
    was an accepted draft. The counts are the rule's, **before** that cut, as serving engines count:
    `rounds` target forwards over a tree (the prefill, which gives the first token, is none),
    `drafted` and `accepted` draft tokens, and per position k (the (k+1)-th draft of a path) the
    rounds that proposed and that accepted one. `seconds` by part, see PARTS.
    """

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    ended: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def total_seconds(self) -> float:
        """Wall clock of the whole request."""
        return sum(self.seconds.values())

    def count(self, tree: TokenTree, accepted: int) -> None:
        """Add one round in which `accepted` drafts of `tree` held."""
        self.rounds += 1
        self.drafted += len(tree.shape) - 1
        self.accepted += accepted
        for per_position, depth in (
            (self.proposed_per_position, tree.shape.depth),
            (self.accepted_per_position, accepted),
        ):
            per_position.extend([0] * (depth - len(per_position)))
            for position in range(depth):
                per_position[position] += 1


def speculative_generate(
    target: TargetModel,
    drafter: Drafter | None,
    prompt_ids: list[int],
    settings: GenerationSettings,
    on_tokens: Callable[[list[int], list[bool]], None] | None = None,
) -> Generation:
    """Continue `prompt_ids` (one request); `drafter` None is plain decoding.

    `on_tokens` gets each round's new ids and which of them were drafts. Lossless rules leave the
    target's distribution as it is; at temperature 0 the text is the target's greedy text. Raises
    UserError for a rule that does not fit, a tree deeper than the drafter, and a prompt that is
    empty or leaves no room in the context.
    """
    return _Request(target, drafter, prompt_ids, settings, on_tokens).run()


class _Request:
    """The state of one request; `run` is the whole loop."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        prompt_ids: list[int],
        settings: GenerationSettings,
        on_tokens: Callable[[list[int], list[bool]], None] | None,
    ) -> None:
        self.target, self.drafter, self.settings = target, drafter, settings
        self.on_tokens = on_tokens or (lambda tokens, from_draft: None)
        self.rule = rule_for(settings, drafter)
        self.needs = drafter.needs if drafter is not None else Needs()
        self.limit = room(target, len(prompt_ids), settings.max_new_tokens)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.choices = RandomChoices(self.generator)
        self.state = DraftState(list(prompt_ids))
        self.result = Generation()
        self._mark = 0.0

    @torch.inference_mode()
    def run(self) -> Generation:
        """Prefill, then rounds until an end token or the limit."""
        self._mark = perf_counter()
        with self._timed("prefill"):
            cache = self._prefill()
        while not self.result.ended and len(self.result.tokens) < self.limit:
            with self._timed("draft"):
                tree = self._draft(cache)
            with self._timed("target"):
                states = self.target.forward_tree(tree, cache, needs=self.needs)
                logits_NV = self.target.logits(states.hidden_BND[0])
                self._refuse_nan(states)
            with self._timed("verify"):
                view = TargetView(logits_NV, self.settings.sampling)
                verdict = self.rule.apply(tree, view, self.choices)
            with self._timed("commit"):
                path = list(verdict.path)
                cache.commit(len(self.state.tokens) - 1, path)
                self._hand_over(states, path)
                self.result.count(tree, len(path) - 1)
                drafts = [int(tree.tokens_N[node]) for node in path[1:]]
                self._append([*drafts, verdict.next_token], len(drafts))
        self.result.seconds["other"] += perf_counter() - self._mark
        return self.result

    def _prefill(self) -> TreeCache:
        """Process the prompt and commit the first new token."""
        prompt = self.state.tokens
        cache = self.target.new_cache(len(prompt) + self.limit + len(self.settings.shape))
        tokens_1T = torch.tensor([prompt], device=self.target.device)
        states = self.target.forward(tokens_1T, cache, needs=self.needs)
        view = TargetView(self.target.logits(states.hidden_BND[0, -1:]), self.settings.sampling)
        greedy = self.settings.sampling.greedy
        first = view.argmax(0) if greedy else self.choices.draw(view.probs(0))
        self._hand_over(states, None)
        self._append([first], 0)
        return cache

    def _draft(self, cache: TreeCache) -> TokenTree:
        """The drafter's tree; the root alone without a drafter or where the context ends."""
        shape = self.settings.shape
        # No path is longer than the budget has nodes, whatever shape the drafter makes of them.
        if self.drafter is None or cache.length + len(shape) > self.target.max_positions:
            return TokenTree(chain(0), torch.tensor(self.state.tokens[-1:]))
        probs = self.settings.sampling.probs if self.rule.needs_draft_probs else None
        budget = DraftBudget(shape, probs, self.generator, self.rule.replacement)
        tree = self.drafter.propose(self.state, budget)
        assert len(tree.shape) <= len(shape), (tree.shape, shape)
        return tree

    def _refuse_nan(self, states: TargetStates) -> None:
        if not bool(torch.isfinite(states.hidden_BND).all()):
            raise UserError(
                f"target {self.target.name} gave a state that is NaN or infinite after "
                f"{len(self.state.tokens)} tokens; load it in float32 or look at its weights"
            )

    def _hand_over(self, states: TargetStates, path: list[int] | None) -> None:
        """Give the drafter the target's states at what was kept (all of the prompt for None)."""
        if self.needs.final_hidden:
            hidden = states.hidden_BND[0]
            self.state.hidden_TD = hidden if path is None else hidden[path]
        if states.captured_BNAD is not None:
            captured = states.captured_BNAD[0]
            self.state.captured_TAD = captured if path is None else captured[path]

    def _append(self, tokens: list[int], num_drafts: int) -> None:
        """Commit tokens; what goes into the result is cut at an end token and at the limit."""
        self.state.tokens.extend(tokens)
        kept = tokens[: self.limit - len(self.result.tokens)]
        for index, token in enumerate(kept):
            if token in self.target.end_tokens:
                kept, self.result.ended = kept[: index + 1], True
                break
        from_draft = [index < num_drafts for index in range(len(kept))]
        self.result.tokens += kept
        self.result.from_draft += from_draft
        self.on_tokens(kept, from_draft)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Count the time inside as `part` and what has passed since the last part as `other`."""
        start = perf_counter()
        self.result.seconds["other"] += start - self._mark
        yield
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self._mark = perf_counter()
        self.result.seconds[part] += self._mark - start


def rule_for(settings: GenerationSettings, drafter: Drafter | None) -> Rule:
    """The settings' rule, checked against drafter and shape before anything is computed."""
    if drafter is None:
        return rule_by_name("greedy" if settings.sampling.greedy else "topk_tree")
    rule = rule_by_name(settings.rule)
    draws = drafter.can_sample and (drafter.draws_trees or settings.shape.is_chain)
    check_rule(rule, settings.sampling, settings.shape, draws)
    if isinstance(settings.shape, DynamicTree):
        check_grows(drafter)
    depth = drafter.max_depth
    if depth is not None and settings.shape.depth > depth:
        raise UserError(
            f"{settings.shape.depth} draft tokens in a row were asked for; this drafter of kind "
            f"{drafter.kind!r} drafts at most {depth}: use a chain or tree of that depth"
        )
    return rule


def check_grows(drafter: Drafter) -> None:
    """Raise UserError for a drafter that cannot shape a tree by its own confidence."""
    if not drafter.can_grow:
        raise UserError(
            f"a dynamic tree was asked for; a drafter of kind {drafter.kind!r} does not shape "
            "trees by its own confidence: use a chain (--chain K) or a static tree "
            "(--tree N, FILE or auto)"
        )


def room(target: TargetModel, prompt_length: int, max_new_tokens: int) -> int:
    """How many new tokens fit: `max_new_tokens`, less where the context ends first."""
    if prompt_length == 0:
        raise UserError("the prompt has no tokens; give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens} given; expected at least 1")
    if prompt_length >= target.max_positions:
        raise UserError(
            f"the prompt has {prompt_length} tokens and target {target.name} takes "
            f"{target.max_positions}; shorten the prompt"
        )
    return min(max_new_tokens, target.max_positions - prompt_length)
