import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import Checkpoint, Contract, Drafter, drafter_class
from heads.errors import UserError
from heads.vocab import VocabMap
from infer.export import export_drafter, read_back
from infer.export.vllm import prove_vllm
from infer.export.vllm_medusa import never_chosen_outside
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer

FORMS: dict[str, dict[str, Any]] = {
    "shared": {"num_heads": 3},
    "deep": {"num_heads": 2, "num_layers": 2},
    "own": {"num_heads": 2, "lm_head": "own"},
    "vocab": {"num_heads": 3, "draft_vocab_size": 40},
}


def made(target: TargetModel, **fields: Any) -> Checkpoint:
    """A Medusa drafter with random residual blocks."""
    cls = drafter_class("medusa")
    config = cls.Config(**fields)
    make = torch.Generator().manual_seed(7)
    vocab = None
    if config.draft_vocab_size:
        ids = torch.randperm(target.identity.vocab_size, generator=make)[: config.draft_vocab_size]
        vocab = VocabMap(ids.sort().values, target.identity.vocab_size)
    drafter = cls.create(config, target.identity, target.shared, vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=make), alpha=0.3)
    return Checkpoint(drafter, Contract(target=target.identity, **drafter.contract_fields()))


def states(target: TargetModel, num: int = 64) -> Tensor:
    make = torch.Generator().manual_seed(3)
    return torch.randn(num, target.identity.hidden_size, generator=make) * 4


def draft_logits(drafter: Drafter, hidden_ND: Tensor) -> Tensor:
    logits: Any = drafter
    with torch.no_grad():
        return torch.stack([logits.draft_logits(row, logits.max_depth) for row in hidden_ND])


def exported(target: TargetModel, folder: Path, **fields: Any) -> Path:
    return export_drafter(made(target, **fields), "vllm", folder, lambda: target)


@pytest.mark.parametrize("form", FORMS)
def test_folder_holds_its_config_and_tensors_and_nothing_else(
    form: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    out = exported(tiny_target, tmp_path / "out", **FORMS[form])
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in out.iterdir())
    prove_vllm(out)


@pytest.mark.parametrize("form", ["shared", "deep", "own"])
def test_read_back_drafter_has_the_originals_logits_bit_for_bit(
    form: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, **FORMS[form])
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: tiny_target)
    back = read_back(out).bound(torch.float32, torch.device("cpu"), tiny_target.shared)
    hidden_ND = states(tiny_target)
    assert torch.equal(draft_logits(back, hidden_ND), draft_logits(checkpoint.drafter, hidden_ND))


def test_read_back_draft_vocabulary_drafts_what_the_original_drafts(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, **FORMS["vocab"])
    out = export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: tiny_target)
    back = read_back(out).bound(torch.float32, torch.device("cpu"), tiny_target.shared)
    ids: Any = checkpoint.drafter.draft_ids
    hidden_ND = states(tiny_target)
    original = draft_logits(checkpoint.drafter, hidden_ND)
    whole = draft_logits(back, hidden_ND)
    assert torch.equal(whole.argmax(-1), ids[original.argmax(-1)])
    torch.testing.assert_close(whole[..., ids], original)


def test_row_outside_a_draft_vocabulary_never_has_the_highest_logit() -> None:
    make = torch.Generator().manual_seed(0)
    matrix_VD = torch.randn(50, 8, generator=make) - 0.5
    ids = torch.tensor([3, 4, 17, 30])
    filled = never_chosen_outside(matrix_VD, ids)
    # All logits of the vocabulary are negative for many of these states: zero rows would win there.
    hidden_ND = torch.randn(500, 8, generator=make) + 3
    best = (hidden_ND @ filled.T).argmax(-1)
    assert torch.equal(best, ids[(hidden_ND @ matrix_VD[ids].T).argmax(-1)])
    assert ((hidden_ND @ matrix_VD[ids].T).amax(-1) < 0).any()
    assert torch.equal(filled[ids], matrix_VD[ids])


def test_config_says_what_vllm_reads(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out", num_heads=3, num_layers=2)
    config = json.loads((out / "config.json").read_text())
    target = config.pop("outrider_target")
    assert config == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": 160,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": False,
        "original_lm_head": True,
        "dtype": "float32",
    }
    assert target == tiny_target.identity.model_dump(mode="json")


