"""A draft model drafts with its cache what it gives in one whole forward."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from heads.base import DraftBudget, DraftState, SharedWeights, TrainingBatch, drafter_class
from heads.draft_model import DraftModel, DraftModelConfig
from heads.errors import UserError
from heads.students import Student, kept_layers
from heads.tree import DynamicTree, TokenTree, TreeShape, chain
from infer.sampling import Sampling
from infer.target import TargetModel

TREE = TreeShape((-1, 0, 0, 1, 1, 2, 3, 3, 6))
PROMPT = [1, 20, 21, 22, 30]
ROUNDS = ([33, 34, 35], [40], [22, 20, 21, 23, 24])
FORMS: list[dict[str, Any]] = [
    {"student": {"layers": 2}},
    {"student": {"layers": 2, "mlp": 24}, "embedding": "own"},
]


def made(target: TargetModel, **fields: Any) -> DraftModel:
    """A student with every tensor moved off its start, the frozen ones excepted."""
    torch.manual_seed(3)
    config = DraftModelConfig.model_validate(fields)
    drafter = DraftModel.create(config, target.identity, target.shared)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter.eval()


@torch.no_grad()
def plain_logits(drafter: DraftModel, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one forward of transformers' own model with the drafter's tensors."""
    model = whole_model(drafter)
    found: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return found


def whole_model(drafter: DraftModel) -> LlamaForCausalLM:
    """The same student as transformers runs it, with transformers' own attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = drafter.config.transformer
    assert fields is not None and drafter.shared is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    tensors = {
        f"model.{name.removeprefix('decoder.')}": tensor
        for name, tensor in drafter.state_dict().items()
        if name.startswith("decoder.")
    }
    if drafter.config.shares:
        tensors["model.embed_tokens.weight"] = drafter.shared.embed_VD
        tensors["lm_head.weight"] = drafter.shared.lm_head_VD
    elif not drafter.tied:
        tensors["lm_head.weight"] = drafter.lm_head.weight
    model.load_state_dict(tensors, strict=not drafter.tied)
    return model.float()


class Recorder:
    """Keeps the logits of every step that drafting takes, by the path that it took them behind."""

    def __init__(self, drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Tensor] = []
        step = drafter.nodes_step

        def recorded(*given: Any, **more: Any) -> Any:
            done = step(*given, **more)
            self.seen.append(drafter.logits(done.output))
            return done

        monkeypatch.setattr(drafter, "nodes_step", recorded)


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    return [int(tree.tokens_N[n]) for n in tree.shape.path(node)[1:]]


@pytest.mark.parametrize("fields", FORMS, ids=["shared", "own"])
@pytest.mark.parametrize("shape", [chain(5), TREE], ids=["chain", "tree"])
def test_logits_behind_the_cache_are_those_of_one_forward(
    fields: dict[str, Any],
    shape: TreeShape,
    tiny_target: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several rounds; each step's logits against the whole text of each node by itself."""
    drafter = made(tiny_target, **fields)
    recorder = Recorder(drafter, monkeypatch)
    state, compared = DraftState(list(PROMPT)), 0
    for new in ROUNDS:
        recorder.seen.clear()
        tree = drafter.propose(state, DraftBudget(shape))
        text = state.tokens
        rows = torch.cat(recorder.seen)
        inner = [n for n in range(1, len(shape)) if shape.children[n]]
        absorbed = len(rows) - len(inner)
        whole = plain_logits(drafter, text)
        torch.testing.assert_close(rows[:absorbed], whole[-absorbed:], rtol=0, atol=1e-5)
        for row, node in zip(rows[absorbed:], inner, strict=True):
            alone = plain_logits(drafter, text + path_tokens(tree, node))[-1]
            torch.testing.assert_close(row, alone, rtol=0, atol=1e-5)
            compared += 1
        state.tokens = [*text, *new]
        assert state.memory.length == len(text)
    assert compared == 3 * len(inner)


@torch.no_grad()
def test_several_requests_draft_as_each_by_itself(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 2})
    together = [DraftState(list(PROMPT)), DraftState([1, 50]), DraftState([1, 30, 31, 32, 33, 34])]
    alone = [DraftState(list(state.tokens)) for state in together]
    for shape in (chain(4), TREE, DynamicTree(9, 4, 3)):
        trees = drafter.propose_batch(together, DraftBudget(shape))
        for tree, state in zip(trees, alone, strict=True):
            one = drafter.propose(state, DraftBudget(shape))
            assert (tree.shape, tree.tokens_N.tolist()) == (one.shape, one.tokens_N.tolist())
        for place in range(3):
            for state in (together[place], alone[place]):
                state.tokens = [*state.tokens, 60 + place, *range(70, 70 + place)]


