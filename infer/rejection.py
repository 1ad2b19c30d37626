"""Verification rules over drafts that were drawn at random: all rejection sampling, all lossless.

A draft x that was drawn from q is weighed with p(x) / q(x). The rules differ in what they weigh:
each draft by itself, its siblings in turn, or a path as a whole.

p is the target's distribution, q the drafter's, both after the same temperature and truncation.
Shapes: N tree nodes (root included), G drafts of a chain, V target vocabulary.
"""

from itertools import accumulate

import torch
from torch import Tensor

from heads.tree import TokenTree
from infer.verdict import Choices, TargetView, Verdict, normalised, without


def verify_token(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Token-wise rejection sampling over a chain (arXiv 2211.17192, algorithm 1).

    A draft x drawn from q is accepted with min(1, p(x) / q(x)); after a rejection the next token
    is drawn from norm(max(p - q, 0)), after the last acceptance from p.
    """
    assert tree.shape.is_chain, f"token-wise rejection was given the tree {tree.shape.parents}"
    return verify_recursive_with(tree, target, choices)


def verify_block(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Block verification of a chain (arXiv 2403.10444, algorithm 2).

    With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the first i drafts are good with
    h_i = keep_chance(S_i, w_i), where S_i = sum(max(w_i p - q, 0)) after them; all G drafts with
    h_G = w_G. Every i is tried on its own and the greatest good one is kept, so that a draft can
    hold where an earlier one alone would not. The next token is drawn from
    norm(max(w_i p - q, 0)), after all drafts from p.
    """
    assert tree.shape.is_chain, f"block verification was given the tree {tree.shape.parents}"
    last = len(tree.shape) - 1
    p_NV = target.all_probs()
    if last == 0:
        return Verdict((0,), choices.draw(p_NV[0]))
    q_GV = torch.stack([_draft_probs(tree, node, p_NV) for node in range(last)])
    drafts_G1 = tree.tokens_N[1:, None].to(p_NV.device)
    taken = zip(p_NV[:-1].gather(1, drafts_G1), q_GV.gather(1, drafts_G1), strict=True)
    ratios = [_ratio(float(p), float(q)) for p, q in taken]
    weights = list(accumulate(ratios, lambda weight, ratio: min(1.0, weight * ratio), initial=1.0))
    rest_GV = _rest(p_NV.new_tensor(weights[:-1])[:, None], p_NV[:-1], q_GV)
    sums = rest_GV.sum(-1, dtype=torch.float64).tolist()
    if choices.accept(weights[last]):
        return Verdict(tuple(range(last + 1)), choices.draw(p_NV[last]))
    tried = range(last - 1, 0, -1)
    kept = next((i for i in tried if choices.accept(keep_chance(sums[i], weights[i]))), 0)
    next_V = normalised(rest_GV[kept], instead=p_NV[kept])
    return Verdict(tuple(range(kept + 1)), choices.draw(next_V))


def verify_recursive_with(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Recursive rejection, siblings drawn with replacement (arXiv 2305.09781, algorithm 2).

    The children of an accepted node in turn: x is accepted with min(1, P(x) / q(x)), where P
    starts as p; a rejection makes it norm(max(P - q, 0)). The token that follows is drawn from P.
    """
    return _recursive(tree, target, choices, replacement=True)


def verify_recursive_without(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Recursive rejection, siblings drawn without replacement (arXiv 2402.12374, algorithm 2).

    As with replacement, but each sibling has its own q: that of the first, less those before it.
    """
    return _recursive(tree, target, choices, replacement=False)


def _recursive(tree: TokenTree, target: TargetView, choices: Choices, replacement: bool) -> Verdict:
    tokens, path = tree.tokens_N.tolist(), [0]
    while True:
        p_V, accepted = target.probs(path[-1]), None
        children = tree.shape.children[path[-1]]
        q_V = _draft_probs(tree, path[-1], p_V) if children else p_V
        for child in children:
            token = tokens[child]
            if choices.accept(min(1.0, _ratio(float(p_V[token]), float(q_V[token])))):
                accepted = child
                break
            # Where p equals q up to rounding nothing remains, and p itself is the residual's limit.
            p_V = normalised(_rest(1.0, p_V, q_V), instead=p_V)
            if not replacement:
                q_V = without(q_V, token)
        if accepted is None:
            return Verdict(tuple(path), choices.draw(p_V))
        path.append(accepted)


def verify_traversal(tree: TokenTree, target: TargetView, choices: Choices) -> Verdict:
    """Traversal verification of a tree drawn without replacement (arXiv 2505.12398).

    Along a path w(child) = min(1, w(parent) P(x) / Q(x)), from w = 1 at the root. The first leaf
    in depth-first order is accepted, with all above it, with its w, and the next token drawn from
    its P. Else it is cut off, and its parent has from there on
    S = sum(max(w P - Q, 0)), P = max(w P - Q, 0) / S, w = keep_chance(S, w), and Q without x; with
    its last child cut off it is a leaf itself. The root's w stays 1. On a chain this is block
    verification.
    """
    tokens = tree.tokens_N.tolist()
    left = [list(children) for children in tree.shape.children]
    path, weights = [0], [1.0]
    p_left: dict[int, Tensor] = {}
    q_left: dict[int, Tensor] = {}
    while True:
        node, weight = path[-1], weights[-1]
        p_V = p_left.setdefault(node, target.probs(node))
        if left[node]:
            child = left[node][0]
            q_V = q_left.setdefault(node, _draft_probs(tree, node, p_V))
            ratio = _ratio(float(p_V[tokens[child]]), float(q_V[tokens[child]]))
            path.append(child)
            weights.append(min(1.0, weight * ratio))
            continue
        if choices.accept(weight):
            return Verdict(tuple(path), choices.draw(p_V))
        path.pop()
        weights.pop()
        node, weight = path[-1], weights[-1]
        rest_V = _rest(weight, p_left[node], q_left[node])
        weights[-1] = keep_chance(float(rest_V.sum(dtype=torch.float64)), weight)
        p_left[node] = normalised(rest_V, instead=p_left[node])
        q_left[node] = without(q_left[node], tokens[left[node].pop(0)])


def keep_chance(rest: float, weight: float) -> float:
    """S / (S + 1 - w): the chance of a node whose child was cut off.

    Where w is 1 it is 1, for S = 0 as well: p equals q there, and nothing was cut off.
    """
    return rest / (rest + (1.0 - weight)) if weight < 1 else 1.0


def _rest(weight: float | Tensor, p: Tensor, q: Tensor) -> Tensor:
    """max(w p - q, 0): what of the target's law the drafts have not covered."""
    return (weight * p - q).clamp(min=0)


def _ratio(p: float, q: float) -> float:
    """p(x) / q(x) of a draft x, which its own q can have given."""
    assert q > 0, "a draft has probability 0 in the q it is said to be drawn from"
    return p / q


def _draft_probs(tree: TokenTree, node: int, like: Tensor) -> Tensor:
    """The q [V] that the first child of a node was drawn from."""
    assert tree.draft_probs_NV is not None, "drafts came without the q they were drawn from"
    return tree.draft_probs_NV[node].to(like.device)
