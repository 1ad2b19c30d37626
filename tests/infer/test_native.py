"""Targets that are born with a drafter: loaded without it, and their drafter out of their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import drafter_class
from heads.errors import UserError
from infer.native import native_drafter
from infer.target import TargetModel
from tests.infer.recurrent import step_logits
from tests.infer.test_export_mtp import qwen2

HIDDEN, INNER = 32, 64
SHAPES = {
    "token_layernorm.weight": (HIDDEN,),
    "hidden_layernorm.weight": (HIDDEN,),
    "final_layernorm.weight": (HIDDEN,),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "input_proj.weight": (HIDDEN, 2 * HIDDEN),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "self_attn.q_proj.bias": (HIDDEN,),
    "self_attn.k_proj.bias": (HIDDEN // 2,),
    "self_attn.v_proj.bias": (HIDDEN // 2,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}


def head_tensors(module: int = 0) -> dict[str, Tensor]:
    """A head as MiMo checkpoints hold it."""
    make = torch.Generator().manual_seed(20 + module)
    return {
        f"model.mtp_layers.{module}.{name}": (len(shape) == 1)
        + 0.3 * torch.randn(shape, generator=make)
        for name, shape in SHAPES.items()
    }


def born_with(folder: Path, modules: int = 1, in_parts: bool = True) -> Path:
    """The folder of a Qwen2 target that ships heads, in one file or with the heads in their own."""
    target = qwen2()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": modules}
    (folder / "config.json").write_text(json.dumps(config))
    heads: dict[str, Tensor] = {}
    for module in range(modules):
        heads |= head_tensors(module)
    own = load_file(folder / "model.safetensors")
    if not in_parts:
        save_file(own | heads, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    files = {"model-00001.safetensors": own, "model-00002.safetensors": heads}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {key: name for name, tensors in files.items() for key in tensors}
    record = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(record))
    return folder


def asked(**fields: Any) -> Any:
    return drafter_class("mtp").Config(**fields)


@pytest.mark.parametrize("in_parts", [True, False])
def test_target_is_loaded_and_gives_its_own_head(in_parts: bool, tmp_path: Path) -> None:
    target = TargetModel.load(str(born_with(tmp_path, in_parts=in_parts)), dtype="float32")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(target.model(tokens).logits, qwen2().model(tokens).logits)
    checkpoint, notes = native_drafter(asked(), target)
    assert not notes
    assert checkpoint.contract.target == target.identity
    state = checkpoint.drafter.state_dict()
    assert {f"model.{name}" for name in state} == set(head_tensors())
    for name, tensor in head_tensors().items():
        assert torch.equal(state[name.removeprefix("model.")], tensor)
    checkpoint.drafter.bind(target.shared)
    assert bool(step_logits(checkpoint.drafter, target).isfinite().all())


def test_modules_that_the_recipe_does_not_ask_for_are_told(tmp_path: Path) -> None:
    target = TargetModel.load(str(born_with(tmp_path, modules=2)), dtype="float32")
    checkpoint, (note,) = native_drafter(asked(), target)
    assert "mtp_layers.1." in note and "not used" in note
    assert torch.equal(
        checkpoint.drafter.state_dict()["mtp_layers.0.input_proj.weight"],
        head_tensors(0)["model.mtp_layers.0.input_proj.weight"],
    )
    both, notes = native_drafter(asked(num_modules=2), target)
    assert not notes and len(both.drafter.state_dict()) == 2 * len(SHAPES)


def test_head_that_is_not_what_was_asked_for_is_refused(
    tiny_target: TargetModel, tiny_target_folder: Path, tmp_path: Path
) -> None:
    target = TargetModel.load(str(born_with(tmp_path)), dtype="float32")
    with pytest.raises(UserError, match=r"missing tensors .*mtp_layers.1"):
        native_drafter(asked(num_modules=2), target)
    with pytest.raises(UserError, match=r"shape \[32, 64\], expected \[32, 48\]"):
        native_drafter(asked(intermediate_size=48), target)
    plain = TargetModel.load(str(tiny_target_folder), dtype="float32")
    with pytest.raises(UserError, match=r"no drafter of kind 'mtp'.*model\.mtp_layers\.\*"):
        native_drafter(asked(), plain)
    other = drafter_class("eagle").Config(kind="eagle")
    with pytest.raises(UserError, match="no drafter of kind 'eagle'"):
        native_drafter(other, plain)


def test_other_tensors_that_a_target_has_too_many_are_still_refused(tmp_path: Path) -> None:
    folder = born_with(tmp_path, in_parts=False)
    tensors = load_file(folder / "model.safetensors") | {"model.stray.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 unexpected .model\.stray\.weight"):
        TargetModel.load(str(folder), dtype="float32")
