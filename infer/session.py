"""From what a user names to what runs: a target, drafters bound to it, and the shape they draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from heads.base import (
    Checkpoint,
    Drafter,
)
from heads.errors import UserError
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.loop import GenerationSettings, check_grows, speculative_generate
from infer.sampling import Sampling
from infer.target import TargetModel
from infer.trees import best_static_tree, grow_static_tree, load_tree
from infer.verdict import TargetView
from infer.verify import rule_by_name

DEFAULT_CHAIN = 10
MAX_CHAIN = 512
DYNAMIC = "dynamic"
AUTO_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class ShapeChoice:
    """What the user asked to draft: a chain of K, a tree, or neither.

    A tree is a size, a file, `auto`, or `dynamic:N`, `dynamic:N:DEPTH`, `dynamic:N:DEPTH:TOPK`.
    """

    chain: int | None = None
    tree: str | None = None

    def __post_init__(self) -> None:
        """One of the two at most."""
        if self.chain is not None and self.tree is not None:
            raise UserError("both --chain and --tree were given; give one of them")
        if self.tree is not None and self.tree.isdigit() and int(self.tree) < 1:
            raise UserError(f"a tree of {self.tree} drafts was asked for; expected at least 1")
        if self.chain is not None and self.chain < 1:
            raise UserError(f"a chain of {self.chain} drafts was asked for; expected at least 1")
        if self.dynamic_sizes:
            DynamicTree(*self.dynamic_sizes)

    @property
    def dynamic_sizes(self) -> list[int]:
        """The numbers of a dynamic tree, as many as were given; empty for anything else."""
        name, *sizes = (self.tree or "").split(":")
        if name != DYNAMIC:
            return []
        if not 1 <= len(sizes) <= 3 or not all(size.isdecimal() for size in sizes):
            raise UserError(
                f"--tree {self.tree} given; expected {DYNAMIC}:N, {DYNAMIC}:N:DEPTH or "
                f"{DYNAMIC}:N:DEPTH:TOPK in whole numbers, such as {DYNAMIC}:60:6:10"
            )
        return [int(size) for size in sizes]


def draft_shape(
    choice: ShapeChoice, checkpoint: Checkpoint, target: TargetModel
) -> tuple[TreeShape | DynamicTree, str]:
    """The shape to draft, and a line that says how it was found where it was not simply given.

    Without a choice: `auto` when the drafter's accuracies are known, else a chain.
    """
    drafter, depth = checkpoint.drafter, checkpoint.drafter.max_depth
    accuracies = checkpoint.calibration.get("accuracies_HK")
    if choice.chain is not None:
        limit = MAX_CHAIN if depth is None else depth
        if choice.chain > limit:
            raise UserError(
                f"a chain of {choice.chain} drafts was asked for; a drafter of kind "
                f"{drafter.kind!r} drafts at most {limit} here"
            )
        return chain(choice.chain), ""
    if choice.dynamic_sizes:
        return dynamic_tree(choice.dynamic_sizes, drafter), ""
    tree = choice.tree or ("auto" if accuracies is not None else None)
    if tree is None:
        return chain(DEFAULT_CHAIN if depth is None else depth), ""
    if tree != "auto" and not tree.isdigit():
        return load_tree(Path(tree)), ""
    if accuracies is None:
        others = f", --tree FILE or --tree {DYNAMIC}:N" if drafter.can_grow else " or --tree FILE"
        raise UserError(
            f"a tree of {tree} was asked for, but this drafter of kind {drafter.kind!r} has no "
            f"measured accuracies to grow it from; give --chain K{others}"
        )
    if tree == "auto":
        return choose_tree(checkpoint, target)
    return grow_static_tree(accuracies, int(tree)), ""


def dynamic_tree(sizes: Sequence[int], drafter: Drafter) -> DynamicTree:
    """A dynamic tree of N, depth and top-k; no deeper than the drafter where no depth was given."""
    check_grows(drafter)
    if len(sizes) > 1 or drafter.max_depth is None:
        return DynamicTree(*sizes)
    return DynamicTree(sizes[0], min(DynamicTree.depth, drafter.max_depth))


def choose_tree(checkpoint: Checkpoint, target: TargetModel) -> tuple[TreeShape, str]:
    """The static tree with the best expected tokens per second here, from measured times."""
    accuracies = checkpoint.calibration["accuracies_HK"]
    times = measure_round_times(target, AUTO_SIZES, repeats=15)
    first_s, last_s = (
        measure_draft_time(target, checkpoint.drafter.core, depth) for depth in (1, len(accuracies))
    )
    level_s = (last_s - first_s) / max(1, len(accuracies) - 1)

    def round_time_s(num_nodes: int) -> float:
        nearest = min(times, key=lambda nodes: abs(nodes - num_nodes))
        if num_nodes == 1:
            return times[nearest]
        depth = grow_static_tree(accuracies, num_nodes - 1).depth
        return times[nearest] + first_s + level_s * (depth - 1)

    _, table = best_static_tree(accuracies, round_time_s, AUTO_SIZES)
    plain, *trees = table["rows"]
    best = max(trees, key=lambda row: row["tokens_per_second"])
    gain = best["tokens_per_second"] / plain["tokens_per_second"]
    note = (
        f"tree auto: {best['num_drafts']} drafts, {best['expected_length']:.2f} tokens expected in "
        f"{1e3 * best['round_time_s']:.0f} ms, {1e3 * plain['round_time_s']:.0f} ms a plain token: "
        f"{gain:.2f} times plain decoding"
    )
    if gain <= 1:
        note += "; no tree is expected to be faster here"
    return grow_static_tree(accuracies, best["num_drafts"]), note


def measure_draft_time(
    target: TargetModel, drafter: Drafter, depth: int, new_tokens: int = 24
) -> float:
    """Mean seconds of one proposal of a chain of `depth`, in the real loop."""
    settings = GenerationSettings(max_new_tokens=new_tokens, shape=chain(depth))
    result = speculative_generate(target, drafter, [0] * 16, settings)
    return result.seconds["draft"] / max(result.rounds, 1)


def measure_round_times(
    target: TargetModel, sizes: Sequence[int], context: int = 256, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of one target forward with logits over 1 + size nodes behind `context`."""
    cache = target.new_cache(context + max(sizes) + 1)
    prompt_1T = torch.zeros(1, context, dtype=torch.long, device=target.device)
    times: dict[int, list[float]] = {size + 1: [] for size in [0, *sizes]}
    with torch.inference_mode():
        target.forward(prompt_1T, cache)
        for repeat in range(repeats + 1):
            for size in [0, *sizes]:
                tree = TokenTree(chain(size), torch.zeros(size + 1, dtype=torch.long))
                start = perf_counter()
                states = target.forward_tree(tree, cache)
                TargetView(target.logits(states.hidden_BND[0]), Sampling()).argmax(0)
                if repeat:
                    times[size + 1].append(perf_counter() - start)
                cache.commit(context, [])
    return {nodes: sorted(values)[len(values) // 2] for nodes, values in times.items()}


def default_rule(temperature: float, rule: str | None) -> str:
    """The named rule, or the lossless one that fits every drafter at this temperature."""
    if rule is None:
        return "greedy" if temperature == 0 else "topk_tree"
    return rule_by_name(rule).name
