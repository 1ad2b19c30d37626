"""`outrider train KIND`: the kind's script in this process's Python, or through accelerate."""

import subprocess
import sys
from pathlib import Path

from heads.base import drafter_class, drafter_kinds
from heads.errors import UserError, unknown_name
from train.recipe import CONFIGS, load_training_recipe

SCRIPTS = Path(__file__).resolve().parent


def launch(
    kind: str,
    config: Path | None,
    overrides: list[str],
    num_processes: int = 1,
    launch_config: Path | None = None,
) -> int:
    """Train a kind; the exit status. One process runs the script itself, so its status is ours."""
    trainable = [name for name in drafter_kinds() if drafter_class(name).trainable]
    if kind not in trainable:
        raise unknown_name("drafter kind to train", kind, trainable)
    load_training_recipe(kind, config, overrides)
    arguments = [str(SCRIPTS / f"{kind}.py")]
    arguments += ["--config", str(config)] if config is not None else []
    launcher = [sys.executable]
    if launch_config is None and num_processes > 1:
        launch_config = CONFIGS / "accelerate" / "ddp.yaml"
    if launch_config is not None:
        if not launch_config.is_file():
            raise UserError(f"no such accelerate config: {launch_config}")
        launcher += ["-m", "accelerate.commands.launch", "--config_file", str(launch_config)]
        launcher += ["--num_processes", str(num_processes)] if num_processes > 1 else []
    return subprocess.run([*launcher, *arguments, *overrides], check=False).returncode
