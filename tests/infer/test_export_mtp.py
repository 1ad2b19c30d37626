"""Target and MTP head in one folder: what is written, what it computes, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from heads.base import Checkpoint, Contract, drafter_class
from heads.errors import UserError
from heads.tree import chain
from infer import serving
from infer.acceptance import Question
from infer.export import export_drafter, open_folder, read_back
from infer.export.vllm import prove_vllm
from infer.loop import GenerationSettings, speculative_generate
from infer.opening import bind_drafter, open_target
from infer.serving import CheckSettings, open_exported
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer
from tests.infer.recurrent import step_logits

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CPU = torch.device("cpu")


def llama(**changes: Any) -> TargetModel:
    return TargetModel(tiny_model(**changes), tiny_tokenizer(), "tiny")


def qwen2(**changes: Any) -> TargetModel:
    """A random Qwen2 with biases that are not zero."""
    own = tiny_model().config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    same += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    fields = {name: getattr(own, name) for name in same} | {"initializer_range": 0.3} | changes
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(**fields)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
    return TargetModel(model, tiny_tokenizer(), "tiny-qwen2")


TARGETS: dict[str, Callable[[], TargetModel]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True, rms_norm_eps=1e-3),
    "rope": lambda: llama(rope_parameters=LLAMA3),
    "qwen2": qwen2,
    "qwen2 tied": lambda: qwen2(tie_word_embeddings=True, rope_theta=500.0),
}


def made(target: TargetModel, **fields: Any) -> Checkpoint:
    """A head with random tensors, bound to its target."""
    cls = drafter_class("mtp")
    drafter = cls.blank(cls.Config(**fields), target.identity)
    make = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=make))
    drafter.bind(target.shared)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter.eval(), contract)


def exported(target: TargetModel, folder: Path, **fields: Any) -> Path:
    return export_drafter(made(target, **fields), "vllm", folder, lambda: target)


@pytest.mark.parametrize("name", TARGETS)
def test_without_speculation_the_folder_is_the_target(name: str, tmp_path: Path) -> None:
    """As a plain Qwen2 model it has the original's logits, far beyond the first positions too."""
    target = TARGETS[name]()
    out = exported(target, tmp_path / "out")
    model, loading = Qwen2ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert all(key.startswith("model.mtp_layers.0.") for key in loading["unexpected_keys"])
    tokens = torch.randint(3, 160, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        merged, original = model.eval()(tokens).logits, target.model(tokens).logits
    assert float((merged - original).abs().max()) <= 1e-5 * float(original.abs().max())
    assert original.std() > 0.1


@pytest.mark.parametrize("name", TARGETS)
def test_folder_is_proven_and_its_head_read_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]()
    checkpoint = made(target)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: target)
    prove_vllm(out)
    back = read_back(out)
    assert back.method == "mtp" and back.whole
    assert back.checkpoint.contract == checkpoint.contract
    drafter = back.bound(torch.float32, CPU, target.shared)
    original = step_logits(checkpoint.drafter, target)
    assert torch.equal(step_logits(drafter, target), original)
    assert original.std() > 0.1


def test_folder_says_what_vllm_reads_and_is_whole(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    said = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": 3,
        "vocab_size": 160,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "rope_theta": 10000.0,
    }
    assert {key: config[key] for key in said} == said
    tensors = load_file(out / "model.safetensors")
    head = {name for name in tensors if name.startswith("model.mtp_layers.")}
    parts = ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"]
    assert {f"model.mtp_layers.0.{part}.weight" for part in parts} <= head
    assert tensors["model.mtp_layers.0.input_proj.weight"].shape == (32, 64)
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.bias"], torch.zeros(16))
    files = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= files
    opened = TargetModel.load(str(out), dtype="float32")
    assert opened.identity.template_hash == tiny_target.identity.template_hash
    assert opened.end_tokens == tiny_target.end_tokens


