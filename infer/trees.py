"""Tree shapes: static trees grown from measured accuracies, and the cost model that picks a size.

`accuracies_HK[h][k]` is how often the target's token is the candidate of rank k (0 the first
choice) at depth h + 1. The ranks of one depth exclude each other, so a row sums to 1 at most;
depths are taken as independent, which the product along a path stands for.

Shapes: H draft steps, K ranks (rows may differ in length).
"""

import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from heads.errors import UserError
from heads.files import write_text
from heads.schema import Strict, parse
from heads.tree import TreeShape

ROUNDING = 1e-6


class TreeFile(Strict):
    """What a tree file holds; without `ranks`, siblings take them in order."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()


def grow_static_tree(accuracies_HK: Sequence[Sequence[float]], num_drafts: int) -> TreeShape:
    """The tree of `num_drafts` nodes below the root that accepts most (arXiv 2401.10774).

    Grown from the root: the node with the largest product of accuracies along its path comes
    next. A child's product is never above its parent's, so this is the best tree of its size.
    Ties: the shallower node, then the lower ranks. Nodes are numbered depth by depth, siblings by
    rank. Raises UserError when there are not that many nodes.

        accuracies [[.6, .2], [.5, .1]], 3 drafts -> paths (0), (1), (0, 0)
    """
    _check_accuracies(accuracies_HK)
    if num_drafts < 0:
        raise UserError(f"a tree of {num_drafts} drafts was asked for; expected 0 or more")
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    paths: list[tuple[int, ...]] = []
    _push_children(heap, accuracies_HK, 1.0, ())
    while len(paths) < num_drafts:
        if not heap:
            raise UserError(
                f"a tree of {num_drafts} drafts was asked for, but the accuracies "
                f"({len(accuracies_HK)} draft steps) allow {len(paths)}; ask for at most that many"
            )
        negated, _, path = heapq.heappop(heap)
        paths.append(path)
        _push_children(heap, accuracies_HK, -negated, path)
    return _shape_of(paths)


def expected_length(shape: TreeShape, accuracies_HK: Sequence[Sequence[float]]) -> float:
    """Expected tokens a round, bonus included: 1 + the sum of every node's path product."""
    _check_accuracies(accuracies_HK)
    values = [1.0]
    for node, parent in enumerate(shape.parents[1:], start=1):
        step, rank = shape.depths[node] - 1, shape.ranks[node]
        if step >= len(accuracies_HK) or not 0 <= rank < len(accuracies_HK[step]):
            raise UserError(
                f"tree node {node} is candidate {rank} at depth {step + 1}, which no accuracy "
                "was measured for; measure more ranks or draft steps, or take a smaller tree"
            )
        values.append(values[parent] * accuracies_HK[step][rank])
    return sum(values)


def best_static_tree(
    accuracies_HK: Sequence[Sequence[float]],
    round_time_s: Callable[[int], float],
    sizes: Sequence[int],
) -> tuple[TreeShape, dict[str, Any]]:
    """The static tree that emits the most tokens a second, and the table it was picked from.

    `round_time_s(nodes)` is the measured time of a whole round over that many nodes, root
    included; `round_time_s(1)` is a plain decoding step, without the drafter. `sizes` are numbers
    of drafts; 0, no speculation, is always tried. Ties: the smaller tree.

    The table: `rows` (`num_drafts`, `nodes`, `depth`, `expected_length`, `round_time_s`,
    `tokens_per_second`), `best` (its `num_drafts`), `skipped` (sizes with too few candidates).
    """
    possible = _num_possible(accuracies_HK)
    wanted = sorted({0, *sizes})
    tried = [size for size in wanted if size <= possible]
    shapes = {size: grow_static_tree(accuracies_HK, size) for size in tried}
    rows = [_row(shape, accuracies_HK, round_time_s(len(shape))) for shape in shapes.values()]
    best = max(rows, key=lambda row: (row["tokens_per_second"], -row["num_drafts"]))["num_drafts"]
    table = {"rows": rows, "best": best, "skipped": [size for size in wanted if size > possible]}
    return shapes[best], table


def save_tree(shape: TreeShape, path: Path) -> None:
    """Write a tree as JSON, whole or not at all."""
    record = {"parents": list(shape.parents), "ranks": list(shape.ranks)}
    write_text(path, json.dumps(record) + "\n")


def load_tree(path: Path) -> TreeShape:
    """Read a tree written by `save_tree`; UserError for a file that is not one."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"could not read a tree from {path}: {error}; "
            'expected JSON {"parents": [-1, 0, ..], "ranks": [0, 0, ..]}'
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected an object with parents and ranks, found {data!r:.40}")
    record = parse(TreeFile, data, str(path))
    try:
        shape = TreeShape(record.parents, record.ranks)
        _check_ranks(shape)
    except UserError as error:
        raise UserError(f"{path} holds no tree: {error}") from error
    return shape


def _push_children(
    heap: list[tuple[float, int, tuple[int, ...]]],
    accuracies_HK: Sequence[Sequence[float]],
    value: float,
    path: tuple[int, ...],
) -> None:
    """Add the children of a node to the heap; measured accuracies need not fall with the rank."""
    if len(path) < len(accuracies_HK):
        for rank, accuracy in enumerate(accuracies_HK[len(path)]):
            heapq.heappush(heap, (-value * accuracy, len(path) + 1, (*path, rank)))


def _shape_of(paths: list[tuple[int, ...]]) -> TreeShape:
    """The shape of a set of rank paths that holds every prefix of its members."""
    ordered = sorted([(), *paths], key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(ordered)}
    parents = tuple(index[path[:-1]] if path else -1 for path in ordered)
    return TreeShape(parents, tuple(path[-1] if path else 0 for path in ordered))


def _num_possible(accuracies_HK: Sequence[Sequence[float]]) -> int:
    """How many nodes below the root there can be."""
    total, level = 0, 1
    for row in accuracies_HK:
        level *= len(row)
        total += level
    return total


def _row(
    shape: TreeShape, accuracies_HK: Sequence[Sequence[float]], time_s: float
) -> dict[str, Any]:
    """One line of the table of sizes."""
    assert time_s > 0, f"a round over {len(shape)} nodes was timed at {time_s} s"
    length = expected_length(shape, accuracies_HK)
    return {
        "num_drafts": len(shape) - 1,
        "nodes": len(shape),
        "depth": shape.depth,
        "expected_length": length,
        "round_time_s": time_s,
        "tokens_per_second": length / time_s,
    }


def _check_accuracies(accuracies_HK: Sequence[Sequence[float]]) -> None:
    """Rates between 0 and 1 whose row sums do not pass 1."""
    for step, row in enumerate(accuracies_HK):
        for rank, accuracy in enumerate(row):
            if not 0 <= accuracy <= 1:
                raise UserError(
                    f"the accuracy of rank {rank} at draft step {step} is {accuracy}; "
                    "expected a rate between 0 and 1"
                )
        if sum(row) > 1 + ROUNDING:
            raise UserError(
                f"the accuracies at draft step {step} sum to {sum(row):.3f}; expected at most 1, "
                "each rank's own rate (not the cumulative top-k accuracy)"
            )


def _check_ranks(shape: TreeShape) -> None:
    """Siblings are different candidates of their parent."""
    for node, children in enumerate(shape.children):
        ranks = [shape.ranks[child] for child in children]
        if min(ranks, default=0) < 0 or len(set(ranks)) < len(ranks):
            raise UserError(
                f"the children of node {node} have ranks {ranks}; expected different ones from 0 up"
            )
