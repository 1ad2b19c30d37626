"""Every file under heads/ that holds a drafter keeps the protocol. No kind is named here."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.align import draft_targets
from heads.base import (
    Checkpoint,
    Contract,
    DraftBudget,
    Drafter,
    DraftState,
    StepLoss,
    TrainingBatch,
    check_contract,
    drafter_class,
    drafter_kinds,
    load_drafter,
    save_drafter,
)
from heads.errors import UserError
from heads.tree import TreeShape, chain
from heads.vocab import VocabMap
from infer.loop import GenerationSettings, rule_for, speculative_generate
from infer.sampling import Sampling
from infer.target import TargetModel

KINDS = drafter_kinds()
TRAINABLE = [kind for kind in KINDS if drafter_class(kind).trainable]
TREE = TreeShape((-1, 0, 0, 1, 1, 2, 3))
PROMPT = [1, 20, 21, 22, 20, 21, 22, 20, 21]


def new_drafter(kind: str, target: TargetModel, draft_vocab_size: int | None = None) -> Drafter:
    """A drafter of the kind with every trained tensor moved off its start."""
    cls = drafter_class(kind)
    vocab = None
    if draft_vocab_size and not cls.reduces_vocab:
        pytest.skip("this kind drafts over the whole vocabulary")
    if draft_vocab_size:
        counts = torch.arange(target.identity.vocab_size)
        vocab = VocabMap.from_counts(counts, draft_vocab_size, always=[1, 2])
    config = cls.Config(kind=kind, draft_vocab_size=draft_vocab_size)
    torch.manual_seed(1)
    drafter = cls.create(config, target.identity, target.shared, vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval()


def state_of(drafter: Drafter, target: TargetModel, tokens: list[int]) -> DraftState:
    """The state after prefilling all tokens but the last."""
    states = target.forward(torch.tensor([tokens[:-1]]), needs=drafter.needs)
    captured = states.captured_BNAD
    return DraftState(tokens, states.hidden_BND[0], captured[0] if captured is not None else None)


def depth_of(drafter: Drafter, wanted: int) -> int:
    return wanted if drafter.max_depth is None else min(wanted, drafter.max_depth)


class RecordingCriterion:
    """Keeps every step's logits over the target's vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.logits: list[Tensor] = []

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        *,
        step: int,
        vocab: VocabMap | None = None,
        features_BTD: Tensor | None = None,
    ) -> StepLoss:
        assert step == len(self.logits), "draft steps come in order"
        logits = hidden_BTD @ weight_VD.T
        if vocab is not None:
            full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
            full[..., vocab.target_ids_Vd] = logits
            logits = full
        self.logits.append(logits)
        zero = torch.zeros((), dtype=torch.long)
        return StepLoss(hidden_BTD.sum() * 0, zero, zero[None], zero.float())


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_holds_the_drafter_it_is_named_after(kind: str) -> None:
    cls = drafter_class(kind)
    assert cls.kind == kind
    assert cls.Config(kind=kind).kind == kind


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_training_script_and_a_config_stand_beside_every_trainable_kind(kind: str) -> None:
    root = Path(__file__).parents[2]
    assert (root / "train" / f"{kind}.py").is_file()
    assert (root / "configs" / f"{kind}.yaml").is_file()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [chain(0), chain(1), chain(3), TREE], ids=["0", "1", "3", "tree"])
def test_a_proposal_starts_at_the_last_token_and_stays_in_the_budget(
    kind: str, shape: TreeShape, tiny_target: TargetModel
) -> None:
    drafter = new_drafter(kind, tiny_target)
    tree = drafter.propose(state_of(drafter, tiny_target, list(PROMPT)), DraftBudget(shape))
    assert int(tree.tokens_N[0]) == PROMPT[-1]
    assert len(tree.shape) <= len(shape) and tree.shape.depth <= shape.depth
    assert tree.tokens_N.dtype == torch.long and tree.tokens_N.device.type == "cpu"
    assert bool(((tree.tokens_N >= 0) & (tree.tokens_N < tiny_target.identity.vocab_size)).all())
    for children in tree.shape.children:
        siblings = [int(tree.tokens_N[child]) for child in children]
        assert len(set(siblings)) == len(siblings), "siblings are distinct tokens"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [chain(3), TREE], ids=["chain", "tree"])