def test_folder_drafts_in_the_loop_of_its_target(
    tiny_target: TargetModel, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """As `outrider bench FOLDER` opens it: the target by the name in it, the head out of it."""
    target = TargetModel.load(str(tiny_target_folder), dtype="float32")
    checkpoint = made(target)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: target)
    found = open_folder(out)
    again = open_target([found], None, "float32", "cpu")
    bound = bind_drafter(found, str(out), again)
    settings = GenerationSettings(max_new_tokens=40, shape=chain(3))
    texts = [
        speculative_generate(again, drafter, [1, 30, 40, 41], settings)
        for drafter in (bound.drafter, checkpoint.drafter, None)
    ]
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    assert texts[0].accepted == texts[1].accepted


def test_vllm_is_given_the_folder_as_its_model(
    tiny_target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "find_vllm_python", lambda: Path("python"))
    opened = open_exported(exported(tiny_target, tmp_path / "out"))
    asked = [Question("q", "made", (3, 4, 5))]
    engine: Any = serving._engine(opened, tiny_target, asked, CheckSettings(), None)
    assert (engine.target, engine.drafter, engine.method) == (str(tmp_path / "out"), None, "mtp")
    job = serving._job(tiny_target, asked, CheckSettings(), 3)
    assert engine._record(job)["drafter"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_modules": 2}, "2 modules.*num_modules=1"),
        ({"target_state": "after_norm"}, "after_norm.*target_state=before_norm"),
        ({"intermediate_size": 48}, "intermediate_size is 48, the target's is 64"),
        ({"rope": {"rope_type": "default", "rope_theta": 5.0}}, "drafter.rope is"),
    ],
)
def test_head_that_no_such_folder_can_hold_is_refused(
    fields: dict[str, Any], message: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        exported(tiny_target, tmp_path / "out", **fields)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "self_attn.o_proj.bias.*train eagle3"),
        ({"mlp_bias": True}, "mlp.down_proj.bias.*train eagle3"),
        ({"head_dim": 16}, "heads as wide as the hidden state .4 x 16 for 32.*train eagle3"),
        ({"hidden_act": "gelu"}, "must be silu .gelu.*train eagle3"),
    ],
)
def test_target_without_a_place_for_a_head_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        exported(llama(**changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_target_of_another_type_is_refused_before_it_is_loaded(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    def refuse() -> TargetModel:
        raise AssertionError("loaded")

    checkpoint = made(tiny_target)
    other = checkpoint.contract.target.model_copy(update={"model_type": "gemma", "name": "g"})
    checkpoint.contract = checkpoint.contract.model_copy(update={"target": other})
    with pytest.raises(UserError, match=r"the target g \(gemma\).*llama, qwen2.*train eagle3"):
        export_drafter(checkpoint, "vllm", tmp_path / "out", refuse)


def test_tensorrt_llm_is_refused_with_a_reason(tiny_target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no place for an MTP head on a dense"):
        export_drafter(made(tiny_target), "tensorrt-llm", tmp_path / "out", lambda: tiny_target)


Fault = Callable[[dict[str, Tensor], dict[str, Any]], object]


def put(key: str, value: Any) -> Fault:
    return lambda tensors, config: config.update({key: value})


def drop(name: str) -> Fault:
    return lambda tensors, config: tensors.pop(name)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("lm_head.weight"), "lm_head.weight is missing"),
        (drop("model.layers.2.self_attn.v_proj.bias"), "v_proj.bias is missing"),
        (drop("model.mtp_layers.0.token_layernorm.weight"), "token_layernorm.weight is missing"),
        (put("num_nextn_predict_layers", 2), "num_nextn_predict_layers is 2, expected 1"),
        (put("num_hidden_layers", 2), "num_hidden_layers is 2, expected 3"),
        (put("tie_word_embeddings", True), "tie_word_embeddings is True"),
        (put("head_dim", 4), "head_dim 4"),
        (put("rope_theta", 5.0), "rope_theta and rope_parameters.rope_theta differ"),
    ],
)
def test_proof_names_the_fault(
    fault: Fault, message: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = exported(tiny_target, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    fault(tensors, config)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        prove_vllm(out)


def test_stray_file_beside_the_model_is_named(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="file notes"):
        prove_vllm(out)
