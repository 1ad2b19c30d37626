import ast
import json
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import Checkpoint, Contract, Drafter, drafter_class
from heads.errors import UserError
from heads.tree import chain
from infer import engines
from infer.acceptance import Counts, Question
from infer.endpoint import VllmServer
from infer.engines import EngineRun, engine_environment, find_vllm_python
from infer.export import Exported, export_drafter
from infer.loop import GenerationSettings, speculative_generate
from infer.parity import CheckResult
from infer.replay import replay
from infer.serving import CheckSettings, check, engine_counts, measure_ours, open_exported
from infer.target import TargetModel
from tests.conftest import tiny_model, tiny_tokenizer

QUESTIONS = [Question(f"q{i}", "made", tuple(range(3 + i, 15 + i))) for i in range(4)]
SETTINGS = CheckSettings(num_speculative_tokens=2, max_new_tokens=12)


def drafter_for(target: TargetModel) -> Drafter:
    """Untrained heads: they draft the next token once more, which a random target often repeats."""
    cls = drafter_class("medusa")
    return cls.create(cls.Config(num_heads=3), target.identity, target.shared)


@pytest.fixture(scope="module")
def folder(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = drafter_for(tiny_target)
    checkpoint = Checkpoint(drafter, Contract(target=tiny_target.identity))
    out = tmp_path_factory.mktemp("exported") / "out"
    return export_drafter(checkpoint, "vllm", out, lambda: tiny_target)


@pytest.fixture
def opened(folder: Path) -> Exported:
    return open_exported(folder)


@pytest.fixture
def truth(opened: Exported, tiny_target: TargetModel) -> EngineRun:
    """What a right engine would answer."""
    drafter = opened.bound(torch.float32, torch.device("cpu"), tiny_target.shared)
    outputs, counts = measure_ours(tiny_target, drafter, QUESTIONS, SETTINGS, 2)
    return EngineRun(
        engine="vLLM 0",
        outputs=outputs,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_per_position=counts.accepted_per_position,
        seconds=1.0,
    )


# The replay


@pytest.mark.parametrize("kind", ["medusa", "ngram"])
@pytest.mark.parametrize("depth", [1, 3])
def test_replay_along_our_own_text_counts_what_the_loop_counted(
    kind: str, depth: int, tiny_target: TargetModel
) -> None:
    cls = drafter_class(kind)
    drafter = cls.create(cls.Config(), tiny_target.identity, tiny_target.shared)
    accepted = 0
    for seed in range(12):
        make = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, 160, (10,), generator=make).tolist()
        settings = GenerationSettings(max_new_tokens=9 + seed, shape=chain(depth))
        loop = speculative_generate(tiny_target, drafter, prompt, settings)
        again = replay(tiny_target, drafter, prompt, loop.tokens, depth)
        assert (again.rounds, again.accepted) == (loop.rounds, loop.accepted)
        assert again.accepted_per_position == loop.accepted_per_position
        assert again.drafted == loop.drafted
        accepted += loop.accepted
    assert accepted > 0


# The verdict


def counts_of(accepted: int, rounds: int = 1000) -> Counts:
    return Counts(rounds, rounds, accepted, [rounds], [accepted], rounds + accepted, 40)


def result_of(ours: int, engine: int, replayed: int | None = None) -> CheckResult:
    return CheckResult(
        exported="out",
        engine="vLLM 0",
        settings={"num_speculative_tokens": 1, "target": "t", "dtype": "float32", "prompts": 40},
        ours=counts_of(ours),
        engines=counts_of(engine),
        identical=30,
        tolerance=0.01,
        replayed=None if replayed is None else counts_of(replayed),
    )


@pytest.mark.parametrize(
    ("ours", "engine", "replayed", "passed"),
    [
        (500, 500, None, True),
        (500, 514, None, True),
        (500, 520, None, False),
        (500, 600, 599, True),
        (500, 600, 500, False),
        (500, 501, 700, True),
    ],
)
def test_verdict_holds_the_difference_against_the_tolerance(
    ours: int, engine: int, replayed: int | None, passed: bool
) -> None:
    result = result_of(ours, engine, replayed)
    assert result.passed == passed
    assert ("within" in result.verdict) == passed
    assert result.to_json()["passed"] == passed


def test_record_and_table_show_both_sides() -> None:
    result = result_of(500, 600, 599)
    record = json.loads(json.dumps(result.to_json()))
    assert record["ours"]["acceptance_length"] == 1.5
    assert record["engine_side"]["acceptance_rate"] == [0.6]
    assert record["ours_on_engine_texts"]["counts"]["accepted"] == 599
    assert record["identical_share"] == 0.75
    assert record["difference"] == pytest.approx(1.6 / 1.5 - 1)
    assert [column.header for column in result.table().columns][1:] == [
        "ours",
        "vLLM 0",
        "ours on its texts",
    ]


def test_engine_that_drafted_less_than_k_is_refused(truth: EngineRun) -> None:
    assert engine_counts(truth, 2).acceptance_length == 1 + truth.accepted / truth.rounds
    with pytest.raises(UserError, match="expected 2 a round"):
        engine_counts(replace(truth, drafted=truth.drafted - 1), 2)
    with pytest.raises(UserError, match="longer answers"):
        engine_counts(replace(truth, rounds=0, drafted=0), 2)


