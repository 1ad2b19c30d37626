"""The target's forward over a tree equals sequential forwards, and its cache keeps one path."""

from pathlib import Path

import pytest
import torch

from heads.base import Needs
from heads.errors import UserError
from heads.tree import TokenTree, TreeShape, chain
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer

SHAPE = TreeShape((-1, 0, 0, 1, 1, 2, 3, 4))
NEEDS = Needs(final_hidden=True, captured_layers=(1, 2, 3))


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 160, shape, generator=torch.Generator().manual_seed(seed))


def test_every_tree_node_sees_the_text_and_its_own_ancestors() -> None:
    tiny_target = TargetModel(tiny_model().double(), tiny_tokenizer(), "double")
    prompt, tokens = random_tokens(1, 12), random_tokens(len(SHAPE), seed=1)
    cache = tiny_target.new_cache(16)
    tiny_target.forward(prompt, cache)
    tree = tiny_target.forward_tree(TokenTree(SHAPE, tokens), cache, needs=NEEDS)
    for node in range(len(SHAPE)):
        row = torch.cat([prompt[0], tokens[SHAPE.path(node)]])[None]
        alone = tiny_target.forward(row, needs=NEEDS)
        torch.testing.assert_close(tree.hidden_BND[0, node], alone.hidden_BND[0, -1])
        assert tree.captured_BNAD is not None and alone.captured_BNAD is not None
        torch.testing.assert_close(tree.captured_BNAD[0, node], alone.captured_BNAD[0, -1])


@pytest.mark.parametrize("path", [[0], [0, 1, 3, 6], [0, 2, 5], [0, 1, 4, 7]])
def test_after_a_commit_the_cache_holds_exactly_the_accepted_path(
    path: list[int], tiny_target: TargetModel
) -> None:
    prompt, tokens = random_tokens(1, 9), random_tokens(len(SHAPE), seed=2)
    cache = tiny_target.new_cache(4)
    tiny_target.forward(prompt, cache)
    tiny_target.forward_tree(TokenTree(SHAPE, tokens), cache)
    cache.commit(9, path)
    assert cache.length == 9 + len(path)
    rest = random_tokens(1, 5, seed=3)
    ours = tiny_target.forward(rest, cache)
    whole = tiny_target.forward(torch.cat([prompt[0], tokens[path], rest[0]])[None])
    torch.testing.assert_close(ours.hidden_BND, whole.hidden_BND[:, -5:])


def test_captured_layer_k_is_the_residual_stream_after_k_layers(tiny_target: TargetModel) -> None:
    tokens = random_tokens(2, 7)
    states = tiny_target.forward(tokens, needs=NEEDS)
    reference = tiny_target.model(tokens, output_hidden_states=True)
    assert states.captured_BNAD is not None
    for index, layer in enumerate((1, 2)):
        assert torch.equal(states.captured_BNAD[:, :, index], reference.hidden_states[layer])
    assert torch.equal(states.hidden_BND, reference.hidden_states[3])
    assert not torch.equal(states.captured_BNAD[:, :, 2], states.hidden_BND), "layer N is un-normed"
    assert torch.equal(tiny_target.logits(states.hidden_BND), reference.logits)


def test_the_cache_grows_past_its_capacity(tiny_target: TargetModel) -> None:
    tokens = random_tokens(1, 40)
    cache = tiny_target.new_cache(2)
    parts = [tiny_target.forward(tokens[:, i : i + 8], cache).hidden_BND for i in range(0, 40, 8)]
    whole = tiny_target.forward(tokens).hidden_BND
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_the_target_is_frozen(tiny_target: TargetModel) -> None:
    assert not any(p.requires_grad for p in tiny_target.model.parameters())
    assert not tiny_target.forward(random_tokens(1, 4)).hidden_BND.requires_grad


def test_the_same_weights_have_the_same_identity_in_any_dtype(tiny_target_folder: Path) -> None:
    single = TargetModel.load(str(tiny_target_folder), dtype="float32").identity
    half = TargetModel.load(str(tiny_target_folder), dtype="bfloat16").identity
    assert single.weights_hash == half.weights_hash
    assert single.config_hash == half.config_hash and single.tokenizer_hash == half.tokenizer_hash


def test_other_weights_or_another_template_have_another_identity(tiny_target: TargetModel) -> None:
    other = TargetModel(tiny_model(seed=1), tiny_tokenizer(), "other").identity
    assert other.weights_hash != tiny_target.identity.weights_hash
    assert other.config_hash == tiny_target.identity.config_hash
    template = TargetModel(tiny_model(), tiny_tokenizer("{{ messages[0].content }}"), "other")
    assert template.identity.template_hash != tiny_target.identity.template_hash


def test_what_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be loaded as a causal LM"):
        TargetModel.load(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="could not be loaded as a causal LM"):
        TargetModel.load(str(tmp_path))


def test_a_sliding_window_target_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with pytest.raises(UserError, match="sliding window"):
        TargetModel(MistralForCausalLM(config), tiny_tokenizer(), "mistral")


def test_a_chain_needs_no_reordering(tiny_target: TargetModel) -> None:
    tokens = random_tokens(4)
    cache = tiny_target.new_cache(8)
    tiny_target.forward(random_tokens(1, 3), cache)
    tiny_target.forward_tree(TokenTree(chain(3), tokens), cache)
    cache.commit(3, [0, 1])
    assert cache.length == 5
