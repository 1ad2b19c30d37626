"""What is trained is what drafts: unrolled steps against drafting one node at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import (
    DraftBudget,
    DraftState,
    SharedWeights,
    TrainingBatch,
    drafter_class,
    drafter_kinds,
)
from heads.cache import TreeCache
from heads.decoder import (
    decoder_fields,
    spans_of,
    unrolled_attention,
    unrolled_attention_masked,
    unrolled_visibility,
)
from heads.errors import UserError
from heads.recurrent import RecurrentDrafter, Step
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from heads.vocab import VocabMap
from infer.sampling import Sampling
from infer.target import TargetModel

RECURRENT = [k for k in drafter_kinds() if issubclass(drafter_class(k), RecurrentDrafter)]
FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"num_layers": 2}),
    ("eagle", {"num_key_value_heads": 1, "head_dim": 16}),
    ("eagle3", {}),
    ("eagle3", {"norm_before_residual": True}),
    ("eagle3", {"norm_before_fc": True}),
    ("eagle3", {"fc_norm": True}),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"attention_bias": True, "embedding": "own"}),
    ("eagle3", {"aux_hidden_state_layer_ids": (1, 3), "draft_vocab_size": 40}),
    ("eagle3", {"rope": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    ("mtp", {}),
    ("mtp", {"num_modules": 2}),
    ("mtp", {"num_modules": 3, "num_key_value_heads": 1, "head_dim": 16}),
    ("mtp", {"target_state": "after_norm"}),
]
TEXT = torch.tensor([[1, 20, 21, 22, 20, 30, 41, 22, 1, 50, 51, 20, 52, 53, 0, 0]])
SEGMENTS = torch.tensor([[1] * 8 + [2] * 6 + [0] * 2])
POSITIONS = torch.tensor([[*range(8), *range(6), 0, 0]])
STEPS = 4


def made(target: TargetModel, kind: str, **fields: Any) -> RecurrentDrafter:
    """A drafter of the kind with every tensor moved off its start."""
    cls = drafter_class(kind)
    size = fields.get("draft_vocab_size")
    counts = torch.arange(target.identity.vocab_size)
    vocab = VocabMap.from_counts(counts, size, always=[1, 2]) if size else None
    config = cls.Config.model_validate({"kind": kind} | fields)
    torch.manual_seed(3)
    drafter = cls.create(config, target.identity, target.shared, vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    assert isinstance(drafter, RecurrentDrafter)
    return drafter.eval()


def packed(target: TargetModel, drafter: RecurrentDrafter) -> TrainingBatch:
    """Two conversations in a row, each with the states that it has by itself."""
    hidden = torch.zeros(1, TEXT.shape[1], target.identity.hidden_size)
    layers = drafter.needs.captured_layers
    captured = torch.zeros(1, TEXT.shape[1], len(layers), target.identity.hidden_size)
    for row, start, end in spans_of(SEGMENTS):
        states = target.forward(TEXT[row : row + 1, start:end], needs=drafter.needs)
        hidden[row, start:end] = states.hidden_BND[0]
        if states.captured_BNAD is not None:
            captured[row, start:end] = states.captured_BNAD[0]
    ones = torch.ones_like(TEXT).bool()
    return TrainingBatch(TEXT, ones, SEGMENTS, POSITIONS, hidden, captured)


def unrolled(drafter: RecurrentDrafter, batch: TrainingBatch) -> list[Step]:
    plans = drafter.training_plans(batch)
    states, steps = drafter.first_states(batch.hidden_BTD, batch.captured_BTAD), []
    for step in range(STEPS):
        steps.append(drafter.unrolled_step(batch, states, step, plans))
        states = steps[-1].state
    return steps


def drafted(
    drafter: RecurrentDrafter, batch: TrainingBatch, start: int, at: int, step_count: int
) -> list[Step]:
    """The steps of drafting from position `at` of the conversation that begins at `start`."""
    memory = TreeCache(drafter.num_layers, 4)
    captured = batch.captured_BTAD
    first = drafter.first_states(
        batch.hidden_BTD[0, start : at + 1],
        None if captured is None else captured[0, start : at + 1],
    )
    tokens = batch.tokens_BT[0].tolist()
    count = at + 1 - start
    done = drafter.nodes_step(
        tokens[start + 1 : at + 2], first, range(count), [memory], [count], [None], 0
    )
    steps = [Step(done.output[-1:], done.state[-1:])]
    for step in range(1, step_count):
        done = drafter.nodes_step(
            [tokens[at + 1 + step]],
            steps[-1].state,
            [count - 1 + step],
            [memory],
            [1],
            [None],
            step,
        )
        steps.append(done)
    return steps


@pytest.mark.parametrize(("kind", "fields"), FLAGS)
@torch.no_grad()
def test_every_unrolled_step_equals_drafting_one_node_at_a_time(
    kind: str, fields: dict[str, Any], tiny_target: TargetModel
) -> None:
    drafter = made(tiny_target, kind, **fields)
    batch = packed(tiny_target, drafter)
    whole = unrolled(drafter, batch)
    compared = 0
    for _, start, end in spans_of(SEGMENTS):
        for at in range(start, end - 1):
            steps = min(STEPS, end - 1 - at)
            for step, one in enumerate(drafted(drafter, batch, start, at, steps)):
                for ours, theirs in (
                    (whole[step].state[0, at], one.state[0]),
                    (drafter.logits(whole[step].output)[0, at], drafter.logits(one.output)[0]),
                ):
                    size = max(1.0, float(theirs.abs().max()))
                    assert float((ours - theirs).abs().max()) <= 1e-5 * size
                compared += 1
    assert compared > 30


@torch.no_grad()
def test_the_comparison_would_see_a_shifted_position(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, "eagle3")
    batch = packed(tiny_target, drafter)
    whole = unrolled(drafter, batch)
    moved = replace(batch, positions_BT=2 * batch.positions_BT)
    assert (unrolled(drafter, moved)[1].state - whole[1].state).abs().max() > 1e-3


def requests(
    target: TargetModel, drafter: RecurrentDrafter, texts: list[list[int]]
) -> list[DraftState]:
    """Requests just after their prompts were processed."""
    states = []
    for tokens in texts:
        done = target.forward(torch.tensor([tokens[:-1]]), needs=drafter.needs)
        captured = done.captured_BNAD
        states.append(
            DraftState(list(tokens), done.hidden_BND[0], None if captured is None else captured[0])
        )
    return states


def extended(
    target: TargetModel, drafter: RecurrentDrafter, state: DraftState, new: list[int]
) -> None:
    """Commit tokens as the loop does: states of what was processed since are handed over."""
    before = len(state.tokens) - 1
    state.tokens = [*state.tokens, *new]
    done = target.forward(torch.tensor([state.tokens[:-1]]), needs=drafter.needs)
    state.hidden_TD = done.hidden_BND[0, before:]
    if done.captured_BNAD is not None:
        state.captured_TAD = done.captured_BNAD[0, before:]


TREE = TreeShape((-1, 0, 0, 1, 1, 2, 3, 3, 6))
BUDGETS = [chain(0), chain(1), chain(4), TREE, DynamicTree(9, 4, 3)]


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("shape", BUDGETS, ids=["0", "1", "4", "tree", "dynamic"])
def test_several_requests_draft_as_each_by_itself(
    kind: str, shape: TreeShape | DynamicTree, tiny_target: TargetModel
) -> None:
    drafter = made(tiny_target, kind)
    texts = [[1, 20, 21, 22], [1, 30, 31, 20, 21, 40, 41, 42, 43], [1, 50, 51]]
    together = requests(tiny_target, drafter, texts)
    alone = requests(tiny_target, drafter, texts)
    for round_ in range(3):
        trees = drafter.propose_batch(together, DraftBudget(shape))
        ones = [drafter.propose(state, DraftBudget(shape)) for state in alone]
        for tree, one in zip(trees, ones, strict=True):
            assert tree.shape == one.shape
            assert tree.tokens_N.tolist() == one.tokens_N.tolist()
        for index in range(len(texts)):
            new = [60 + index, 61, 62 + round_][: 1 + (index + round_) % 3]
            for state in (together[index], alone[index]):
                extended(tiny_target, drafter, state, new)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_kept_cache_drafts_as_a_fresh_one(kind: str, tiny_target: TargetModel) -> None:
    """Rejected nodes leave nothing behind, and what was accepted is run again with true states."""
    drafter = made(tiny_target, kind)
    (kept,) = requests(tiny_target, drafter, [[1, 20, 21, 22]])
    for new in ([33, 34, 35], [40], [22, 20, 21]):
        drafter.propose(kept, DraftBudget(TREE))
        extended(tiny_target, drafter, kept, new)
        (fresh,) = requests(tiny_target, drafter, [kept.tokens])
        budget = DraftBudget(DynamicTree(12, 3, 4))
        assert same(drafter.propose(kept, budget), drafter.propose(fresh, budget))
        kept.hidden_TD = kept.captured_TAD = None
        extended(tiny_target, drafter, kept, [23])


def same(one: TokenTree, other: TokenTree) -> bool:
    return one.shape == other.shape and one.tokens_N.tolist() == other.tokens_N.tolist()


def log_probs_after(
    target: TargetModel, drafter: RecurrentDrafter, text: list[int], path: list[int]
) -> Tensor:
    """log q [V of the matrix] after `path` behind `text`, one node at a time."""
    (state,) = requests(target, drafter, [text])
    memory = TreeCache(drafter.num_layers, 4)
    first = drafter.first_states(state.hidden_TD, state.captured_TAD)
    count = len(text) - 1
    done = drafter.nodes_step(text[1:], first, range(count), [memory], [count], [None], 0)
    for depth, token in enumerate(path, start=1):
        done = drafter.nodes_step(
            [token], done.state[-1:], [count - 1 + depth], [memory], [1], [None], depth
        )
    return drafter.logits(done.output[-1]).log_softmax(-1)


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    return [int(tree.tokens_N[n]) for n in tree.shape.path(node)[1:]]


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_a_tree_node_is_its_parents_candidate_of_its_rank(
    kind: str, tiny_target: TargetModel
) -> None:
    drafter, text = made(tiny_target, kind), [1, 20, 21, 22, 30]
    (state,) = requests(tiny_target, drafter, [text])
    tree = drafter.propose(state, DraftBudget(TREE))
    for node in range(1, len(TREE)):
        *above, token = path_tokens(tree, node)
        best = log_probs_after(tiny_target, drafter, text, above).topk(3).indices.tolist()
        assert token == best[TREE.ranks[node]]


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 40}], ids=["full", "reduced"])
@torch.no_grad()
def test_a_dynamic_tree_keeps_the_likeliest_of_what_it_expanded(
    fields: dict[str, Any], tiny_target: TargetModel
) -> None:
    """By hand: expand the best two of each level, score every candidate alone, keep nine."""
    drafter, text = made(tiny_target, "eagle3", **fields), [1, 20, 21, 22, 30]
    ids = getattr(drafter, "draft_ids", torch.arange(tiny_target.identity.vocab_size))
    candidates: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(4):
        level: dict[tuple[int, ...], float] = {}
        for path, value in frontier.items():
            scores = log_probs_after(tiny_target, drafter, text, list(path)).topk(2)
            for score, row in zip(scores.values.tolist(), scores.indices.tolist(), strict=True):
                level[(*path, int(ids[row]))] = value + score
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:2])
    wanted = sorted(candidates, key=lambda path: -candidates[path])[:9]
    (state,) = requests(tiny_target, drafter, [text])
    tree = drafter.propose(state, DraftBudget(DynamicTree(9, 4, 2)))
    got = [tuple(path_tokens(tree, node)) for node in range(1, len(tree.shape))]
    assert sorted(got) == sorted(wanted)


@pytest.mark.parametrize(
    ("shape", "replacement"), [(chain(3), True), (TREE, True), (TREE, False)], ids=str
)
@torch.no_grad()
def test_drawn_drafts_tell_the_probabilities_of_each_step(
    shape: TreeShape, replacement: bool, tiny_target: TargetModel
) -> None:
    drafter, text = made(tiny_target, "eagle3", draft_vocab_size=40), [1, 20, 21, 22, 30]
    sampling, generator = Sampling(0.7, top_k=8), torch.Generator().manual_seed(5)
    states = requests(tiny_target, drafter, [text, [1, 50, 51]])
    budget = DraftBudget(shape, sampling.probs, generator, replacement)
    for tree in drafter.propose_batch(states, budget):
        assert tree.shape == TreeShape(shape.parents)
        assert tree.draft_probs_NV is not None
        start = text if int(tree.tokens_N[0]) == 30 else [1, 50, 51]
        for node in {parent for parent in shape.parents if parent >= 0}:
            path = tree.tokens_N[shape.path(node)[1:]].tolist()
            scores = log_probs_after(tiny_target, drafter, start, path)
            full_V = torch.full((tiny_target.identity.vocab_size,), float("-inf"))
            full_V[drafter.draft_ids] = scores
            torch.testing.assert_close(tree.draft_probs_NV[node], sampling.probs(full_V))


def test_visibility_of_a_step_is_the_prefix_and_its_own_earlier_steps() -> None:
    seen = unrolled_visibility(3, 3, torch.device("cpu"))
    assert seen is not None
    assert seen[2].tolist() == [True, True, True, False, False, True, False, False, True]
    assert seen[0].tolist() == [True, False, False, True, False, False, True, False, False]


def test_a_narrow_drafter_with_its_own_embedding_is_made(tiny_target: TargetModel) -> None:
    drafter: Any = made(tiny_target, "eagle3", hidden_size=16, head_dim=4, embedding="own")
    batch = packed(tiny_target, drafter)
    assert unrolled(drafter, batch)[0].state.shape[-1] == 16


@pytest.mark.parametrize("kind", RECURRENT)
def test_float32_training_reads_a_bfloat16_target(kind: str, tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, kind)
    batch = packed(tiny_target, drafter)
    whole = unrolled(drafter, batch)[1].state.detach()
    shared = tiny_target.shared
    drafter.bind(SharedWeights(shared.lm_head_VD.bfloat16(), shared.embed_VD.bfloat16()))
    rough = unrolled(drafter, batch)[1].state.detach()
    assert rough.dtype == torch.float32
    assert float((rough - whole).abs().max()) < 0.05 * float(whole.abs().max())


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_batch_of_nothing_but_padding_gives_every_parameter_a_gradient(
    kind: str, tiny_target: TargetModel
) -> None:
    drafter = made(tiny_target, kind).train()
    batch = packed(tiny_target, drafter)
    empty = replace(batch, segments_BT=torch.zeros_like(batch.segments_BT))
    steps = unrolled(drafter, empty)
    sum(drafter.logits(step.output).sum() for step in steps).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for p in drafter.parameters())


def test_attention_of_short_and_of_long_conversations_is_the_same() -> None:
    torch.manual_seed(0)
    query = torch.randn(6, 7, 8, dtype=torch.float64, requires_grad=True)
    for steps in (1, 2, 4):
        keys, values = (
            [torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
            for _ in range(2)
        )
        found = []
        for attend in (unrolled_attention, unrolled_attention_masked):
            out = attend(query, keys, values, 0.3)
            found.append((out, *torch.autograd.grad(out.square().sum(), [query, *keys, *values])))
        for short, long in zip(*found, strict=True):
            torch.testing.assert_close(short, long)


def test_a_cast_does_not_round_the_rotary_frequencies(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, "eagle3")
    places = torch.tensor([[400]])
    like = torch.zeros(1, 1, 4)
    exact = drafter.rotary(like, places)
    drafter.to(torch.bfloat16)
    for ours, theirs in zip(drafter.rotary(like, places), exact, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_take_over_the_targets_rope_and_sizes(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, "eagle3")
    own = decoder_fields(tiny_target.config)
    assert {k: getattr(drafter.config, k) for k in own} == own
    assert drafter.contract_fields()["rope"] == own["rope"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"aux_hidden_state_layer_ids": (1, 1, 2)}, "not distinct"),
    ("eagle3", {"aux_hidden_state_layer_ids": ()}, "not distinct"),
    ("eagle3", {"aux_hidden_state_layer_ids": (1, 2, 4)}, "out of range.*layers 1 to 3"),
    ("eagle3", {"aux_hidden_state_layer_ids": (0, 2)}, "out of range"),
    ("eagle3", {"draft_vocab_size": 161}, "161.*160"),
    ("eagle3", {"hidden_size": 48}, "drafter.hidden_size 48.*32"),
    ("eagle3", {"target_hidden_size": 64}, "target_hidden_size 64.*32"),
    ("eagle3", {"rope": {"rope_type": "no such"}}, "rope_type.*no such|no such"),
    (
        "eagle3",
        {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "do not follow partial_rotary_factor",
    ),
    ("eagle3", {"hidden_act": "silly"}, "silly"),
    ("eagle3", {"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple"),
    ("eagle", {"hidden_size": 48}, "drafter.hidden_size 48.*32"),
    ("eagle", {"draft_vocab_size": 40}, "whole vocabulary"),
    ("mtp", {"hidden_size": 48}, "drafter.hidden_size 48.*32"),
    ("mtp", {"draft_vocab_size": 40}, "whole vocabulary"),
    ("mtp", {"attention_bias": True}, "always have a bias"),
    ("mtp", {"num_modules": 4}, "num_modules 4.*num_steps 3"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), BAD)
def test_settings_that_do_not_fit_the_target_are_refused(
    kind: str, fields: dict[str, Any], message: str, tiny_target: TargetModel
) -> None:
    cls = drafter_class(kind)
    with pytest.raises(UserError, match=message):
        cls.blank(cls.Config.model_validate({"kind": kind} | fields), tiny_target.identity)


def test_default_layers_are_always_distinct(tiny_target: TargetModel) -> None:
    cls = drafter_class("eagle3")
    for layers, wanted in (
        (30, (2, 15, 27)),
        (3, (1, 2, 3)),
        (4, (1, 2, 3)),
        (2, (1, 2)),
        (1, (1,)),
    ):
        identity = tiny_target.identity.model_copy(update={"num_hidden_layers": layers})
        drafter: Any = cls.blank(cls.Config(kind="eagle3"), identity)
        assert drafter.needs.captured_layers == wanted


def test_feature_noise_is_for_training_only_and_wider_in_short_conversations(
    tiny_target: TargetModel,
) -> None:
    drafter: Any = made(tiny_target, "eagle")
    batch = packed(tiny_target, drafter)
    assert torch.equal(drafter.disturbed(batch.hidden_BTD, batch), batch.hidden_BTD)
    drafter.train()
    noise = (drafter.disturbed(batch.hidden_BTD, batch) - batch.hidden_BTD).abs()
    assert 0 < noise[0, :8].max() <= 0.1 * 512 / 8
    assert 0.1 * 512 / 8 < noise[0, 8:14].max() <= 0.1 * 512 / 6


@torch.no_grad()
def test_an_mtp_slot_at_position_0_reads_no_token(tiny_target: TargetModel) -> None:
    """The first slot of a conversation holds its second token: any other gives the same states."""
    drafter = made(tiny_target, "mtp")
    batch = packed(tiny_target, drafter)
    whole = unrolled(drafter, batch)[0].state
    for place, seen in ((1, False), (9, False), (2, True), (10, True)):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[0, place] += 1
        other = unrolled(drafter, replace(batch, tokens_BT=tokens_BT))[0].state
        assert torch.equal(other, whole) != seen


@torch.no_grad()
def test_an_mtp_module_serves_its_own_step_and_the_last_one_all_beyond(
    tiny_target: TargetModel,
) -> None:
    drafter: Any = made(tiny_target, "mtp", num_modules=2)
    batch = packed(tiny_target, drafter)
    before = unrolled(drafter, batch)
    drafter.mtp_layers[1].final_layernorm.weight.mul_(2)
    after = unrolled(drafter, batch)
    same_states = [torch.equal(a.state, b.state) for a, b in zip(before, after, strict=True)]
    assert same_states == [True, False, False, False]


@torch.no_grad()
def test_an_mtp_head_starts_by_handing_on_the_targets_last_state(tiny_target: TargetModel) -> None:
    """Through its own final norm that is the target's: the start is at the scale of its logits."""
    cls = drafter_class("mtp")
    drafter: Any = cls.create(cls.Config(kind="mtp"), tiny_target.identity, tiny_target.shared)
    norm = tiny_target.model.model.norm
    torch.testing.assert_close(drafter.mtp_layers[0].final_layernorm.weight, norm.weight)
    states = tiny_target.forward(TEXT, needs=drafter.needs)
    assert states.captured_BNAD is not None
    first = drafter.first_states(None, states.captured_BNAD)
    torch.testing.assert_close(norm(first), states.hidden_BND)
