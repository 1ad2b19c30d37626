"""Verification rules: which drafts of a tree are kept, and which token follows them.

A rule is a pure function of the tree, the target's view of it, and the random choices it may
make. It never asks for more randomness than it uses, so that an enumeration over every choice
gives its exact law; the tests prove with it that the lossless rules emit the target's
distribution. Here are the rules over deterministic drafts, and the list of all of them; those over
drafts that were drawn at random are in `infer.rejection`.

p is the target's distribution, q the drafter's, both after the same temperature and truncation.
Shapes: N tree nodes (root included), V target vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.errors import UserError, unknown_name
from heads.tree import DynamicTree, TokenTree, TreeShape
from infer.rejection import (
    verify_block,
    verify_recursive_with,
    verify_recursive_without,
    verify_token,
    verify_traversal,
)
from infer.sampling import Sampling
from infer.verdict import Choices, TargetView, Verdict, without

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


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
            probs_V = without(probs_V, tokens[child])
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


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule and what it asks for.

    `lossless`: the emitted text has the target's distribution. `needs_draft_probs`: the drafts
    must be drawn at random and come with their q, the children of a node with or without
    `replacement`. `chains_only`: no tree. `greedy_only`: holds at temperature 0 alone; the others
    become greedy verification there.
    """

    name: str
    describe: str
    apply: Callable[[TokenTree, TargetView, Choices], Verdict]
    lossless: bool = True
    needs_draft_probs: bool = False
    replacement: bool = True
    chains_only: bool = False
    greedy_only: bool = False


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="greedy",
            describe="accept the target's most likely token; equals greedy decoding",
            apply=verify_greedy,
            greedy_only=True,
        ),
        Rule(
            name="token",
            describe="token-wise rejection sampling of a chain drawn from the drafter",
            apply=verify_token,
            needs_draft_probs=True,
            chains_only=True,
        ),
        Rule(
            name="block",
            describe="rejection sampling of a drawn chain as a whole; keeps more than token-wise",
            apply=verify_block,
            needs_draft_probs=True,
            chains_only=True,
        ),
        Rule(
            name="recursive_with",
            describe="rejection sampling along a tree, siblings drawn with replacement",
            apply=verify_recursive_with,
            needs_draft_probs=True,
        ),
        Rule(
            name="recursive_without",
            describe="rejection sampling along a tree, siblings drawn without replacement",
            apply=verify_recursive_without,
            needs_draft_probs=True,
            replacement=False,
        ),
        Rule(
            name="traversal",
            describe="rejection sampling of a tree drawn without replacement, from leaf to root",
            apply=verify_traversal,
            needs_draft_probs=True,
            replacement=False,
        ),
        Rule(
            name="topk_tree",
            describe="sampling from the target along a tree of the drafter's best candidates",
            apply=verify_topk_tree,
        ),
        Rule(
            name="typical",
            describe="typical acceptance (lossy): keeps plausible drafts, changes the distribution",
            apply=verify_typical,
            lossless=False,
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
        return "needs drafts drawn at random with their probabilities, this drafter gives none here"
    return None