@torch.no_grad()
def test_a_tree_node_is_its_parents_candidate_of_its_rank(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 2})
    tree = drafter.propose(DraftState(list(PROMPT)), DraftBudget(TREE))
    for node in range(1, len(TREE)):
        *above, token = path_tokens(tree, node)
        best = plain_logits(drafter, PROMPT + above)[-1].topk(3).indices.tolist()
        assert token == best[TREE.ranks[node]]


@torch.no_grad()
def test_a_dynamic_tree_keeps_the_likeliest_of_what_it_expanded(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 2})
    candidates: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(4):
        level: dict[tuple[int, ...], float] = {}
        for path, value in frontier.items():
            logs = plain_logits(drafter, PROMPT + list(path))[-1].log_softmax(-1).topk(2)
            for log, token in zip(logs.values.tolist(), logs.indices.tolist(), strict=True):
                level[(*path, token)] = value + log
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:2])
    wanted = sorted(candidates, key=lambda path: -candidates[path])[:9]
    tree = drafter.propose(DraftState(list(PROMPT)), DraftBudget(DynamicTree(9, 4, 2)))
    got = [tuple(path_tokens(tree, node)) for node in range(1, len(tree.shape))]
    assert sorted(got) == sorted(wanted)


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=8), Sampling(1.3, top_p=0.8)])
@pytest.mark.parametrize("shape", [chain(3), TREE], ids=["chain", "tree"])
@torch.no_grad()
def test_drawn_drafts_tell_the_true_probabilities(
    shape: TreeShape, sampling: Sampling, tiny_target: TargetModel
) -> None:
    drafter = made(tiny_target, student={"layers": 2})
    state, generator = DraftState(list(PROMPT)), torch.Generator().manual_seed(5)
    for new in ROUNDS:
        tree = drafter.propose(state, DraftBudget(shape, sampling.probs, generator, False))
        assert tree.draft_probs_NV is not None
        for node, children in enumerate(tree.shape.children):
            if children:
                text = state.tokens + tree.tokens_N[tree.shape.path(node)[1:]].tolist()
                q_V = sampling.probs(plain_logits(drafter, text)[-1])
                torch.testing.assert_close(tree.draft_probs_NV[node], q_V, rtol=1e-4, atol=1e-5)
                assert bool((q_V[tree.tokens_N[list(children)]] > 0).all())
        state.tokens = [*state.tokens, *new]


TEXT = torch.tensor([[1, 20, 21, 22, 20, 30, 41, 22, 1, 50, 51, 20, 52, 53, 0, 0]])
SEGMENTS = torch.tensor([[1] * 8 + [2] * 6 + [0] * 2])
POSITIONS = torch.tensor([[*range(8), *range(6), 0, 0]])


def batch_of(target: TargetModel) -> TrainingBatch:
    hidden = torch.zeros(1, TEXT.shape[1], target.identity.hidden_size)
    return TrainingBatch(TEXT, torch.ones_like(TEXT).bool(), SEGMENTS, POSITIONS, hidden)


@pytest.mark.parametrize("fields", FORMS, ids=["shared", "own"])
@torch.no_grad()
def test_packed_training_sees_each_conversation_by_itself(
    fields: dict[str, Any], tiny_target: TargetModel
) -> None:
    """Slot t holds the logits that one forward gives behind token t + 1."""
    drafter, found = made(tiny_target, **fields), []

    def record(hidden_BTD: Tensor, weight_VD: Tensor, **given: Any) -> Any:
        assert given["step"] == 0
        found.append(hidden_BTD @ weight_VD.T)

    drafter.train()(batch_of(tiny_target), record)
    (logits_BTV,) = found
    for start, end in ((0, 8), (8, 14)):
        alone = plain_logits(drafter, TEXT[0, start:end].tolist())
        torch.testing.assert_close(logits_BTV[0, start : end - 1], alone[1:], rtol=0, atol=1e-5)


