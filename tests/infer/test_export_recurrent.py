import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.errors import UserError
from infer.export import export_drafter, read_back
from infer.export.vllm import prove_vllm
from infer.target import TargetModel
from tests.infer.recurrent import FORMS, made, step_logits

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def refuse() -> TargetModel:
    raise AssertionError("the target is no part of these folders")


def exported(target: TargetModel, folder: Path, form: str, **changes: Any) -> Path:
    return export_drafter(made(target, form, **changes), "vllm", folder, refuse)


@pytest.mark.parametrize("form", FORMS)
def test_folder_is_proven_and_read_back_bit_for_bit(
    form: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, form)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", refuse)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    prove_vllm(out)
    back = read_back(out)
    assert back.method == checkpoint.drafter.kind
    assert back.drafter.needs == checkpoint.drafter.needs
    drafter = back.bound(torch.float32, torch.device("cpu"), tiny_target.shared)
    original = step_logits(checkpoint.drafter, tiny_target)
    assert torch.equal(step_logits(drafter, tiny_target), original)
    assert original.std() > 0.1


def test_plain_form_has_the_public_names_and_nothing_of_the_target(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = exported(tiny_target, tmp_path / "out", "eagle_deep")
    names = set(load_file(out / "model.safetensors"))
    assert "layers.0.input_layernorm.weight" not in names
    assert "layers.1.input_layernorm.weight" in names
    assert not [n for n in names if n.startswith(("lm_head", "embed_tokens", "norm", "model."))]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 2


def test_fused_form_says_what_vllm_reads(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out", "fused_vocab")
    config = json.loads((out / "config.json").read_text())
    said = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 160,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "num_aux_hidden_states": 2,
        LAYER_IDS: [1, 3],
        "eagle_config": {LAYER_IDS: [1, 3]},
        "norm_before_residual": False,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    assert {key: config[key] for key in said} == said


def test_rope_settings_are_written_for_old_and_new_readers(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = exported(tiny_target, tmp_path / "out", "fused_rope")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e4
    assert config["rope_scaling"] | {"rope_theta": 5e4} == config["rope_parameters"]


def test_draft_ids_are_written_as_offsets(tiny_target: TargetModel, tmp_path: Path) -> None:
    checkpoint = made(tiny_target, "fused_vocab")
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", refuse)
    tensors = load_file(out / "model.safetensors")
    assert "draft_ids" not in tensors
    assert tensors["d2t"].dtype == torch.int64
    ids: Any = checkpoint.drafter.draft_ids
    assert torch.equal(tensors["d2t"] + torch.arange(40), ids)


def test_draft_vocabulary_of_the_whole_size_has_no_offsets(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, "fused", draft_vocab_size=160)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", refuse)
    assert "d2t" not in load_file(out / "model.safetensors")
    back = read_back(out).bound(torch.float32, torch.device("cpu"), tiny_target.shared)
    original = step_logits(checkpoint.drafter, tiny_target)
    assert torch.equal(step_logits(back, tiny_target), original)


def test_bias_that_only_vllm_has_is_written_as_zeros(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    """vLLM would leave it as it finds its memory."""
    out = exported(tiny_target, tmp_path / "out", "fused_flags")
    bias = load_file(out / "model.safetensors")["midlayer.self_attn.o_proj.bias"]
    assert torch.equal(bias, torch.zeros(32))


def test_dtype_is_asked_for_and_ids_stay_integers(tiny_target: TargetModel, tmp_path: Path) -> None:
    checkpoint = made(tiny_target, "fused_vocab")
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", refuse, "bfloat16")
    dtypes = {name: t.dtype for name, t in load_file(out / "model.safetensors").items()}
    assert dtypes.pop("d2t") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("form", "place", "allowed"),
    [
        ("eagle", "eagle-run", True),
        ("eagle", "eagle3", False),
        ("fused", "eagle3", True),
        ("fused", "eagle-3", False),
        ("fused", "dflash", False),
    ],
)
def test_path_may_name_the_folders_own_method_only(
    form: str, place: str, allowed: bool, tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = tmp_path / place / "out"
    if allowed:
        exported(tiny_target, out, form)
        prove_vllm(out)
        return
    with pytest.raises(UserError, match="another method by its path"):
        exported(tiny_target, out, form)
    assert list(tmp_path.iterdir()) == []


Fault = Callable[[dict[str, Tensor], dict[str, Any]], object]


def put(key: str, value: Any) -> Fault:
    """The config's key set to something else."""
    return lambda tensors, config: config.update({key: value})


def layers(*ids: int) -> Fault:
    """Other layer ids, in both places."""

    def fault(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config[LAYER_IDS] = config["eagle_config"][LAYER_IDS] = list(ids)

    return fault


def absolute(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def drop(name: str) -> Fault:
    """A tensor left out."""
    return lambda tensors, config: tensors.pop(name)


def add(name: str, *shape: int) -> Fault:
    """A tensor too many."""
    return lambda tensors, config: tensors.update({name: torch.zeros(*shape)})


def swap(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["d2t"][3] += tensors["d2t"][5] + 2 - tensors["d2t"][3]


@pytest.mark.parametrize(
    ("form", "fault", "message"),
    [
        ("eagle", drop("fc.weight"), "fc.weight is missing"),
        ("eagle", add("lm_head.weight", 160, 32), "lm_head.weight is unexpected"),
        ("eagle", add("fc.bias", 32), "fc.bias is unexpected"),
        (
            "eagle",
            add("layers.0.input_layernorm.weight", 32),
            "layers.0.input_layernorm.weight is unexpected",
        ),
        ("eagle", put("num_hidden_layers", 2), "layers.1.self_attn.q_proj.weight is missing"),
        ("eagle", put("attention_bias", True), "layers.0.self_attn.q_proj.bias is missing"),
        ("eagle", put("intermediate_size", 65), r"expected \[65, 32\]"),
        ("eagle", put("hidden_size", 16), "hidden_size 16 is not the target's 32"),
        ("eagle", put("rope_theta", 5.0), "rope_theta and rope_parameters.rope_theta differ"),
        ("eagle", put("architectures", ["LlamaModel"]), "architectures"),
        ("fused_vocab", drop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        ("fused_vocab", drop("d2t"), "d2t is missing"),
        ("fused_vocab", absolute, "must hold offsets"),
        ("fused_vocab", swap, "do not ascend"),
        ("fused_vocab", put("norm_before_fc", False), "input_norm.weight is unexpected"),
        ("fused_vocab", put("fc_norm", True), "fc_norm.0.weight is missing"),
        ("fused_vocab", put("norm_output", 1), "norm_output is neither true nor false"),
        ("fused_vocab", put("draft_vocab_size", 160), "d2t is unexpected"),
        ("fused_vocab", put("target_hidden_size", 64), "target_hidden_size 64 is not 32"),
        ("fused_vocab", put("num_aux_hidden_states", 3), "num_aux_hidden_states 3 for 2 layers"),
        ("fused_vocab", put(LAYER_IDS, [1, 2]), "differ"),
        ("fused_vocab", layers(1, 4), "outside the target's layers 1 to 3"),
        ("fused_vocab", layers(0, 1), "outside the target's layers 1 to 3"),
        ("fused_vocab", layers(2, 2), "distinct and ascending"),
        ("fused_vocab", layers(3, 1), "distinct and ascending"),
        ("fused_vocab", layers(1, 2, 3), "num_aux_hidden_states 2 for 3 layers"),
        ("fused", add("d2t", 160), "d2t is unexpected"),
        ("fused", put("attention_bias", True), "midlayer.self_attn.k_proj.bias is missing"),
        ("fused_embedding", drop("embed_tokens.weight"), "embed_tokens.weight is missing"),
        ("fused", add("embed_tokens.weight", 160, 32), "embed_tokens.weight is unexpected"),
    ],
)
def test_proof_names_the_fault(
    form: str, fault: Fault, message: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = exported(tiny_target, tmp_path / "out", form)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    fault(tensors, config)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        prove_vllm(out)
