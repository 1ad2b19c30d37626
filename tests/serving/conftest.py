"""Small drafters, trained by the real command on the embedded target, and their exports."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from heads.base import Checkpoint, Contract, drafter_class, load_drafter
from heads.vocab import VocabMap
from infer.export import export_drafter
from infer.target import TargetModel

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "configs" / "prompts" / "demo.jsonl"


@pytest.fixture(scope="session")
def target() -> TargetModel:
    """The embedded target in float32."""
    return TargetModel.load("demo", dtype="float32")


@pytest.fixture(scope="session")
def rough_target() -> TargetModel:
    """The embedded target in bfloat16."""
    return TargetModel.load("demo", dtype="bfloat16")


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the data, which every training shares, and for what is trained."""
    return tmp_path_factory.mktemp("trained")


def trained(work: Path, kind: str, minutes: float, **changes: Any) -> Checkpoint:
    """A drafter trained by the real command, on the target's own greedy answers.

    The checks ask the same prompts, so that a minute of training brings enough accepted drafts.
    """
    respond: dict[str, Any] = {
        "target": "demo",
        "output": str(work / "data"),
        "prompts": str(PROMPTS),
        "max_new_tokens": 64,
        "batch_size": 40,
        "temperature": 0.0,
    }
    recipe: dict[str, Any] = {
        "target": {"name": "demo"},
        "data": {
            "path": respond["output"],
            "respond": str(work / "respond.yaml"),
            "validation_share": 0.1,
            "sequence_length": 256,
        },
        "optimizer": {"lr": 2e-3, "micro_batch": 2},
        "stop": {"max_epochs": 16, "max_minutes": minutes},
        "eval": {"eval_every": 1000, "prompts": 2, "max_new_tokens": 16, "tree_nodes": 4},
        "save": {"every": 1000},
        "output": str(work / kind),
        **changes,
    }
    (work / "respond.yaml").write_text(yaml.safe_dump(respond))
    (work / f"{kind}.yaml").write_text(yaml.safe_dump(recipe))
    script = [str(ROOT / "train" / f"{kind}.py"), "--config", str(work / f"{kind}.yaml")]
    subprocess.run([sys.executable, *script], check=True, cwd=work, env=os.environ)
    return load_drafter(work / kind / "best")


@pytest.fixture(scope="session")
def checkpoint(work: Path) -> Checkpoint:
    """Three heads, trained for about a minute."""
    return trained(work, "medusa", 1.5, drafter={"num_heads": 3})


@pytest.fixture(scope="session")
def exported_by_form(
    work: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Folders of the drafters that feed on themselves, each made when it is first asked for.

    `plain`: EAGLE-1. `reduced`: EAGLE-3 over a draft vocabulary. `fused`: the same one over the
    whole vocabulary. `whole`: an MTP head with its target. `student`: a draft model. The folders'
    names hold no method's.
    """
    folder = tmp_path_factory.mktemp("vllm")
    drafters = {
        "plain": ("eagle", {"num_steps": 2}),
        "reduced": ("eagle3", {"draft_vocab_size": 1000, "norm_before_residual": True}),
        "whole": ("mtp", {}),
        "student": ("draft_model", {"student": {"layers": 3}}),
    }
    optimizer = {"lr": 1e-3, "micro_batch": 2}

    @cache
    def drafter(form: str) -> Checkpoint:
        kind, fields = drafters[form]
        return trained(work, kind, 2.5, drafter=fields, optimizer=optimizer)

    @cache
    def export(form: str) -> Path:
        found = over_whole_vocabulary(drafter("reduced"), target) if form == "fused" else None
        found = found or drafter(form)
        return export_drafter(found, "vllm", folder / form, lambda: target, "float32")

    return export


def over_whole_vocabulary(checkpoint: Checkpoint, target: TargetModel) -> Checkpoint:
    """The same drafter with the target's own rows for the tokens outside its draft vocabulary."""
    reduced: Any = checkpoint.drafter
    cls = drafter_class(reduced.kind)
    config = reduced.config.model_copy(update={"draft_vocab_size": None})
    drafter = cls.create(config, target.identity, target.shared)
    tensors = dict(reduced.state_dict())
    matrix_VD = target.shared.lm_head_VD.clone()
    matrix_VD[tensors.pop("draft_ids")] = tensors["lm_head.weight"]
    drafter.load_state_dict(tensors | {"lm_head.weight": matrix_VD})
    return Checkpoint(drafter, Contract(target=target.identity, **drafter.contract_fields()))


@pytest.fixture(scope="session")
def exported(
    checkpoint: Checkpoint, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The trained drafter for vLLM."""
    return export_drafter(
        checkpoint, "vllm", tmp_path_factory.mktemp("vllm") / "drafter", lambda: target
    )


@pytest.fixture(scope="session")
def reduced(
    checkpoint: Checkpoint, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same heads over a draft vocabulary of the 600 tokens that the prompts use most."""
    text = target.tokenizer(PROMPTS.read_text())["input_ids"]
    counts_V = torch.bincount(torch.tensor(text), minlength=target.identity.vocab_size)
    vocab = VocabMap.from_counts(counts_V, 600, target.end_tokens)
    return export_drafter(
        rebuilt(checkpoint, target, vocab, draft_vocab_size=len(vocab)),
        "vllm",
        tmp_path_factory.mktemp("vllm") / "reduced",
        lambda: target,
    )


@pytest.fixture(scope="session")
def own_heads(
    checkpoint: Checkpoint, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same blocks, each with an output matrix of its own."""
    return export_drafter(
        rebuilt(checkpoint, target, None, lm_head="own"),
        "vllm",
        tmp_path_factory.mktemp("vllm") / "own",
        lambda: target,
    )


def rebuilt(
    checkpoint: Checkpoint, target: TargetModel, vocab: VocabMap | None, **fields: Any
) -> Checkpoint:
    """The trained residual blocks in a drafter of other settings."""
    cls = drafter_class("medusa")
    drafter = cls.create(cls.Config(num_heads=3, **fields), target.identity, target.shared, vocab)
    blocks: Any = drafter
    trained: Any = checkpoint.drafter
    blocks.blocks.load_state_dict(trained.blocks.state_dict())
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter, contract)