def test_every_parameter_gets_a_gradient_from_nothing_but_padding(tiny_target: TargetModel) -> None:
    for fields in FORMS:
        drafter = made(tiny_target, **fields).train()
        batch = batch_of(tiny_target)
        empty = replace(batch, segments_BT=torch.zeros_like(SEGMENTS))

        def loss(hidden_BTD: Tensor, weight_VD: Tensor, **given: Any) -> Tensor:
            return (hidden_BTD @ weight_VD.T).sum()

        drafter(empty, loss)[0].backward()  # type: ignore[arg-type, operator]
        assert all(p.grad is not None for p in drafter.parameters())


def test_a_cut_student_keeps_the_layers_that_it_names(tiny_target: TargetModel) -> None:
    config = DraftModelConfig(student=Student(layers=2))
    drafter = DraftModel.create(config, tiny_target.identity, tiny_target.shared)
    own, theirs = drafter.decoder.layers, tiny_target.decoder.layers
    for place, layer in enumerate((0, 2)):
        for name, tensor in own[place].state_dict().items():
            assert torch.equal(tensor, theirs[layer].state_dict()[name])
    assert not [name for name in drafter.state_dict() if "embed" in name or "lm_head" in name]


def test_a_student_of_every_layer_is_the_target(tiny_target: TargetModel) -> None:
    for embedding in ("shared", "own"):
        config = DraftModelConfig(student=Student(layers=3), embedding=embedding)
        drafter = DraftModel.create(config, tiny_target.identity, tiny_target.shared)
        with torch.no_grad():
            whole = tiny_target.model(input_ids=torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(plain_logits(drafter.eval(), PROMPT), whole, rtol=0, atol=1e-5)


def test_kept_layers_are_evenly_spaced_with_both_ends() -> None:
    assert kept_layers(4, 10) == [0, 3, 6, 9]
    assert kept_layers(1, 10) == [0]
    for of in range(2, 40):
        for layers in range(2, of + 1):
            kept = kept_layers(layers, of)
            gaps = {b - a for a, b in pairwise(kept)}
            assert (kept[0], kept[-1], len(kept)) == (0, of - 1, layers)
            assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1


def test_a_narrow_mlp_keeps_the_heaviest_neurons(tiny_target: TargetModel) -> None:
    config = DraftModelConfig(student=Student(layers=1, mlp=20))
    drafter = DraftModel.create(config, tiny_target.identity, tiny_target.shared)
    mlp, whole = drafter.decoder.layers[0].mlp, tiny_target.decoder.layers[0].mlp
    weights = (
        whole.gate_proj.weight.norm(dim=1)
        * whole.up_proj.weight.norm(dim=1)
        * whole.down_proj.weight.norm(dim=0)
    )
    kept = sorted(weights.argsort(descending=True)[:20].tolist())
    assert torch.equal(mlp.up_proj.weight, whole.up_proj.weight[kept])
    assert torch.equal(mlp.gate_proj.weight, whole.gate_proj.weight[kept])
    assert torch.equal(mlp.down_proj.weight, whole.down_proj.weight[:, kept])


def test_casts_spare_the_rotary_frequencies(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 2})
    before = drafter.decoder.rotary_emb.inv_freq.clone()
    drafter.to(dtype=torch.bfloat16)
    assert drafter.decoder.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.decoder.rotary_emb.inv_freq, before)


def test_near_the_end_of_its_own_context_it_drafts_nothing(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 1})
    drafter.max_positions = 9
    assert len(drafter.propose(DraftState(list(PROMPT)), DraftBudget(chain(4))).shape) == 5
    assert len(drafter.propose(DraftState(list(PROMPT)), DraftBudget(chain(5))).shape) == 1


