"""Static trees: the best of their size, and the size that pays."""

import itertools
import json
import random
from pathlib import Path

import pytest

from heads.errors import UserError
from heads.tree import TreeShape, chain
from infer.trees import best_static_tree, expected_length, grow_static_tree, load_tree, save_tree

Paths = frozenset[tuple[int, ...]]

HEADS = [[0.33, 0.1, 0.06, 0.04, 0.03], [0.2, 0.09, 0.05, 0.04, 0.03], [0.15, 0.08, 0.04, 0.03]]


def random_accuracies(rng: random.Random, sizes: tuple[int, ...]) -> list[list[float]]:
    """Rates in no order, each row summing to less than 1."""
    rows = []
    for size in sizes:
        weights = [rng.random() for _ in range(size)]
        total = sum(weights) + rng.random()
        rows.append([weight / total for weight in weights])
    return rows


def paths_of(shape: TreeShape) -> list[tuple[int, ...]]:
    return [tuple(shape.ranks[n] for n in shape.path(node)[1:]) for node in range(len(shape))]


def expected_length_ref(paths: Paths, accuracies: list[list[float]]) -> float:
    """The mean over every outcome: at each depth one rank is right, or none."""
    total = 0.0
    options = [[*range(len(row)), None] for row in accuracies]
    for truth in itertools.product(*options):
        chance = 1.0
        for row, rank in zip(accuracies, truth, strict=True):
            chance *= 1 - sum(row) if rank is None else row[rank]
        accepted = sum(truth[: len(path)] == path for path in paths if path)
        total += chance * (1 + accepted)
    return total


def every_tree(accuracies: list[list[float]], num_drafts: int) -> set[Paths]:
    """All sets of that many rank paths that hold every prefix of their members."""
    trees: set[Paths] = {frozenset([()])}
    for _ in range(num_drafts):
        trees = {
            tree | {(*path, rank)}
            for tree in trees
            for path in tree
            if len(path) < len(accuracies)
            for rank in range(len(accuracies[len(path)]))
            if (*path, rank) not in tree
        }
    return trees


@pytest.mark.parametrize("sizes", [(3, 2, 2), (2, 2), (4,), (1, 3, 1)])
@pytest.mark.parametrize("num_drafts", range(5))
def test_no_tree_of_its_size_accepts_more(sizes: tuple[int, ...], num_drafts: int) -> None:
    rng = random.Random(f"{sizes} {num_drafts}")
    for _ in range(3):
        accuracies = random_accuracies(rng, sizes)
        shape = grow_static_tree(accuracies, num_drafts)
        best = max(expected_length_ref(t, accuracies) for t in every_tree(accuracies, num_drafts))
        assert len(shape) == num_drafts + 1
        assert expected_length(shape, accuracies) == pytest.approx(best, abs=1e-12)


def test_expected_length_is_the_mean_over_every_outcome() -> None:
    rng = random.Random(0)
    for _ in range(10):
        accuracies = random_accuracies(rng, (3, 3, 2))
        shape = grow_static_tree(accuracies, 9)
        expected = expected_length_ref(frozenset(paths_of(shape)), accuracies)
        assert expected_length(shape, accuracies) == pytest.approx(expected, abs=1e-12)


def test_expected_length_of_a_chain_is_the_geometric_sum() -> None:
    accuracies = [[0.8], [0.8], [0.8]]
    assert expected_length(chain(3), accuracies) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert expected_length(chain(0), accuracies) == 1


def test_the_example_of_the_docstring_holds() -> None:
    shape = grow_static_tree([[0.6, 0.2], [0.5, 0.1]], 3)
    assert shape.parents == (-1, 0, 0, 1) and shape.ranks == (0, 0, 1, 0)
    assert paths_of(shape) == [(), (0,), (1,), (0, 0)]


@pytest.mark.parametrize("num_drafts", [1, 5, 16, 63])
def test_nodes_go_depth_by_depth_and_siblings_by_rank(num_drafts: int) -> None:
    shape = grow_static_tree(HEADS, num_drafts)
    assert list(shape.depths) == sorted(shape.depths)
    assert all(parent < node for node, parent in enumerate(shape.parents))
    for children in shape.children:
        ranks = [shape.ranks[child] for child in children]
        assert ranks == sorted(set(ranks))
    assert len(set(paths_of(shape))) == num_drafts + 1


def test_a_bigger_tree_holds_every_smaller_one() -> None:
    for size in range(40):
        smaller, bigger = grow_static_tree(HEADS, size), grow_static_tree(HEADS, size + 1)
        assert set(paths_of(smaller)) < set(paths_of(bigger))


def test_a_better_rank_comes_first_even_when_it_is_not_the_lower_one() -> None:
    shape = grow_static_tree([[0.1, 0.4, 0.3]], 2)
    assert shape.ranks == (0, 1, 2)


def test_ties_go_to_the_shallower_node_and_the_lower_rank() -> None:
    tied = [[0.5, 0.5], [1.0]]
    assert paths_of(grow_static_tree(tied, 1)) == [(), (0,)]
    assert paths_of(grow_static_tree(tied, 2)) == [(), (0,), (1,)]
    assert paths_of(grow_static_tree(tied, 3)) == [(), (0,), (1,), (0, 0)]
    nothing_known = grow_static_tree([[0.0, 0.0], [0.0, 0.0]], 4)
    assert paths_of(nothing_known) == [(), (0,), (1,), (0, 0), (0, 1)]


def test_no_drafts_is_a_root_alone() -> None:
    assert grow_static_tree(HEADS, 0) == chain(0)
    assert grow_static_tree([], 0) == chain(0)


