"""Tree shapes and token trees."""

import itertools
import random

import pytest
import torch

from heads.errors import UserError
from heads.tree import TokenTree, TreeShape, chain


def random_shape(rng: random.Random, size: int) -> TreeShape:
    return TreeShape((-1, *(rng.randrange(node) for node in range(1, size))))


def test_the_example_of_the_docstring_holds() -> None:
    shape = TreeShape((-1, 0, 0, 1))
    assert shape.depths == (0, 1, 1, 2) and shape.depth == 2
    assert shape.children == ((1, 2), (3,), (), ())
    assert shape.ancestors_NN[3].tolist() == [True, True, False, True]
    assert shape.path(3) == [0, 1, 3] and shape.path(0) == [0]
    assert len(shape) == 4


def test_a_node_sees_itself_and_its_ancestors_alone() -> None:
    rng = random.Random(0)
    for size in (1, 2, 5, 30):
        shape = random_shape(rng, size)
        for node in range(size):
            path = shape.path(node)
            assert path[0] == 0 and path[-1] == node and path == sorted(path)
            assert all(shape.parents[b] == a for a, b in itertools.pairwise(path))
            assert shape.depths[node] == len(path) - 1
            assert [n for n in range(size) if shape.ancestors_NN[node, n]] == path
            assert all(shape.parents[child] == node for child in shape.children[node])
        assert sum(len(children) for children in shape.children) == size - 1


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_a_chain_is_a_tree_of_width_one(drafts: int) -> None:
    shape = chain(drafts)
    assert shape.is_chain and shape.depth == drafts and len(shape) == drafts + 1
    assert torch.equal(shape.ancestors_NN, torch.ones(drafts + 1, drafts + 1).tril().bool())
    assert shape.ranks == (0,) * (drafts + 1)


def test_a_branching_tree_is_no_chain() -> None:
    assert not TreeShape((-1, 0, 0)).is_chain
    assert not TreeShape((-1, 0, 1, 1)).is_chain


def test_siblings_take_their_ranks_in_order_unless_told() -> None:
    assert TreeShape((-1, 0, 0, 1, 0)).ranks == (0, 0, 1, 0, 2)
    assert TreeShape((-1, 0, 0), (0, 2, 5)).ranks == (0, 2, 5)


def test_shapes_are_equal_by_parents_and_ranks() -> None:
    assert TreeShape((-1, 0, 0)) == TreeShape((-1, 0, 0), (0, 0, 1))
    assert hash(TreeShape((-1, 0, 0))) == hash(TreeShape((-1, 0, 0), (0, 0, 1)))
    assert TreeShape((-1, 0, 0)) != TreeShape((-1, 0, 0), (0, 0, 2))
    assert TreeShape((-1, 0, 0)) != TreeShape((-1, 0, 1))
    assert chain(3) is chain(3)


@pytest.mark.parametrize(
    ("parents", "complaint"),
    [
        ((), "starts with one root"),
        ((0,), "starts with one root"),
        ((0, -1), "starts with one root"),
        ((-1, -1), "node 1 has parent -1"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 2, 0), "node 1 has parent 2"),
        ((-1, 0, -2), "node 2 has parent -2"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TreeShape(parents)


def test_ranks_of_another_length_are_refused() -> None:
    with pytest.raises(UserError, match="2 ranks given for a tree of 3 nodes"):
        TreeShape((-1, 0, 0), (0, 1))


def test_a_chain_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="chain of -1 drafts"):
        chain(-1)


def test_the_tokens_of_a_tree_fit_its_shape() -> None:
    TokenTree(chain(2), torch.tensor([5, 6, 7]))
    with pytest.raises(AssertionError):
        TokenTree(chain(2), torch.tensor([5, 6]))
