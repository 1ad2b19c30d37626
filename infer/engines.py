"""Serving engines as `check` sees them: prompts in, token ids and acceptance counts out.

`VllmProcess` starts vLLM in an environment of its own and ends it; `infer.endpoint.VllmServer`
speaks to one that runs already. Both decode greedily and give the engine's own counts.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from heads.errors import UserError

PYTHON_VARIABLE = "OUTRIDER_VLLM_PYTHON"
LOCAL_PYTHON = Path(".venv-vllm/bin/python")
GRACE_S = 30
"""How long after its own alarm an engine may still be ending."""
RUNNER = Path(__file__).with_name("vllm_runner.py")


@dataclass(frozen=True)
class EngineJob:
    """What an engine is asked: greedy tokens for every prompt, with K draft tokens a round."""

    prompts: Sequence[Sequence[int]]
    stop_token_ids: Sequence[int]
    num_speculative_tokens: int
    max_new_tokens: int
    max_num_seqs: int
    seed: int
    timeout_s: int


@dataclass(frozen=True)
class EngineRun:
    """What came out: new ids a prompt, and the engine's own counts over this job alone."""

    engine: str
    outputs: list[list[int]]
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    seconds: float


class ServingEngine(Protocol):
    """An engine that a job can be given to; `max_model_len` is the context that it serves."""

    @property
    def max_model_len(self) -> int:
        """Positions that a request may have."""
        ...

    def depth(self, asked: int | None, deepest: int) -> int:
        """The K to compare at: what was asked, or what the engine or the drafter can do."""
        ...

    def run(self, job: EngineJob) -> EngineRun:
        """Do the job."""
        ...


@dataclass(frozen=True)
class VllmProcess:
    """vLLM in a process of its own, ended with the job.

    `target` is a folder or an id; `drafter` None comes with it. `kv_gib` is the room for keys and
    values on a CPU.
    """

    python: Path
    target: str
    revision: str | None
    drafter: Path | None
    method: str
    dtype: str
    max_model_len: int
    kv_gib: int = 1

    def depth(self, asked: int | None, deepest: int) -> int:
        """What was asked, else the drafter's depth."""
        return deepest if asked is None else asked

    def run(self, job: EngineJob) -> EngineRun:
        """Start vLLM, do the job, end it."""
        with tempfile.TemporaryDirectory(prefix="outrider-vllm-") as folder:
            job_path, result_path = Path(folder, "job.json"), Path(folder, "result.json")
            job_path.write_text(json.dumps(self._record(job)), "utf-8")
            log = Path(folder, "log.txt")
            self._run(["-P", str(RUNNER), str(job_path), str(result_path)], log, job.timeout_s)
            if not result_path.exists():
                raise UserError(f"{self.python}: vLLM failed: {_reason(log)}; {_keep(log)}")
            result = json.loads(result_path.read_text("utf-8"))
        version = result.pop("version")
        return EngineRun(engine=f"vLLM {version}", **result)

    def _record(self, job: EngineJob) -> dict[str, Any]:
        return {
            "target": self.target,
            "revision": self.revision,
            "drafter": None if self.drafter is None else os.path.abspath(self.drafter),
            "method": self.method,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "kv_gib": self.kv_gib,
            "prompts": [list(ids) for ids in job.prompts],
            "stop_token_ids": list(job.stop_token_ids),
            "num_speculative_tokens": job.num_speculative_tokens,
            "max_tokens": job.max_new_tokens,
            "max_num_seqs": job.max_num_seqs,
            "seed": job.seed,
            "deadline_s": job.timeout_s,
        }

    def _run(self, arguments: list[str], log: Path, timeout_s: int) -> None:
        """Run the environment's Python to its end; its own alarm rings before ours."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self.python), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=engine_environment(self.python),
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s + GRACE_S)
            finally:
                _end_group(process)
        if process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            raise UserError(
                f"vLLM did not finish within {timeout_s} s or ran out of memory "
                f"(last: {_last_line(log)}); take fewer prompts or tokens, or a longer timeout"
            )


def engine_environment(python: Path) -> dict[str, str]:
    """This environment without what would lead another Python astray, with Intel's OpenMP on a CPU.

    GNU's OpenMP spins while it waits: on busy cores vLLM was seen to run 16 times slower with it.
    """
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {key: value for key, value in os.environ.items() if key not in foreign}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if sys.platform == "linux" and openmp.exists():
        kept["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), kept.get("LD_PRELOAD")]))
        kept.setdefault("KMP_BLOCKTIME", "1")
    return kept


def find_vllm_python() -> Path:
    """The Python of vLLM's environment."""
    given = os.environ.get(PYTHON_VARIABLE)
    python = Path(given) if given else LOCAL_PYTHON
    if not python.is_file():
        where = f"{PYTHON_VARIABLE}={given}" if given else f"{LOCAL_PYTHON} under {Path.cwd()}"
        raise UserError(
            f"no vLLM environment: {where} is no file; run `make venv-vllm`, set {PYTHON_VARIABLE} "
            "to the Python of an environment with vLLM, or give a running server by --endpoint"
        )
    return Path(os.path.abspath(python))


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End the process and what it started; nothing is left when it has ended by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path) -> str:
    """The last error that a log names, with the two lines behind it; else the log's last line."""
    text = log.read_text("utf-8", errors="replace")
    errors = re.findall(r"\b\w*(?:Error|Exception): .+(?:\n.+){0,2}", text)
    return " ".join(errors[-1].split())[:400] if errors else _last_line(log)


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def _keep(log: Path) -> str:
    """Move a log out of its temporary folder and say where it is."""
    handle, kept = tempfile.mkstemp(prefix="outrider-vllm-", suffix=".log")
    with os.fdopen(handle, "wb") as file:
        file.write(log.read_bytes())
    return f"its log is {kept}"
