import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import Drafter, save_drafter
from heads.errors import UserError
from infer.export import export_drafter, public, read_public
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer
from tests.infer.recurrent import made, step_logits

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
# The keys of a config as they lie in public folders, ours or not.
OURS = ("outrider_target", "outrider_own_embedding")


def foreign(target: TargetModel, folder: Path, form: str, *changes: Change, **fields: Any) -> Path:
    """A folder without a contract: our export less what only we write, then changed."""
    export_drafter(made(target, form, **fields), "vllm", folder, lambda: target)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for key in OURS:
        config.pop(key, None)
    for change in changes:
        change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return folder


def put(key: str, value: Any) -> Change:
    return lambda tensors, config: config.update({key: value})


def without(key: str) -> Change:
    return lambda tensors, config: config.pop(key)


def drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def add(name: str, tensor: Tensor) -> Change:
    return lambda tensors, config: tensors.update({name: tensor.clone()})


def renamed(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def prefixed(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in [n for n in tensors if n not in ("lm_head.weight", "d2t")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def nested_only(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config[LAYER_IDS]


def speculators(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The layer's sizes in a section of their own; no model_type."""
    top = {"draft_vocab_size", LAYER_IDS, "norm_before_residual", "norm_before_fc"}
    kept = {key: config[key] for key in top}
    layer = {k: v for k, v in config.items() if k not in top | {"architectures", "eagle_config"}}
    config.clear()
    config |= kept | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
    }


def under_model(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """vLLM's own older form."""
    inner = dict(config)
    config.clear()
    config |= {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": inner}


def old_rope(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["rope_parameters"]


def same(drafter: Drafter, target: TargetModel, form: str, **fields: Any) -> bool:
    """Whether it computes what the original does, bit for bit."""
    drafter.bind(target.shared)
    original = made(target, form, **fields).drafter
    return torch.equal(step_logits(drafter, target), step_logits(original, target))


def known(target: TargetModel) -> Change:
    """`t2d`, which engines ignore."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        marked = torch.zeros(target.identity.vocab_size, dtype=torch.bool)
        marked[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
        tensors["t2d"] = marked

    return change


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("eagle", ()),
        ("eagle", (prefixed,)),
        ("eagle", (put("architectures", ["LlamaForCausalLMEagle"]),)),
        ("eagle", (under_model,)),
        ("eagle", (add("fc.bias", torch.zeros(32)), put("tie_word_embeddings", True))),
        ("eagle_deep", (without("head_dim"),)),
        ("fused", (renamed("midlayer.", "layers.0."),)),
        ("fused", (renamed("midlayer.", "layers.0."), prefixed)),
        ("fused", (put("architectures", ["LlamaForCausalLM"]),)),
        ("fused", (without("draft_vocab_size"), add("d2t", torch.zeros(160, dtype=torch.long)))),
        ("fused_vocab", (without("norm_output"), without("attention_bias"))),
        ("fused_vocab", (speculators, renamed("midlayer.", "layers.0."))),
        ("fused_flags", (drop("midlayer.self_attn.o_proj.bias"),)),
        ("fused_embedding", ()),
        ("fused_narrow", ()),
        ("fused_rope", (old_rope,)),
    ],
)
def test_public_folder_is_read_bit_for_bit(
    form: str, changes: tuple[Change, ...], tiny_target: TargetModel, tmp_path: Path
) -> None:
    folder = foreign(tiny_target, tmp_path / "public", form, *changes)
    checkpoint, _ = read_public(folder, tiny_target)
    assert checkpoint.contract.target == tiny_target.identity
    assert checkpoint.contract.captured_layers == checkpoint.drafter.needs.captured_layers
    assert same(checkpoint.drafter, tiny_target, form)


def test_speculators_form_norms_before_the_residual_unless_it_says_no(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    changes = (speculators, without("norm_before_residual"))
    folder = foreign(tiny_target, tmp_path / "public", "fused_vocab", *changes)
    drafter: Any = read_public(folder, tiny_target)[0].drafter
    assert drafter.config.norm_before_residual


def test_known_ids_agree_with_the_offsets(tiny_target: TargetModel, tmp_path: Path) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "fused_vocab", known(tiny_target))
    checkpoint, notes = read_public(folder, tiny_target)
    assert notes == []
    assert same(checkpoint.drafter, tiny_target, "fused_vocab")


def absolute(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def small_absolute(target: TargetModel) -> Change:
    """Ids so low that, read as offsets, they stay inside the vocabulary: t2d tells."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["d2t"] = torch.zeros(40, dtype=torch.long)
        known(target)(tensors, config)
        absolute(tensors, config)

    return change


def test_sharded_tensors_are_joined(tiny_target: TargetModel, tmp_path: Path) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "eagle")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(read_public(folder, tiny_target)[0].drafter, tiny_target, "eagle")
    index["weight_map"] = files | {"layers.9.weight": files[names[0]]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"layers\.9\.weight"):
        read_public(folder, tiny_target)


def test_pickled_weights_are_refused_with_a_way_out(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "eagle")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"nothing is unpickled.*weights_only=True"):
        read_public(folder, tiny_target)


@pytest.mark.parametrize("form", ["eagle", "fused"])
def test_copy_of_the_targets_embedding_is_dropped(
    form: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    copy = add("embed_tokens.weight", tiny_target.shared.embed_VD)
    folder = foreign(tiny_target, tmp_path / "public", form, copy)
    checkpoint, notes = read_public(folder, tiny_target)
    assert notes == []
    assert "embed_tokens.weight" not in checkpoint.drafter.state_dict()


def test_embedding_in_another_dtype_is_the_targets_still(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    copy = add("embed_tokens.weight", tiny_target.shared.embed_VD.bfloat16())
    folder = foreign(tiny_target, tmp_path / "public", "fused", copy)
    assert read_public(folder, tiny_target)[0].drafter.config.model_dump()["embedding"] == "shared"


def test_other_embedding_is_kept_and_said(tiny_target: TargetModel, tmp_path: Path) -> None:
    other = add("embed_tokens.weight", tiny_target.shared.embed_VD + 0.5)
    folder = foreign(tiny_target, tmp_path / "public", "fused", other)
    checkpoint, notes = read_public(folder, tiny_target)
    kept = checkpoint.drafter.state_dict()["embed_tokens.weight"]
    assert torch.equal(kept, tiny_target.shared.embed_VD + 0.5)
    assert notes == ["its embedding is not the target's: it is kept as its own"]


def test_missing_output_matrix_is_the_targets(tiny_target: TargetModel, tmp_path: Path) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "fused", drop("lm_head.weight"))
    checkpoint, notes = read_public(folder, tiny_target)
    matrix = checkpoint.drafter.state_dict()["lm_head.weight"]
    assert torch.equal(matrix, tiny_target.shared.lm_head_VD)
    assert "no lm_head.weight" in notes[0]


def test_nested_layer_ids_are_read_in_vllms_convention(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "fused", nested_only)
    checkpoint, notes = read_public(folder, tiny_target)
    assert checkpoint.drafter.needs.captured_layers == (1, 2, 3)
    assert "eagle_config" in notes[0]


def test_other_rope_settings_are_a_warning_that_names_both(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    folder = foreign(tiny_target, tmp_path / "public", "fused_rope")
    _, notes = read_public(folder, tiny_target)
    assert len(notes) == 1
    assert notes[0].startswith("warning: its rope settings")
    assert "50000.0" in notes[0]
    assert "10000.0" in notes[0]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("eagle", add("fc.bias", torch.ones(32)), r"fc\.bias is not zero"),
        ("eagle", add("norm.weight", torch.ones(32)), r"unexpected tensors \['norm.weight'\]"),
        ("eagle", drop("layers.0.mlp.up_proj.weight"), r"missing tensors \['layers.0.mlp.up"),
        ("eagle", drop("fc.weight"), r"a model, no drafter: it has no fc\.weight"),
        (
            "eagle",
            add("embed_tokens.weight", torch.ones(160, 32)),
            r"embed_tokens.weight is not the target's own",
        ),
        ("eagle", put("hidden_size", 64), "hidden_size 64, the target tiny has 32"),
        ("eagle", put("vocab_size", 99), "vocab_size 99, the target tiny has 160"),
        ("eagle", put("architectures", ["Other"]), r"architectures \['Other'\]; expected one of"),
        ("eagle", put("model_type", "qwen3"), "only drafters with Llama layers"),
        ("eagle", put("hidden_size", "wide"), "not a Llama config"),
        ("fused", put("target_hidden_size", 64), "target states of size 64, the target tiny has"),
        ("fused", put(LAYER_IDS, [1, 2, 9]), r"captured layers \[1, 2, 9\]; expected .* 1 to 3"),
        ("fused", put(LAYER_IDS, [1, 2, 2]), "distinct"),
        ("fused", put("num_hidden_layers", 2), "expected one layer"),
        ("fused", put("fc_norm", True), r"missing tensors \['fc_norm.0.weight'"),
        ("fused", put("eagle_config", {"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        ("fused_vocab", drop("d2t"), "tensor d2t is missing"),
        ("fused_vocab", drop("lm_head.weight"), r"missing tensors \['lm_head.weight'\]"),
        ("fused_vocab", put("draft_vocab_size", 41), "d2t has 40 entries, draft_vocab_size is 41"),
        ("fused_vocab", absolute, "looks like target ids themselves"),
        ("fused_vocab", add("d2t", torch.arange(40).flip(0) * 3), "not ascending"),
        ("fused_vocab", add("d2t", torch.zeros(40)), "no id list"),
    ],
)
def test_what_does_not_fit_is_named(
    form: str, change: Change, message: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    folder = foreign(tiny_target, tmp_path / "public", form, change)
    with pytest.raises(UserError, match=message):
        read_public(folder, tiny_target)


def test_absolute_ids_inside_the_vocabulary_are_found_by_the_known_ids(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    change = small_absolute(tiny_target)
    folder = foreign(tiny_target, tmp_path / "public", "fused_vocab", change)
    with pytest.raises(UserError, match="unlike t2d; it looks like target ids themselves"):
        read_public(folder, tiny_target)


def test_own_checkpoint_and_own_export_are_read_for_their_target_only(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, "fused_vocab")
    save_drafter(checkpoint, tmp_path / "own")
    export_drafter(checkpoint, "vllm", tmp_path / "exported", lambda: tiny_target)
    other = TargetModel(tiny_model(seed=1), tiny_tokenizer(), "other")
    for name in ("own", "exported"):
        found, notes = read_public(tmp_path / name, tiny_target)
        assert notes == []
        assert found.contract == checkpoint.contract
        assert same(found.drafter, tiny_target, "fused_vocab")
        with pytest.raises(UserError, match="other target weights"):
            read_public(tmp_path / name, other)


def test_failed_download_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(public, "snapshot_download", unreachable)
    with pytest.raises(
        UserError, match=r"no such folder: some/drafter, and the model hub.*no route"
    ):
        public.fetch("some/drafter")