@pytest.fixture
def sibling(
    make_model: Callable[..., LlamaForCausalLM],
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> Callable[..., str]:
    """Saves another model with a tokenizer; gives its folder."""

    def save(tokenizer: Any = None, model: Any = None, **changes: Any) -> str:
        (model or make_model(5, **changes)).save_pretrained(tmp_path / "small")
        (tokenizer or make_tokenizer()).save_pretrained(tmp_path / "small")
        return str(tmp_path / "small")

    return save


def test_a_model_from_a_folder_drafts_as_itself(
    sibling: Callable[..., str], make_model: Callable[..., Any], tiny_target: TargetModel
) -> None:
    for tied in (False, True):
        changes = {"num_hidden_layers": 2, "hidden_size": 16, "tie_word_embeddings": tied}
        folder = sibling(**changes)
        config = DraftModelConfig(student=Student(model=folder))
        drafter = DraftModel.create(config, tiny_target.identity, tiny_target.shared).eval()
        assert drafter.tied == tied
        with torch.no_grad():
            own = make_model(5, **changes)(input_ids=torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(plain_logits(drafter, PROMPT), own, rtol=0, atol=1e-5)
        tree = drafter.propose(DraftState(list(PROMPT)), DraftBudget(chain(1)))
        assert int(tree.tokens_N[1]) == int(own[-1].argmax())


def test_a_student_of_another_architecture_drafts(
    sibling: Callable[..., str], tiny_target: TargetModel
) -> None:
    """Qwen3 norms its queries and keys; nothing here knows of it."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=160, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **sizes
    )
    folder = sibling(model=Qwen3ForCausalLM(config).float())
    drafter = DraftModel.create(
        DraftModelConfig(student=Student(model=folder)), tiny_target.identity, tiny_target.shared
    ).eval()
    own = plain_logits(drafter, PROMPT)[-1].argmax()
    tree = drafter.propose(DraftState(list(PROMPT)), DraftBudget(chain(2)))
    assert int(tree.tokens_N[1]) == int(own)


def refused(target: TargetModel, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        DraftModel.create(DraftModelConfig.model_validate(fields), target.identity, target.shared)
    return str(caught.value)


@pytest.mark.parametrize("layers", [0, -1, 4])
def test_a_layer_count_that_the_target_has_not_is_refused(
    layers: int, tiny_target: TargetModel
) -> None:
    message = refused(tiny_target, student={"layers": layers})
    assert f"layers is {layers}" in message and "give 1 to 3" in message


def test_an_mlp_wider_than_the_targets_is_refused(tiny_target: TargetModel) -> None:
    assert "give at most" in refused(tiny_target, student={"layers": 1, "mlp": 65})


def test_other_tokens_are_refused_by_the_first_that_differs(
    sibling: Callable[..., str], make_tokenizer: Callable[..., Any], tiny_target: TargetModel
) -> None:
    other = make_tokenizer()
    state = other.backend_tokenizer.to_str()
    a, b = (tiny_target.tokenizer.convert_ids_to_tokens(id_) for id_ in (100, 101))
    swapped = state.replace(f'"{a}":100', f'"{a}":101').replace(f'"{b}":101', f'"{b}":100')
    assert swapped != state
    other._tokenizer = type(other.backend_tokenizer).from_str(swapped)
    message = refused(tiny_target, student={"model": sibling(tokenizer=other)})
    assert f"token 100 is {b!r} there and {a!r} in the target" in message


def test_a_student_larger_than_the_target_is_refused(
    sibling: Callable[..., str], tiny_target: TargetModel
) -> None:
    folder = sibling(num_hidden_layers=4)
    assert "larger than its target" in refused(tiny_target, student={"model": folder})


def test_a_student_of_another_number_of_logits_is_refused(
    sibling: Callable[..., str], tiny_target: TargetModel
) -> None:
    folder = sibling(num_hidden_layers=1, vocab_size=168)
    assert "logits of 168 tokens" in refused(tiny_target, student={"model": folder})


def test_a_sliding_window_is_refused(sibling: Callable[..., str], tiny_target: TargetModel) -> None:
    config = Qwen3Config(
        vocab_size=160,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    folder = sibling(model=Qwen3ForCausalLM(config).float())
    assert "only full attention" in refused(tiny_target, student={"model": folder})


def test_a_folder_without_a_model_is_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    assert "could not be read" in refused(tiny_target, student={"model": str(tmp_path)})


def test_a_shared_embedding_of_a_model_from_elsewhere_is_refused(
    sibling: Callable[..., str], tiny_target: TargetModel
) -> None:
    fields = {"student": {"model": sibling(num_hidden_layers=1)}, "embedding": "shared"}
    assert "embedding of its own" in refused(tiny_target, **fields)


def test_the_shared_tensors_are_not_trained(tiny_target: TargetModel) -> None:
    drafter = made(tiny_target, student={"layers": 1})
    shared = tiny_target.shared
    drafter.bind(SharedWeights(shared.lm_head_VD, shared.embed_VD))
    size = sum(p.numel() for p in drafter.parameters())
    layer = sum(p.numel() for p in tiny_target.decoder.layers[0].parameters())
    assert size == layer + tiny_target.identity.hidden_size
    assert drafter_class("draft_model") is DraftModel
