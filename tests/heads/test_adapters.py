"""LoRA adapters on a student: trained alone, merged in what is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.base import (
    Checkpoint,
    Contract,
    DraftBudget,
    DraftState,
    load_drafter,
    save_drafter,
)
from heads.draft_model import DraftModel, DraftModelConfig
from heads.errors import UserError
from heads.tree import chain
from infer.export import export_drafter
from infer.target import TargetModel

PROMPT = [1, 20, 21, 22, 30]


def made(target: TargetModel, **lora: Any) -> DraftModel:
    fields = {"student": {"layers": 2}, "lora": {"rank": 4, "alpha": 8.0} | lora}
    config = DraftModelConfig.model_validate(fields)
    return DraftModel.create(config, target.identity, target.shared)


@torch.no_grad()
def test_adapters_alone_are_trained_and_come_merged(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    drafter = made(tiny_target).eval()
    plain = DraftModel.create(
        DraftModelConfig.model_validate({"student": {"layers": 2}}),
        tiny_target.identity,
        tiny_target.shared,
    ).eval()
    budget = DraftBudget(chain(4))
    started = [d.propose(DraftState(list(PROMPT)), budget).tokens_N for d in (drafter, plain)]
    assert torch.equal(*started), "adapters start at nothing"
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    torch.manual_seed(0)
    for name, parameter in drafter.named_parameters():
        if name in trained:
            parameter.add_(0.2 * torch.randn_like(parameter))
    contract = Contract(target=tiny_target.identity, **drafter.contract_fields())
    save_drafter(Checkpoint(drafter, contract), tmp_path / "d")
    back = load_drafter(tmp_path / "d")
    back.drafter.bind(tiny_target.shared)
    out = export_drafter(back, "vllm", tmp_path / "out", lambda: tiny_target)
    model = AutoModelForCausalLM.from_pretrained(out)
    whole = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    seen: list[torch.Tensor] = []
    step = drafter.nodes_step

    def recorded(*given: Any, **more: Any) -> Any:
        done = step(*given, **more)
        seen.append(drafter.logits(done.output)[-1])
        return done

    drafter.nodes_step = recorded  # type: ignore[method-assign]
    drafter.propose(DraftState(list(PROMPT)), DraftBudget(chain(1)))
    torch.testing.assert_close(seen[0], whole, rtol=0, atol=1e-5)
    assert not torch.allclose(whole, tiny_target.logits(torch.zeros(32)), atol=1e-2)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"modules": ["q_proj", "w_pack"]}, r"\['w_pack'\] does not fit the student"),
        ({"rank": 64}, "does not fit, give a smaller one"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    lora: dict[str, Any], message: str, tiny_target: TargetModel
) -> None:
    pytest.importorskip("peft")
    with pytest.raises(UserError, match=message):
        made(tiny_target, **lora)


def test_a_checkpoint_with_other_adapters_is_refused(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    drafter = made(tiny_target)
    contract = Contract(target=tiny_target.identity, **drafter.contract_fields())
    save_drafter(Checkpoint(drafter, contract), tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    path.write_text(path.read_text().replace('"rank": 4', '"rank": 8'))
    with pytest.raises(UserError, match=r"lora_A\.default\.weight has shape \[4, "):
        load_drafter(tmp_path / "d")


def test_without_peft_the_extra_is_named(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'outrider\[lora\]'"):
        made(tiny_target)