def test_asked_dtype_is_written_for_every_tensor(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = export_drafter(
        made(tiny_target, num_heads=2), "vllm", tmp_path / "out", lambda: tiny_target, "bfloat16"
    )
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with pytest.raises(UserError, match="dtype 'int8'"):
        export_drafter(
            made(tiny_target, num_heads=2), "vllm", tmp_path / "new", lambda: tiny_target, "int8"
        )
    assert not (tmp_path / "new").exists()


def test_target_is_loaded_only_when_its_tensors_are_part_of_the_folder(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    def refuse() -> TargetModel:
        raise AssertionError("loaded")

    export_drafter(made(tiny_target, **FORMS["own"]), "vllm", tmp_path / "own", refuse)
    with pytest.raises(AssertionError, match="loaded"):
        export_drafter(made(tiny_target, **FORMS["shared"]), "vllm", tmp_path / "shared", refuse)


def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["blocks.1.layers.0.weight"]


def add(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["blocks.1.layers.0.bias"] = torch.zeros(32)


def misshape(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = torch.zeros(159, 32)


def recast(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()


def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["blocks.0.layers.0.weight"][3, 5] = float("inf")


def promise_more(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["num_heads"] = 3


def forget_a_key(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["hidden_size"]


def rename_kind(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["model_type"] = "llama"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop, "blocks.1.layers.0.weight is missing"),
        (add, "blocks.1.layers.0.bias is unexpected"),
        (misshape, r"lm_head.weight has shape \[159, 32\], expected \[160, 32\]"),
        (recast, "lm_head.weight is torch.float16, expected torch.float32"),
        (spoil, "blocks.0.layers.0.weight holds NaN or infinity"),
        (promise_more, "blocks.2.layers.0.weight is missing"),
        (forget_a_key, "hidden_size"),
        (rename_kind, "model_type 'llama'"),
    ],
)
def test_proof_names_the_fault(
    fault: Callable[[dict[str, Tensor], dict[str, Any]], None],
    message: str,
    tiny_target: TargetModel,
    tmp_path: Path,
) -> None:
    out = exported(tiny_target, tmp_path / "out", num_heads=2)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    fault(tensors, config)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        prove_vllm(out)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_cut_file_is_named(name: str, tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out", num_heads=2)
    (out / name).write_bytes((out / name).read_bytes()[:100])
    with pytest.raises(UserError, match=name):
        prove_vllm(out)


def test_foreign_file_in_the_folder_is_named(tiny_target: TargetModel, tmp_path: Path) -> None:
    out = exported(tiny_target, tmp_path / "out", num_heads=2)
    (out / "README.md").write_text("hello")
    with pytest.raises(UserError, match=r"README\.md is no part of the contract"):
        prove_vllm(out)


@pytest.mark.parametrize("name", ["my-eagle-drafter", "EAGLE3", "a/dflash/b", "dspark1"])
def test_path_that_would_change_the_method_is_refused(
    name: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="another method by its path"):
        exported(tiny_target, tmp_path / name, num_heads=2)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_refused_and_left_alone(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(UserError, match="exists"):
        exported(tiny_target, tmp_path / "out", num_heads=2)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_unknown_engine_names_the_nearest(tiny_target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        export_drafter(made(tiny_target, num_heads=1), "vlm", tmp_path / "out", lambda: tiny_target)


def test_kind_without_a_place_is_refused(tiny_target: TargetModel, tmp_path: Path) -> None:
    cls = drafter_class("ngram")
    drafter = cls.create(cls.Config(), tiny_target.identity, tiny_target.shared)
    checkpoint = Checkpoint(drafter, Contract(target=tiny_target.identity))
    with pytest.raises(UserError, match="no place for a folder of kind 'ngram'"):
        export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: tiny_target)


def test_another_targets_matrix_is_refused(tiny_target: TargetModel, tmp_path: Path) -> None:
    other = TargetModel(tiny_model(seed=1), tiny_tokenizer(), "other")
    with pytest.raises(UserError, match="other target weights"):
        export_drafter(made(tiny_target, num_heads=2), "vllm", tmp_path / "out", lambda: other)
    assert list(tmp_path.iterdir()) == []


def test_drafter_with_nan_leaves_nothing(tiny_target: TargetModel, tmp_path: Path) -> None:
    checkpoint = made(tiny_target, num_heads=2)
    with torch.no_grad():
        next(checkpoint.drafter.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        export_drafter(checkpoint, "vllm", tmp_path / "out", lambda: tiny_target)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more than that into one file fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_is_one_message_and_leaves_nothing(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    with largest_file(10_000), pytest.raises(UserError, match="could not write"):
        exported(tiny_target, tmp_path / "made" / "for" / "out", num_heads=2)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from heads.files import whole_folder
from infer.export import contract

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "write":
    contract.save_file = die
else:
    os.replace = die
with whole_folder(Path(sys.argv[2])) as folder:
    contract.write_files(folder, {}, {"a": torch.zeros(2)})
"""


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_killed_export_leaves_no_folder(moment: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(out)],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not out.exists()