def test_greedy_speculation_equals_plain_greedy_decoding(
    kind: str, shape: TreeShape, tiny_target: TargetModel
) -> None:
    drafter = new_drafter(kind, tiny_target)
    settings = GenerationSettings(max_new_tokens=60, shape=shape)
    for start in range(6):
        prompt = [1, 30 + start, 40, 41, 30 + start, 40]
        plain = speculative_generate(tiny_target, None, prompt, settings)
        ours = speculative_generate(tiny_target, drafter, prompt, settings)
        assert ours.tokens == plain.tokens
        assert ours.ended == plain.ended


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_the_training_forward_predicts_what_drafting_proposes(
    kind: str, draft_vocab_size: int | None, tiny_target: TargetModel
) -> None:
    """Row = context + the drafter's own greedy chain: training step k must rank it first."""
    drafter = new_drafter(kind, tiny_target, draft_vocab_size)
    depth = depth_of(drafter, 3)
    context = list(PROMPT)
    tree = drafter.propose(state_of(drafter, tiny_target, context), DraftBudget(chain(depth)))
    row = torch.tensor([[*context, *tree.tokens_N[1:].tolist()]])
    states = tiny_target.forward(row, needs=drafter.needs)
    ones = torch.ones_like(row)
    batch = TrainingBatch(
        row,
        ones.bool(),
        ones,
        torch.arange(row.shape[1])[None],
        states.hidden_BND.clone(),
        states.captured_BNAD,
    )
    criterion = RecordingCriterion(tiny_target.identity.vocab_size)
    drafter(batch, criterion)
    position = len(context) - 2
    assert criterion.logits
    for step in range(min(depth, len(criterion.logits))):
        predicted = int(criterion.logits[step][0, position].argmax())
        target = int(draft_targets(row, batch.loss_mask_BT, batch.segments_BT, step)[0, position])
        assert predicted == target == int(tree.tokens_N[step + 1])


@pytest.mark.parametrize("kind", [k for k in KINDS if drafter_class(k).can_sample])
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(
    kind: str, draft_vocab_size: int | None, tiny_target: TargetModel
) -> None:
    drafter = new_drafter(kind, tiny_target, draft_vocab_size)
    shape = chain(depth_of(drafter, 3))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(shape.depth, tiny_target.identity.vocab_size)
    rounds = 400
    for _ in range(rounds):
        state = state_of(drafter, tiny_target, list(PROMPT))
        tree = drafter.propose(state, DraftBudget(shape, Sampling(0.5).probs, generator))
        assert tree.draft_probs_NV is not None
        for node in range(shape.depth):
            counts[node, int(tree.tokens_N[node + 1])] += 1
    q_V = tree.draft_probs_NV[0]
    torch.testing.assert_close(q_V.sum(), torch.tensor(1.0))
    expected = q_V * rounds
    assert float(((counts[0] - expected).abs() - 5 * (expected + 1).sqrt()).max()) < 0


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_saved_drafter_comes_back_tensor_for_tensor(
    kind: str, draft_vocab_size: int | None, tiny_target: TargetModel, tmp_path: Path
) -> None:
    drafter = new_drafter(kind, tiny_target, draft_vocab_size)
    contract = Contract(target=tiny_target.identity, **drafter.contract_fields())
    save_drafter(Checkpoint(drafter, contract, {"tau": 1.5}), tmp_path / "d")
    back = load_drafter(tmp_path / "d")
    assert back.contract == contract and back.calibration == {"tau": 1.5}
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.drafter.state_dict()[name], tensor)
    back.drafter.bind(tiny_target.shared)
    budget = DraftBudget(chain(depth_of(drafter, 3)))
    trees = [
        d.propose(state_of(d, tiny_target, list(PROMPT)), budget) for d in (drafter, back.drafter)
    ]
    assert trees[0].tokens_N.tolist() == trees[1].tokens_N.tolist()


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_checkpoint_with_a_wrong_tensor_is_refused(
    kind: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    drafter = new_drafter(kind, tiny_target)
    contract = Contract(target=tiny_target.identity, **drafter.contract_fields())
    save_drafter(Checkpoint(drafter, contract), tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    whole = load_file(path)
    first = next(name for name, tensor in whole.items() if tensor.is_floating_point())
    broken = {
        "missing tensors": {k: v for k, v in whole.items() if k != first},
        "unexpected tensors": whole | {"stray": torch.zeros(2)},
        "has shape": whole | {first: whole[first][:1]},
        "NaN": whole | {first: torch.full_like(whole[first], float("nan"))},
    }
    for message, tensors in broken.items():
        save_file(tensors, path)
        with pytest.raises(UserError, match=message):
            load_drafter(tmp_path / "d")
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_drafter(tmp_path / "d")


@pytest.mark.parametrize("kind", TRAINABLE)
def test_an_unfilled_drafter_is_all_nan(kind: str, tiny_target: TargetModel) -> None:
    cls = drafter_class(kind)
    drafter = cls.blank(cls.Config(kind=kind), tiny_target.identity)
    assert all(bool(p.isnan().all()) for p in drafter.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_longer_than_the_drafter_is_refused(kind: str, tiny_target: TargetModel) -> None:
    drafter = new_drafter(kind, tiny_target)
    if drafter.max_depth is None:
        pytest.skip("this kind drafts any length")
    with pytest.raises(UserError, match=f"at most {drafter.max_depth}"):
        rule_for(GenerationSettings(shape=chain(drafter.max_depth + 1)), drafter)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("config_hash", "another model configuration"),
        ("weights_hash", "other target weights"),
        ("tokenizer_hash", "another tokenizer"),
        ("template_hash", "another chat template"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    field: str, reason: str, tiny_target: TargetModel
) -> None:
    other = tiny_target.identity.model_copy(update={field: "0" * 16})
    check_contract(Contract(target=tiny_target.identity), tiny_target.identity, "d")
    with pytest.raises(UserError, match=reason):
        check_contract(Contract(target=other), tiny_target.identity, "d")


def test_a_folder_that_is_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a drafter"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="not a drafter's config"):
        load_drafter(tmp_path)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean"):
        drafter_class(KINDS[0][:-1])
