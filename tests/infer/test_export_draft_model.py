"""Draft models in the form that engines serve: an ordinary folder that transformers reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from heads.base import Checkpoint, Contract, DraftBudget, DraftState
from heads.draft_model import DraftModel, DraftModelConfig
from heads.errors import UserError
from heads.tree import chain
from infer.export import Exported, export_drafter, open_folder, read_public
from infer.export.vllm import prove_vllm
from infer.opening import bind_drafter, read_drafter
from infer.target import TargetModel

PROMPT = [1, 20, 21, 22, 30]
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(params=["untied", "tied", "rope"])
def target(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    tiny_target: TargetModel,
) -> TargetModel:
    changes: dict[str, dict[str, Any]] = {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "rope": {"rope_parameters": ROPE},
    }
    return TargetModel(make_model(**changes[request.param]), make_tokenizer(), "tiny")


def made(target: TargetModel, **fields: Any) -> Checkpoint:
    config = DraftModelConfig.model_validate({"student": {"layers": 2}} | fields)
    torch.manual_seed(1)
    drafter = DraftModel.create(config, target.identity, target.shared).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter, contract)


def last_logits(drafter: Any) -> Tensor:
    """Logits [V] that the drafter drafts its first token with."""
    state, seen = DraftState(list(PROMPT)), []
    step = drafter.nodes_step

    def recorded(*given: Any, **more: Any) -> Any:
        done = step(*given, **more)
        seen.append(drafter.logits(done.output)[-1])
        return done

    drafter.nodes_step = recorded
    drafter.propose(state, DraftBudget(chain(1)))
    del drafter.nodes_step
    found: Tensor = seen[0]
    return found


@pytest.mark.parametrize("embedding", ["shared", "own"])
@torch.no_grad()
def test_transformers_reads_what_was_trained(
    embedding: str, target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(target, embedding=embedding)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: target)
    prove_vllm(out)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(last_logits(checkpoint.drafter), theirs, rtol=0, atol=1e-5)
    config = json.loads((out / "config.json").read_text())
    assert "draft_vocab_size" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_tokenizer_and_template_are_the_targets(target: TargetModel, tmp_path: Path) -> None:
    out = export_drafter(made(target), "vllm", tmp_path / "out", lambda: target)
    own = AutoTokenizer.from_pretrained(out)
    assert own.get_vocab() == target.tokenizer.get_vocab()
    assert own.chat_template == target.tokenizer.chat_template
    assert (
        own("What is the capital")["input_ids"]
        == target.tokenizer("What is the capital")["input_ids"]
    )


@torch.no_grad()
def test_an_exported_folder_is_read_back(target: TargetModel, tmp_path: Path) -> None:
    checkpoint = made(target)
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: target)
    found = open_folder(out)
    assert isinstance(found, Exported) and found.method == "draft_model"
    back = found.bound(torch.float32, torch.device("cpu"), target.shared)
    torch.testing.assert_close(
        last_logits(back), last_logits(checkpoint.drafter), rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_an_ordinary_folder_drafts_without_a_contract(
    tiny_target: TargetModel,
    make_model: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = make_model(4, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    spec = str(tmp_path / "small")
    checkpoint = bind_drafter(read_drafter(spec), spec, tiny_target)
    assert checkpoint.drafter.kind == "draft_model"
    theirs = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(last_logits(checkpoint.drafter), theirs, rtol=0, atol=1e-5)


def test_a_folder_of_other_tokens_is_refused(
    tiny_target: TargetModel,
    make_model: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    make_model(4, num_hidden_layers=1, vocab_size=161).save_pretrained(tmp_path / "small")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(tmp_path / "small")
    size = len(tiny_target.tokenizer)
    with pytest.raises(UserError, match=rf"token {size} is '<\|extra\|>' there and None"):
        read_public(tmp_path / "small", tiny_target)


def test_a_path_that_names_another_method_is_refused(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="another method by its path"):
        export_drafter(
            made(tiny_target), "vllm", tmp_path / "eagle-like" / "out", lambda: tiny_target
        )
    assert list(tmp_path.iterdir()) == []


Fault = Callable[[dict[str, Tensor], dict[str, Any], Path], object]


def put(key: str, value: Any) -> Fault:
    return lambda tensors, config, out: config.update({key: value})


def drop_file(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    (out / "tokenizer_config.json").unlink()


def stray_file(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    (out / "notes.txt").write_text("x")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t, c, o: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t, c, o: t.update(x=torch.zeros(1)), "x is unexpected"),
        (put("num_hidden_layers", 3), "model.layers.2.* is missing"),
        (put("draft_vocab_size", 160), "draft_vocab_size is given"),
        (put("vocab_size", 161), "vocab_size 161 is not the target's 160"),
        (put("architectures", ["LlamaModel"]), "architectures"),
        (put("rope_theta", 5.0), "rope_theta"),
        (drop_file, "tokenizer_config.json is missing"),
        (stray_file, "notes.txt is no part"),
    ],
)
def test_proof_names_the_fault(
    fault: Fault, message: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = export_drafter(made(tiny_target), "vllm", tmp_path / "out", lambda: tiny_target)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    fault(tensors, config, out)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        prove_vllm(out)
