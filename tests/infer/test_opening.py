import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import save_drafter
from heads.errors import UserError
from heads.tree import chain
from infer import opening
from infer.export import PublicFolder, export_drafter, read_back
from infer.loop import GenerationSettings, speculative_generate
from infer.opening import bind_drafter, export_from, open_target, read_drafter
from infer.target import TargetModel
from tests.infer.recurrent import made

PROMPT = list(range(20, 60))


def public_folder(target: TargetModel, folder: Path, form: str) -> Path:
    """A drafter's folder that does not say which target it is for."""
    export_drafter(made(target, form), "vllm", folder, lambda: target)
    config = json.loads((folder / "config.json").read_text())
    del config["outrider_target"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafts(target: TargetModel, checkpoint: Any) -> tuple[list[int], int]:
    settings = GenerationSettings(max_new_tokens=16, shape=chain(3))
    done = speculative_generate(target, checkpoint.drafter, PROMPT, settings)
    return done.tokens, done.accepted


@pytest.mark.parametrize("form", ["eagle", "fused_vocab"])
def test_folder_drafts_the_same_trained_exported_or_public(
    form: str, tiny_target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = made(tiny_target, form)
    save_drafter(checkpoint, tmp_path / "own")
    export_drafter(checkpoint, "vllm", tmp_path / "exported", lambda: tiny_target)
    public_folder(tiny_target, tmp_path / "public", form)
    expected = drafts(tiny_target, checkpoint)
    for name in ("own", "exported", "public"):
        spec = str(tmp_path / name)
        bound = bind_drafter(read_drafter(spec), spec, tiny_target)
        assert drafts(tiny_target, bound) == expected


def test_public_folder_needs_a_target_by_name(
    tiny_target: TargetModel, tiny_target_folder: Path, tmp_path: Path
) -> None:
    spec = str(public_folder(tiny_target, tmp_path / "public", "eagle"))
    found = read_drafter(spec)
    assert isinstance(found, PublicFolder)
    with pytest.raises(UserError, match=r"does not say which target.*name it by --target"):
        open_target([found], None, "float32", "cpu")
    opened = open_target([found], str(tiny_target_folder), "float32", "cpu")
    assert opened.identity.weights_hash == tiny_target.identity.weights_hash


def test_notes_on_a_public_folder_are_heard(tiny_target: TargetModel, tmp_path: Path) -> None:
    spec = str(public_folder(tiny_target, tmp_path / "public", "fused_rope"))
    heard: list[str] = []
    bind_drafter(read_drafter(spec), spec, tiny_target, heard.append)
    assert len(heard) == 1
    assert "rope settings" in heard[0]


def test_public_folder_is_exported_against_its_target(
    tiny_target: TargetModel, tiny_target_folder: Path, tmp_path: Path
) -> None:
    spec = str(public_folder(tiny_target, tmp_path / "public", "fused_vocab"))
    with pytest.raises(UserError, match="name it by --target"):
        export_from(spec, "vllm", tmp_path / "out")
    export_from(spec, "vllm", tmp_path / "out", "float32", str(tiny_target_folder))
    back = read_back(tmp_path / "out")
    original = made(tiny_target, "fused_vocab").drafter.state_dict()
    read = back.drafter.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in original.items())
    assert back.target.weights_hash == tiny_target.identity.weights_hash
    with pytest.raises(UserError, match="exported folder already"):
        export_from(str(tmp_path / "out"), "vllm", tmp_path / "again")


def test_hub_id_is_fetched_and_read_as_a_folder(
    tiny_target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = public_folder(tiny_target, tmp_path / "public", "eagle")
    monkeypatch.setattr(opening, "fetch", lambda spec: folder)
    assert read_drafter("someone/drafter") == PublicFolder(folder)
    with pytest.raises(UserError, match="no such drafter: no/such/folder"):
        read_drafter("no/such/folder")


def test_a_kind_and_a_drafter_are_opened_as_one(tiny_target: TargetModel, tmp_path: Path) -> None:
    checkpoint = made(tiny_target, "eagle")
    checkpoint.calibration["accuracies_HK"] = [[0.5, 0.2]]
    save_drafter(checkpoint, tmp_path / "own")
    spec = f"suffix+{tmp_path / 'own'}"
    bound = bind_drafter(read_drafter(spec), spec, tiny_target)
    assert bound.drafter.kind == "suffix+eagle"
    assert bound.drafter.core.kind == "eagle"
    assert bound.contract == checkpoint.contract
    assert bound.calibration == checkpoint.calibration
    plain = speculative_generate(tiny_target, None, PROMPT, GenerationSettings(max_new_tokens=16))
    assert drafts(tiny_target, bound)[0] == plain.tokens


def test_two_kinds_without_training_are_opened_as_one(tiny_target: TargetModel) -> None:
    assert read_drafter("suffix+ngram") is None
    assert bind_drafter(None, "suffix+ngram", tiny_target).drafter.kind == "suffix+ngram"


def test_a_folder_with_a_plus_in_its_name_is_a_folder(
    tiny_target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_drafter(made(tiny_target, "eagle"), tmp_path / "suffix+mine")
    bound = bind_drafter(read_drafter("suffix+mine"), "suffix+mine", tiny_target)
    assert bound.drafter.kind == "eagle"