# Bad input


@pytest.mark.usefixtures("stub")
def test_more_draft_tokens_than_heads_are_refused(
    opened: Exported, tiny_target: TargetModel
) -> None:
    settings = replace(SETTINGS, num_speculative_tokens=4)
    with pytest.raises(UserError, match=r"4 draft tokens a round were asked for .* at most 3"):
        check(opened, tiny_target, QUESTIONS, settings)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "no prompts"),
        ([Question("one", "made", (5,))], "prompt one has fewer than two tokens"),
        ([Question("long", "made", (5,) * 500)], "prompt long of 500 tokens needs 515 positions"),
    ],
)
def test_prompts_that_would_be_counted_otherwise_are_refused(
    questions: list[Question], message: str, opened: Exported, tiny_target: TargetModel
) -> None:
    with pytest.raises(UserError, match=message):
        check(opened, tiny_target, questions, SETTINGS)


def test_folder_for_another_target_is_refused(opened: Exported) -> None:
    other = TargetModel(tiny_model(seed=1), tiny_tokenizer(), "other")
    with pytest.raises(UserError, match="other target weights"):
        check(opened, other, QUESTIONS, SETTINGS)


def test_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_exported(tmp_path / "nothing")
    with pytest.raises(UserError, match="not an exported drafter"):
        open_exported(tmp_path)


def test_missing_vllm_environment_says_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(engines.PYTHON_VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"make venv-vllm.*OUTRIDER_VLLM_PYTHON"):
        find_vllm_python()
    monkeypatch.setenv(engines.PYTHON_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"OUTRIDER_VLLM_PYTHON=.*none is no file"):
        find_vllm_python()


def test_environment_under_the_working_directory_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(engines.PYTHON_VARIABLE, raising=False)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_vllm_python() == python


# The subprocess, with a stub in vLLM's place


STUB = """#!{python}
import json, os, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
flag, runner, job_path, result_path = sys.argv[1:]
assert flag == "-P" and runner.endswith("vllm_runner.py")
with open(os.path.join(here, "mode")) as file:
    mode = file.read()
with open(job_path) as file:
    job = json.load(file)
with open(os.path.join(here, "job.json"), "w") as file:
    json.dump(job, file)
if mode == "fail":
    print("INFO starting\\n(Worker) ValueError: weights were not initialized\\nbye")
    sys.exit(1)
if mode == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.path.join(here, "child"), "w") as file:
        file.write(str(child.pid))
    time.sleep(60)
os.replace(os.path.join(here, "result.json"), result_path)
"""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program in place of vLLM's Python; answers with `result.json` beside it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (python.parent / "mode").write_text("answer")
    monkeypatch.setenv(engines.PYTHON_VARIABLE, str(python))
    return python.parent


def answer(stub: Path, run: EngineRun) -> None:
    record = {
        "version": "0",
        "outputs": run.outputs,
        "rounds": run.rounds,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "accepted_per_position": run.accepted_per_position,
        "seconds": run.seconds,
    }
    (stub / "result.json").write_text(json.dumps(record))


def test_same_figures_pass_and_the_job_says_what_to_run(
    stub: Path, truth: EngineRun, opened: Exported, tiny_target: TargetModel
) -> None:
    answer(stub, truth)
    result = check(opened, tiny_target, QUESTIONS, SETTINGS)
    assert result.passed and result.difference == 0 and result.identical == len(QUESTIONS)
    assert result.replayed is None
    job = json.loads((stub / "job.json").read_text())
    assert job["prompts"] == [list(q.token_ids) for q in QUESTIONS]
    assert job["stop_token_ids"] == [2]
    assert (job["method"], job["drafter"]) == ("medusa", str(opened.folder))
    assert (job["num_speculative_tokens"], job["max_tokens"], job["dtype"]) == (2, 12, "float32")
    assert job["max_model_len"] == tiny_target.max_positions


def test_other_texts_are_replayed(
    stub: Path, truth: EngineRun, opened: Exported, tiny_target: TargetModel
) -> None:
    shorter = [truth.outputs[0][:6], *truth.outputs[1:]]
    answer(stub, replace(truth, outputs=shorter))
    result = check(opened, tiny_target, QUESTIONS, SETTINGS)
    assert result.identical == len(QUESTIONS) - 1
    assert result.replayed is not None and result.replayed.rounds < result.ours.rounds


def test_failing_engine_gives_its_own_error(
    stub: Path, opened: Exported, tiny_target: TargetModel
) -> None:
    (stub / "mode").write_text("fail")
    with pytest.raises(UserError, match="ValueError: weights were not initialized") as caught:
        check(opened, tiny_target, QUESTIONS, SETTINGS)
    log = Path(str(caught.value).rpartition("its log is ")[2])
    assert "starting" in log.read_text()
    log.unlink()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_hanging_engine_is_ended_with_its_children(
    stub: Path, opened: Exported, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stub / "mode").write_text("hang")
    monkeypatch.setattr(engines, "GRACE_S", 2)
    with pytest.raises(UserError, match="did not finish within 1 s"):
        check(opened, tiny_target, QUESTIONS, replace(SETTINGS, timeout_s=1))
    child, end = int((stub / "child").read_text()), time.monotonic() + 10
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(child)


