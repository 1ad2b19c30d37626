"""Verification rules: which drafts of a tree are kept, and which token follows them.

A rule is a pure function of the tree, the target's view of it, and the random choices it may
make. It never asks for more randomness than it uses, so that an enumeration over every choice
gives its exact law; the tests prove with it that the lossless rules emit the target's
distribution.

p is the target's distribution, q the drafter's, both after the same temperature and truncation.
Shapes: N tree nodes (root included), V target vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heads.errors import UserError, unknown_name
from heads.tree import DynamicTree, TokenTree, TreeShape
from infer.sampling import Sampling, draw

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


class Choices(Protocol):
    """The randomness a rule may use."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, probs_V: Tensor) -> int:
        """A token id drawn from probs [V]."""
        ...


class RandomChoices:
    """Choices from a generator on the CPU: the same seed makes the same choices on any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        """True with this probability; 0 never, 1 always."""
        return float(self._uniform()) < probability

    def draw(self, probs_V: Tensor) -> int:
        """A token id drawn from probs [V], never one of probability zero."""
        return int(draw(probs_V, self._uniform().to(probs_V.device)))

    def _uniform(self) -> Tensor:
        return torch.rand((), dtype=torch.float64, generator=self.generator)


class TargetView:
    """What a rule sees of the target's forward over a tree.

    Row i of `logits_NV` predicts the token after node i.
    """

    def __init__(self, logits_NV: Tensor, sampling: Sampling) -> None:
        self._logits_NV = logits_NV
        self._sampling = sampling
        self._argmax_N: list[int] | None = None
        self._probs_V: dict[int, Tensor] = {}

    def argmax(self, node: int) -> int:
        """The most likely token after a node, the lowest id among ties (all nodes at once)."""
        if self._argmax_N is None:
            logits_NV = self._logits_NV
            if logits_NV.dtype in (torch.bfloat16, torch.float16):
                logits_NV = logits_NV.float()  # exact, and several times faster on a CPU
            self._argmax_N = logits_NV.argmax(-1).tolist()
        return self._argmax_N[node]

    def probs(self, node: int) -> Tensor:
        """The target's distribution p [V] after a node, computed at its first use and kept."""
        if node not in self._probs_V:
            self._probs_V[node] = self._sampling.probs(self._logits_NV[node])
        return self._probs_V[node]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path`: the accepted nodes, root (0) first, ascending; `next_token`: what follows them.

    The next token is the correction after a rejected draft, the bonus when there was none left.
    """

    path: tuple[int, ...]
    next_token: int


def verify_greedy(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Accept the child that is the target's most likely token: the text is greedy decoding's."""
    tokens, path = tree.tokens_N.tolist(), [0]
    while True:
        wanted = target.argmax(path[-1])
        matching = (c for c in tree.shape.children[path[-1]] if tokens[c] == wanted)
        child = next(matching, None)
        if child is None:
            return Verdict(tuple(path), wanted)
        path.append(child)


def verify_token(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Token-wise rejection sampling over a chain (arXiv 2211.17192, algorithm 1).

    A draft x drawn from q is accepted with min(1, p(x) / q(x)); after a rejection the next token
    is drawn from norm(max(p - q, 0)), after the last acceptance from p.
    """
    assert tree.shape.is_chain, f"token-wise rejection was given the tree {tree.shape.parents}"
    tokens = tree.tokens_N.tolist()
    last = len(tokens) - 1
    for node, token in enumerate(tokens[1:]):
        assert tree.draft_probs_NV is not None, "drafts came without the q they were drawn from"
        p_V = target.probs(node)
        q_V = tree.draft_probs_NV[node].to(p_V.device)
        p, q = float(p_V[token]), float(q_V[token])
        assert q > 0, f"draft token {token} at node {node + 1} has probability {q} in its own q"
        if not choices.accept(min(1.0, p / q)):
            # Where p equals q up to rounding nothing remains, and p itself is the residual's limit.
            residual_V = _normalised((p_V - q_V).clamp(min=0), instead=p_V)
            return Verdict(tuple(range(node + 1)), choices.draw(residual_V))
    return Verdict(tuple(range(last + 1)), choices.draw(target.probs(last)))


def verify_topk_tree(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Recursive rejection over deterministic children, in sibling order (arXiv 2406.16858).

    A child x is accepted with P(x), where P starts as p; a rejected one leaves P, which is
    renormalised for its next sibling and, after the last one, for the token that follows. This is
    drawing from p one token at a time, so any tree will do that was fixed before.
    """
    tokens, path = tree.tokens_N.tolist(), [0]
    while True:
        probs_V, accepted = target.probs(path[-1]), None
        for child in tree.shape.children[path[-1]]:
            if choices.accept(min(1.0, float(probs_V[tokens[child]]))):
                accepted = child
                break
            probs_V = _without(probs_V, tokens[child])
        if accepted is None:
            return Verdict(tuple(path), choices.draw(probs_V))
        path.append(accepted)


def verify_typical(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Typical acceptance (arXiv 2401.10774, section 2.3.1): LOSSY, the law is not the target's.

    A draft x is accepted when p(x) > min(epsilon, delta * exp(-H(p))) and its parent was; of the
    accepted paths the longest is kept, of equally long ones the likeliest, then the first. The
    root stands for the paper's first token, which is accepted whatever it is. The paper takes that
    token greedily; here the token after the path is drawn from p, so that what no draft touched
    keeps the target's distribution. At temperature 0 this is greedy verification.
    """
    tokens, shape = tree.tokens_N.tolist(), tree.shape
    log_probs = {0: 0.0}
    thresholds: dict[int, float] = {}
    for node, parent in enumerate(shape.parents[1:], start=1):
        if parent not in log_probs:
            continue
        p_V = target.probs(parent)
        if parent not in thresholds:
            thresholds[parent] = typical_threshold(p_V)
        p = float(p_V[tokens[node]])
        if p > thresholds[parent]:
            log_probs[node] = log_probs[parent] + math.log(p)
    best = max(log_probs, key=lambda node: (shape.depths[node], log_probs[node], -node))
    return Verdict(tuple(shape.path(best)), choices.draw(target.probs(best)))


def typical_threshold(p_V: Tensor) -> float:
    """min(epsilon, delta * exp(-H(p))) of p [V]: the flatter p is, the less a draft must reach."""
    entropy = float(torch.special.entr(p_V.double()).sum())
    return min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))


def _normalised(weights_V: Tensor, instead: Tensor) -> Tensor:
    """Weights [V] divided by their sum; `instead` when there is nothing to divide."""
    total = weights_V.sum(dtype=torch.float64)
    return weights_V / total if bool(total > 0) else instead


def _without(probs_V: Tensor, token: int) -> Tensor:
    """Probabilities [V] given that it is not `token`."""
    others_V = probs_V.clone()
    others_V[token] = 0.0
    return _normalised(others_V, instead=probs_V)


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule and what it asks for.

    `lossless`: the emitted text has the target's distribution. `needs_draft_probs`: the drafts
    must be drawn at random and come with their q. `chains_only`: no tree. `greedy_only`: holds at
    temperature 0 alone; the others become greedy verification there.
    """

    name: str
    lossless: bool
    needs_draft_probs: bool
    chains_only: bool
    greedy_only: bool
    describe: str
    apply: Callable[[TokenTree, TargetView, Choices], Verdict]


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="greedy",
            lossless=True,
            needs_draft_probs=False,
            chains_only=False,
            greedy_only=True,
            describe="accept the target's most likely token; equals greedy decoding",
            apply=verify_greedy,
        ),
        Rule(
            name="token",
            lossless=True,
            needs_draft_probs=True,
            chains_only=True,
            greedy_only=False,
            describe="token-wise rejection sampling of a chain drawn from the drafter",
            apply=verify_token,
        ),
        Rule(
            name="topk_tree",
            lossless=True,
            needs_draft_probs=False,
            chains_only=False,
            greedy_only=False,
            describe="sampling from the target along a tree of the drafter's best candidates",
            apply=verify_topk_tree,
        ),
        Rule(
            name="typical",
            lossless=False,
            needs_draft_probs=False,
            chains_only=False,
            greedy_only=False,
            describe="typical acceptance (lossy): keeps plausible drafts, changes the distribution",
            apply=verify_typical,
        ),
    )
}


def rule_by_name(name: str) -> Rule:
    """The rule of this name; UserError names the nearest one."""
    if name not in RULES:
        raise unknown_name("verification rule", name, RULES)
    return RULES[name]


def check_rule(
    rule: Rule, sampling: Sampling, shape: TreeShape | DynamicTree, drafter_has_probs: bool
) -> None:
    """Raise a UserError that names the rules that fit, when this one does not.

    At temperature 0 every rule is allowed: p is a one-hot there, and all become greedy.
    """
    misfit = _misfit(rule, sampling, shape, drafter_has_probs)
    if misfit is None:
        return
    fitting = [
        other.name if other.lossless else f"{other.name} (lossy)"
        for other in RULES.values()
        if _misfit(other, sampling, shape, drafter_has_probs) is None
    ]
    raise UserError(f"verification rule {rule.name!r} {misfit}; use one of: {', '.join(fitting)}")


def _misfit(
    rule: Rule, sampling: Sampling, shape: TreeShape | DynamicTree, drafter_has_probs: bool
) -> str | None:
    """Why the rule does not fit, or None."""
    if rule.greedy_only and not sampling.greedy:
        return f"takes the most likely token, temperature {sampling.temperature:g} samples"
    if rule.chains_only and not shape.is_chain:
        given = str(shape) if isinstance(shape, DynamicTree) else f"tree of {len(shape)} nodes"
        return f"verifies chains only, given a {given}"
    if rule.needs_draft_probs and isinstance(shape, DynamicTree):
        return f"needs drafts drawn at random, those of a {shape} are the drafter's best candidates"
    if rule.needs_draft_probs and not drafter_has_probs:
        return "needs drafts drawn at random with their probabilities, this drafter gives none"
    return None
