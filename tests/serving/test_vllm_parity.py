"""Acceptance in real vLLM beside ours. Run by `make test-serving`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.questions import load_questions
from heads.errors import UserError
from infer.acceptance import Question
from infer.endpoint import VllmServer
from infer.engines import engine_environment, find_vllm_python
from infer.parity import CheckResult
from infer.serving import CheckSettings, check, open_exported
from infer.target import TargetModel, resolve
from tests.serving.conftest import PROMPTS

pytestmark = [pytest.mark.serving, pytest.mark.xdist_group("medusa")]


def questions(target: TargetModel, per_category: int) -> list[Question]:
    return load_questions(PROMPTS, target, per_category=per_category)


def settings(depth: int, tokens: int) -> CheckSettings:
    return CheckSettings(num_speculative_tokens=depth, max_new_tokens=tokens)


def show(result: CheckResult) -> None:
    """The figures, for the record of the test run."""
    print(json.dumps(result.to_json()))


def assert_same_figures(result: CheckResult) -> None:
    """float32: within 1 %, every rate within 0.02, and nearly every text the same."""
    show(result)
    assert result.ours.accepted > 0
    assert abs(result.difference) <= 0.01, result.verdict
    rates = zip(result.ours.acceptance_rate, result.engines.acceptance_rate, strict=True)
    assert all(abs(ours - theirs) <= 0.02 for ours, theirs in rates), result.to_json()
    assert result.identical >= 0.9 * result.ours.prompts, result.verdict


@pytest.mark.parametrize(("depth", "per_category", "tokens"), [(3, 2, 24), (1, 1, 24)])
def test_float32_acceptance_in_vllm_is_ours(
    depth: int, per_category: int, tokens: int, exported: Path, target: TargetModel
) -> None:
    asked = questions(target, per_category)
    result = check(open_exported(exported), target, asked, settings(depth, tokens))
    assert_same_figures(result)
    if result.identical == len(asked):
        assert result.engines == result.ours


@pytest.mark.parametrize(("depth", "per_category", "tokens"), [(3, 3, 32)])
def test_bfloat16_acceptance_in_vllm_is_ours(
    depth: int, per_category: int, tokens: int, exported: Path, rough_target: TargetModel
) -> None:
    """Half of the texts part from ours: along the engine's own texts, the figures are the same."""
    asked = questions(rough_target, per_category)
    result = check(open_exported(exported), rough_target, asked, settings(depth, tokens))
    show(result)
    assert result.passed, result.verdict
    assert abs(result.difference_on_same_texts) <= 0.02, result.verdict


def test_draft_vocabulary_is_served_as_it_was_trained(reduced: Path, target: TargetModel) -> None:
    result = check(open_exported(reduced), target, questions(target, 1), settings(2, 32))
    assert_same_figures(result)


def test_output_matrix_of_every_head_is_served(own_heads: Path, target: TargetModel) -> None:
    result = check(open_exported(own_heads), target, questions(target, 1), settings(2, 24))
    assert_same_figures(result)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(exported: Path, tmp_path: Path) -> Iterator[str]:
    """A vLLM server with two draft tokens a round, ended with the test."""
    python, port = find_vllm_python(), free_port()
    speculation = {"method": "medusa", "model": str(exported), "num_speculative_tokens": 2}
    arguments = ["--model", resolve("demo"), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    arguments += ["--speculative-config", json.dumps(speculation)]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=engine_environment(python)
            | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            start_new_session=True,
        )
        try:
            wait_for_server(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_server(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(UserError):
            VllmServer(f"http://127.0.0.1:{port}")
            return
        time.sleep(1)
    pytest.fail(f"no server after 180 s: {log.read_text()[-2000:]}")


def test_running_server_gives_the_same_figures(
    server: str, exported: Path, target: TargetModel
) -> None:
    asked = questions(target, 1)
    one = CheckSettings(max_new_tokens=24)
    result = check(open_exported(exported), target, asked, one, endpoint=server)
    assert result.settings["num_speculative_tokens"] == 2
    assert_same_figures(result)