@pytest.mark.parametrize(
    ("accuracies", "num_drafts", "complaint"),
    [
        ([[0.5, 0.2], [0.5]], 5, "tree of 5 drafts .* allow 4"),
        ([], 1, "tree of 1 drafts .* allow 0"),
        (HEADS, -1, "tree of -1 drafts"),
        ([[0.5, 1.2]], 1, r"rank 1 at draft step 0 is 1\.2; expected a rate"),
        ([[0.5], [float("nan")]], 1, "rank 0 at draft step 1 is nan"),
        ([[-0.1]], 1, r"is -0\.1"),
        ([[0.3, 0.4, 0.5]], 1, r"sum to 1\.200; .* \(not the cumulative"),
    ],
)
def test_accuracies_that_make_no_tree_are_refused(
    accuracies: list[list[float]], num_drafts: int, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        grow_static_tree(accuracies, num_drafts)


@pytest.mark.parametrize("shape", [chain(4), TreeShape((-1, 0, 0), (0, 0, 7))])
def test_expected_length_refuses_a_node_without_accuracy(shape: TreeShape) -> None:
    with pytest.raises(UserError, match="no accuracy was measured"):
        expected_length(shape, HEADS)


# The size that pays.


def test_the_best_size_has_the_most_tokens_a_second() -> None:
    def round_time_s(nodes: int) -> float:
        return 0.036 if nodes == 1 else 0.045 + 0.0003 * nodes

    shape, table = best_static_tree(HEADS, round_time_s, [4, 8, 16, 32, 64])
    assert [row["num_drafts"] for row in table["rows"]] == [0, 4, 8, 16, 32, 64]
    for row in table["rows"]:
        grown = grow_static_tree(HEADS, row["num_drafts"])
        assert row["nodes"] == len(grown) and row["depth"] == grown.depth
        assert row["round_time_s"] == round_time_s(row["nodes"])
        assert row["expected_length"] == expected_length(grown, HEADS)
        rate = row["expected_length"] / row["round_time_s"]
        assert row["tokens_per_second"] == pytest.approx(rate)
    top = max(table["rows"], key=lambda row: row["tokens_per_second"])
    assert table["best"] == top["num_drafts"] == len(shape) - 1
    assert 0 < table["best"] < 64
    assert shape == grow_static_tree(HEADS, table["best"])
    assert json.loads(json.dumps(table)) == table


def test_no_speculation_wins_when_nodes_are_dear() -> None:
    shape, table = best_static_tree(HEADS, lambda nodes: float(nodes), [4, 8])
    assert shape == chain(0) and table["best"] == 0
    assert table["rows"][0]["tokens_per_second"] == 1


def test_a_free_forward_takes_the_biggest_tree_and_a_tie_the_smaller() -> None:
    assert best_static_tree(HEADS, lambda nodes: 1.0, [4, 8, 16])[1]["best"] == 16
    assert best_static_tree([[0.5, 0.0, 0.0]], lambda nodes: 1.0, [3, 2, 1])[1]["best"] == 1


def test_sizes_that_cannot_be_filled_are_named_not_tried() -> None:
    shape, table = best_static_tree([[0.5, 0.2]], lambda nodes: 1.0, [2, 3, 64, 2])
    assert len(shape) == 3
    assert table["skipped"] == [3, 64]
    assert [row["num_drafts"] for row in table["rows"]] == [0, 2]


# Files.


def test_a_tree_comes_back_from_its_file(tmp_path: Path) -> None:
    for size in (0, 1, 20):
        shape = grow_static_tree(HEADS, size)
        save_tree(shape, tmp_path / "deep" / "tree.json")
        assert load_tree(tmp_path / "deep" / "tree.json") == shape
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tree.json"]
    record = json.loads((tmp_path / "deep" / "tree.json").read_text())
    assert sorted(record) == ["parents", "ranks"] and record["parents"][0] == -1


def test_ranks_may_be_left_out_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text('{"parents": [-1, 0, 0, 1]}')
    assert load_tree(tmp_path / "tree.json") == TreeShape((-1, 0, 0, 1), (0, 0, 1, 0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not json", "could not read a tree from .*tree.json"),
        ("\x00\x01", "could not read"),
        ("[-1, 0]", "expected an object"),
        ("{}", "parents: Field required"),
        ('{"parents": "chain"}', "parents"),
        ('{"parents": [-1, 0], "rank": [0, 0]}', "did you mean 'ranks'"),
        ('{"parents": []}', "holds no tree: a tree starts with one root"),
        ('{"parents": [-1, -1]}', "no second root"),
        ('{"parents": [-1, 2, 0]}', "a parent comes before its child"),
        ('{"parents": [-1, 0], "ranks": [0]}', "1 ranks given for a tree of 2"),
        ('{"parents": [-1, 0, 0], "ranks": [0, 3, 3]}', r"node 0 have ranks \[3, 3\]"),
        ('{"parents": [-1, 0], "ranks": [0, -2]}', "ranks start at 0, given -2"),
    ],
)
def test_a_file_that_holds_no_tree_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(UserError, match=complaint):
        load_tree(tmp_path / "tree.json")


def test_a_missing_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(b"\xff\xfe\x80")
    for path in (tmp_path / "none.json", tmp_path / "tree.json", tmp_path):
        with pytest.raises(UserError, match="could not read a tree"):
            load_tree(path)


def test_a_place_that_cannot_be_written_is_refused_and_left_clean(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "tree.json", tmp_path / "folder"):
        with pytest.raises(UserError, match="could not write"):
            save_tree(chain(2), path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
