"""`outrider train` starts the kind's script: alone in this Python, several through accelerate."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from heads.errors import UserError
from train.launch import launch


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_one_process_runs_the_script_itself_and_keeps_its_status(started: list[list[str]]) -> None:
    assert launch("medusa", None, ["optimizer.lr=0.1"]) == 2
    (command,) = started
    assert command[0] == sys.executable
    assert Path(command[1]).parts[-2:] == ("train", "medusa.py")
    assert command[2:] == ["optimizer.lr=0.1"]


def test_several_processes_come_up_by_accelerate(started: list[list[str]]) -> None:
    launch("medusa", None, [], num_processes=2)
    (command,) = started
    assert command[1:3] == ["-m", "accelerate.commands.launch"]
    assert command[command.index("--num_processes") + 1] == "2"
    assert Path(command[command.index("--config_file") + 1]).name == "ddp.yaml"


def test_a_wrong_recipe_starts_nothing(started: list[list[str]]) -> None:
    with pytest.raises(UserError, match=r"did you mean 'optimizer\.lr'"):
        launch("medusa", None, ["optimizer.lrr=0.1"], num_processes=2)
    with pytest.raises(UserError, match="no such accelerate config"):
        launch("medusa", None, [], launch_config=Path("nowhere.yaml"))
    assert started == []
