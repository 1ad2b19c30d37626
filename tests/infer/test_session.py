"""What a user asks to draft, and what comes of it."""

import pytest

from heads.base import Checkpoint, Contract
from heads.errors import UserError
from heads.tree import DynamicTree
from infer.session import ShapeChoice, draft_shape
from infer.target import TargetModel
from tests.infer.test_loop import Growing, Scripted


def asked(tree: str, target: TargetModel, kind: type[Scripted] = Growing) -> object:
    checkpoint = Checkpoint(kind([]), Contract(target=target.identity))
    return draft_shape(ShapeChoice(tree=tree), checkpoint, target)


@pytest.mark.parametrize(
    ("tree", "sizes"),
    [("dynamic:60", (60, 6, 10)), ("dynamic:30:4", (30, 4, 10)), ("dynamic:8:3:2", (8, 3, 2))],
)
def test_a_dynamic_tree_is_asked_for_by_its_sizes(
    tree: str, sizes: tuple[int, int, int], tiny_target: TargetModel
) -> None:
    assert asked(tree, tiny_target) == (DynamicTree(*sizes), "")


def test_a_dynamic_tree_without_a_depth_is_no_deeper_than_its_drafter(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growing, "max_depth", 4)
    assert asked("dynamic:60", tiny_target) == (DynamicTree(60, 4), "")


def test_only_a_drafter_that_can_shape_a_tree_is_asked_to(tiny_target: TargetModel) -> None:
    with pytest.raises(UserError, match="kind 'scripted' does not shape trees"):
        asked("dynamic:60", tiny_target, Scripted)


def test_a_static_tree_without_accuracies_says_what_there_is_instead(
    tiny_target: TargetModel,
) -> None:
    with pytest.raises(UserError, match="give --chain K, --tree FILE or --tree dynamic:N"):
        asked("8", tiny_target)
    with pytest.raises(UserError, match=r"give --chain K or --tree FILE$"):
        asked("8", tiny_target, Scripted)


@pytest.mark.parametrize("tree", ["dynamic", "dynamic:", "dynamic:1:2:3:4", "dynamic:-1"])
def test_sizes_that_are_none_are_refused(tree: str) -> None:
    with pytest.raises(UserError, match=f"--tree {tree} given; expected dynamic:N"):
        ShapeChoice(tree=tree)
