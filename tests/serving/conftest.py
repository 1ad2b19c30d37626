"""A small Medusa drafter, trained by the real command on the embedded target, and its exports."""

import os
import subprocess
import sys
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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Three heads, trained for about a minute on the target's own answers."""
    folder = tmp_path_factory.mktemp("trained")
    respond: dict[str, Any] = {
        "target": "demo",
        "output": str(folder / "data"),
        "prompts": str(PROMPTS),
        "max_new_tokens": 128,
        "batch_size": 40,
        "temperature": 0.7,
    }
    recipe: dict[str, Any] = {
        "target": {"name": "demo"},
        "data": {
            "path": respond["output"],
            "respond": str(folder / "respond.yaml"),
            "validation_share": 0.1,
            "sequence_length": 256,
        },
        "drafter": {"num_heads": 3},
        "optimizer": {"lr": 2e-3, "micro_batch": 2},
        "stop": {"max_epochs": 8, "max_minutes": 2},
        "eval": {"eval_every": 1000, "prompts": 2, "max_new_tokens": 16, "tree_nodes": 4},
        "save": {"every": 1000},
        "output": str(folder / "run"),
    }
    (folder / "respond.yaml").write_text(yaml.safe_dump(respond))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    script = [str(ROOT / "train" / "medusa.py"), "--config", str(folder / "recipe.yaml")]
    subprocess.run([sys.executable, *script], check=True, cwd=folder, env=os.environ)
    return load_drafter(folder / "run" / "best")


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