def test_engine_runs_without_our_paths_and_with_intels_openmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    plain = engine_environment(tmp_path / "bin" / "python")
    assert not {"PYTHONPATH", "RANK", "LD_PRELOAD"} & plain.keys()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    if sys.platform == "linux":
        preloaded = engine_environment(tmp_path / "bin" / "python")["LD_PRELOAD"]
        assert preloaded == str(tmp_path / "lib" / "libiomp5.so")


def test_runner_imports_nothing_but_the_standard_library_and_vllm() -> None:
    tree = ast.parse(engines.RUNNER.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found - sys.stdlib_module_names == {"vllm"}


# A running server, with a stub in its place


class Server:
    """Answers as vLLM does; `metrics` renders its counters."""

    def __init__(self, run: EngineRun, prompts: list[list[int]]) -> None:
        self.run, self.prompts = run, prompts
        self.counters = {"drafts": 7, "draft_tokens": 14, "accepted_tokens": 3}
        self.per_position, self.tokens = [2, 1], 11
        self.speculates, self.foreign_tokens, self.status = True, 0, 200
        self.asked: list[dict[str, Any]] = []

    def models(self) -> str:
        return json.dumps({"data": [{"id": "served", "max_model_len": 512}]})

    def metrics(self) -> str:
        lines = ["# TYPE vllm:generation_tokens_total counter"]
        lines += [f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}.0']
        if self.speculates:
            for name, value in self.counters.items():
                lines.append(f"# TYPE vllm:spec_decode_num_{name}_total counter")
                lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0')
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f"# TYPE {name} counter")
            for position, value in enumerate(self.per_position):
                lines.append(f'{name}{{engine="0",position="{position}"}} {value}.0')
        return "\n".join(lines) + "\n"

    def complete(self, body: dict[str, Any]) -> str:
        self.asked.append(body)
        output = self.run.outputs[self.prompts.index(body["prompt"])]
        self.tokens += len(output) + self.foreign_tokens
        if len(self.asked) == len(self.prompts):
            added = (self.run.rounds, self.run.drafted, self.run.accepted)
            for name, value in zip(self.counters, added, strict=True):
                self.counters[name] += value
            pairs = zip(self.per_position, self.run.accepted_per_position, strict=True)
            self.per_position = [a + b for a, b in pairs]
        return json.dumps({"choices": [{"token_ids": output}]})


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            pages = {"/v1/models": server.models, "/metrics": server.metrics}
            self.answer(pages[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(lambda: server.complete(body))

        def answer(self, page: Callable[[], str]) -> None:
            with lock:
                text = page().encode()
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


@pytest.fixture
def served(truth: EngineRun) -> Iterator[tuple[Server, str]]:
    server = Server(truth, [list(q.token_ids) for q in QUESTIONS])
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield server, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_running_server_is_measured_by_its_metrics(
    served: tuple[Server, str], opened: Exported, tiny_target: TargetModel
) -> None:
    server, url = served
    settings = replace(SETTINGS, num_speculative_tokens=None)
    result = check(opened, tiny_target, QUESTIONS, settings, endpoint=f"{url}/v1/")
    assert result.passed and result.difference == 0 and result.identical == len(QUESTIONS)
    assert result.settings["num_speculative_tokens"] == 2
    assert {body["model"] for body in server.asked} == {"served"}
    assert {body["temperature"] for body in server.asked} == {0}
    assert len({body["cache_salt"] for body in server.asked}) == len(QUESTIONS)


def test_server_with_another_k_is_refused(
    served: tuple[Server, str], opened: Exported, tiny_target: TargetModel
) -> None:
    settings = replace(SETTINGS, num_speculative_tokens=3)
    with pytest.raises(UserError, match="started with num_speculative_tokens 2"):
        check(opened, tiny_target, QUESTIONS, settings, endpoint=served[1])


def test_server_without_speculation_is_refused(served: tuple[Server, str]) -> None:
    served[0].speculates = False
    with pytest.raises(UserError, match="started without a speculative config"):
        VllmServer(served[1])


def test_server_with_other_traffic_is_refused(
    served: tuple[Server, str],
    opened: Exported,
    tiny_target: TargetModel,
) -> None:
    served[0].foreign_tokens = 5
    with pytest.raises(UserError, match="other requests run there"):
        check(opened, tiny_target, QUESTIONS, SETTINGS, endpoint=served[1])


def test_server_that_fails_or_cannot_be_reached_is_one_message(
    served: tuple[Server, str],
) -> None:
    served[0].status = 500
    with pytest.raises(UserError, match="/v1/models answered 500"):
        VllmServer(served[1])
    with pytest.raises(UserError, match="cannot be reached"):
        VllmServer("http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be reached"):
        VllmServer("no address")


def test_missing_package_names_the_extra(
    served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"pip install 'outrider\[serving\]'"):
        VllmServer(served[1])
