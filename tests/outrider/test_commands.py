"""The command line: what is wrong gets one message and exit status 2, and nothing is written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from heads.base import Checkpoint, Contract, drafter_class, drafter_kinds, save_drafter
from infer.target import TargetModel
from outrider.main import main


@pytest.fixture(scope="session")
def drafter_folder(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of three heads for the tiny target, with accuracies to grow trees from."""
    target = TargetModel.load(str(tiny_target_folder), dtype="float32")
    cls = drafter_class("medusa")
    drafter = cls.create(cls.Config(kind="medusa"), target.identity, target.shared)
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.1)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    rates = [[0.4, 0.2, 0.1], [0.3, 0.1, 0.05], [0.2, 0.1, 0.05]]
    folder = tmp_path_factory.mktemp("drafters") / "three"
    save_drafter(Checkpoint(drafter, contract, {"accuracies_HK": rates}), folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("What is the rain?\nWrite a story about a horse.\n")
    return path


@pytest.fixture(autouse=True)
def _without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is not there is looked for on the hub, which retries for long."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


class Command:
    """Runs `outrider ...` in this process; keeps its exit status and what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        printed = self.capsys.readouterr()
        return status, printed.out, printed.err


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_bench_writes_its_record(
    outrider: Command, drafter_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    options = ["--prompts", prompts, "--tree", 8, "--max-new-tokens", 16, "--dtype", "float32"]
    status, printed, _ = outrider("bench", drafter_folder, *options, "--json", out)
    assert status == 0 and "three" in printed
    record = json.loads(out.read_text())
    assert record["settings"]["tree_nodes"] == 8
    assert record["lossless"]["identical"] == 2


def test_bench_drafts_a_dynamic_tree(
    outrider: Command, tiny_target_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    target = TargetModel.load(str(tiny_target_folder), dtype="float32")
    cls = next(cls for cls in map(drafter_class, drafter_kinds()) if cls.can_grow)
    drafter = cls.create(cls.Config(kind=cls.kind), target.identity, target.shared)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    save_drafter(Checkpoint(drafter, contract), tmp_path / "d")
    options = ["--prompts", prompts, "--max-new-tokens", 12, "--dtype", "float32"]
    out = tmp_path / "bench.json"
    status, printed, error = outrider(
        "bench", tmp_path / "d", *options, "--tree", "dynamic:8:3:4", "--json", out
    )
    assert status == 0, error
    assert "dynamic tree of 8" in printed
    record = json.loads(out.read_text())
    assert record["settings"]["dynamic"] == {"num_drafts": 8, "depth": 3, "top_k": 4}
    assert record["lossless"]["identical"] == 2


def test_compare_adds_what_needs_no_training_and_writes_a_page(
    outrider: Command, drafter_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--prompts", prompts, "--max-new-tokens", 8, "--dtype", "float32"]
    status, _, _ = outrider("compare", drafter_folder, *options, "--out", tmp_path / "r")
    assert status == 0
    record = json.loads((tmp_path / "r" / "report.json").read_text())
    assert set(record["drafters"]) == {"three", "ngram", "suffix"}
    assert (tmp_path / "r" / "report.html").is_file()


def test_bench_joins_a_lookup_and_a_drafter(
    outrider: Command, drafter_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--prompts", prompts, "--max-new-tokens", 16, "--dtype", "float32"]
    for shape in (["--tree", 8], ["--chain", 10], []):
        out = tmp_path / "bench.json"
        joined = f"suffix+{drafter_folder}"
        status, printed, error = outrider("bench", joined, *options, *shape, "--json", out)
        assert status == 0, error
        assert "suffix+three" in printed
        record = json.loads(out.read_text())
        assert record["settings"]["kind"] == "suffix+medusa"
        assert record["lossless"]["identical"] == 2


def test_generate_streams_the_answer_and_its_worth(outrider: Command, drafter_folder: Path) -> None:
    options = ["--max-new-tokens", 8, "--dtype", "float32"]
    status, printed, _ = outrider("generate", drafter_folder, "What is the rain?", *options)
    assert status == 0 and "acceptance length" in printed


def test_the_lossy_rule_says_so(outrider: Command, drafter_folder: Path) -> None:
    options = ["--max-new-tokens", 8, "--temperature", 0.8, "--rule", "typical"]
    status, printed, _ = outrider("generate", drafter_folder, "What is the rain?", *options)
    assert status == 0 and "LOSSY" in printed


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *((rule, "--tree") for rule in ("recursive_with", "recursive_without", "traversal")),
        *((rule, "--chain") for rule in ("token", "block")),
    ],
)
def test_a_rule_over_drawn_drafts_generates(
    rule: str, shape: str, outrider: Command, drafter_folder: Path
) -> None:
    options = ["--max-new-tokens", 8, "--temperature", 0.8, "--rule", rule, shape, 3]
    status, printed, _ = outrider("generate", drafter_folder, "What is the rain?", *options)
    assert status == 0 and "acceptance length" in printed and "LOSSY" not in printed


WRONG = {
    "no such drafter": (["bench", "nowhere"], "no such drafter"),
    "no drafter": (["bench"], "give one drafter"),
    "chain too long": (["bench", "{drafter}", "--chain", "4"], "at most 3"),
    "both shapes": (["bench", "{drafter}", "--chain", "2", "--tree", "4"], "give one of them"),
    "tree of its own": (["bench", "{drafter}", "--tree", "dynamic:60"], "does not shape trees"),
    "dynamic without a size": (["bench", "{drafter}", "--tree", "dynamic"], "expected dynamic:N"),
    "dynamic in words": (["bench", "{drafter}", "--tree", "dynamic:6:x"], "in whole numbers"),
    "dynamic of none": (["bench", "{drafter}", "--tree", "dynamic:0"], "at least 1 each"),
    "dynamic too big": (
        ["bench", "{drafter}", "--tree", "dynamic:9:2:2"],
        "depth 2 and top-k 2 give 6 candidates",
    ),
    "unknown rule": (["bench", "{drafter}", "--rule", "gredy"], "did you mean 'greedy'"),
    "rule that does not fit": (
        ["bench", "{drafter}", "--rule", "greedy", "--temperature", "1"],
        "greedy",
    ),
    "unknown rule for trees": (["bench", "{drafter}", "--rule", "traversl"], "'traversal'"),
    "rule for chains": (
        ["bench", "{drafter}", "--rule", "block", "--temperature", "1", "--tree", "4"],
        "verifies chains only, given a tree of 5 nodes; use one of: recursive_with, ",
    ),
    "temperature below 0": (["bench", "{drafter}", "--temperature", "-1"], "temperature"),
    "top-p of 0": (["bench", "{drafter}", "--temperature", "1", "--top-p", "0"], "top-p"),
    "unknown dtype": (["bench", "{drafter}", "--dtype", "bf16"], "unknown dtype"),
    "no prompt file": (["bench", "{drafter}", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "no target": (["bench", "ngram"], "--target"),
    "target not found": (["bench", "ngram", "--target", "no/where"], "could not be loaded"),
    "batch": (["bench", "{drafter}", "--batch", "2"], "one request at a time"),
    "unknown engine": (
        ["export", "{drafter}", "--to", "vlm", "--out", "{tmp}/x"],
        "did you mean 'vllm'",
    ),
    "output exists": (["export", "{drafter}", "--to", "vllm", "--out", "{tmp}"], "exists"),
    "nothing to export": (["export", "ngram", "--to", "vllm", "--out", "{tmp}/x"], "nothing"),
    "union to export": (
        ["export", "suffix+{drafter}", "--to", "vllm", "--out", "{tmp}/x"],
        "no engine runs as one; export {drafter}",
    ),
    "no drafter beside a lookup": (["bench", "suffix+nowhere"], "no such drafter: nowhere"),
    "no lookup of that name": (["bench", "sufix+{drafter}"], "or KIND+DRAFTER"),
    "union draws no trees": (
        ["bench", "suffix+{drafter}", "--tree", "4", "--temperature", "1", "--rule", "token"],
        "verifies chains only",
    ),
    "not exported": (["check", "{tmp}"], "config.json"),
    "unknown kind": (["train", "medua"], "did you mean 'medusa'"),
    "kind without training": (["train", "ngram"], "medusa"),
    "unknown recipe key": (["train", "medusa", "optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
    "malformed override": (["train", "medusa", "lr"], "key.sub=value"),
    "unknown key in a section": (
        ["respond", "self_prompt.cuont=3"],
        "did you mean 'self_prompt.count'",
    ),
    "list for a section": (["respond", "self_prompt=[1]"], "not a valid recipe"),
    "infinite rate": (["train", "medusa", "optimizer.lr=.inf"], "optimizer.lr"),
    "betas": (["train", "medusa", "optimizer.betas=[2.0,0.9]"], "optimizer.betas"),
    "endless chain": (["bench", "{drafter}", "--chain", "999999"], "at most 3"),
    "tree of nothing": (["bench", "{drafter}", "--tree", "0"], "at least 1"),
    "record in a folder's place": (["bench", "{drafter}", "--json", "{tmp}"], "it is a folder"),
    "report below a file": (
        ["compare", "{drafter}", "--out", "{drafter}/config.json"],
        "could not write",
    ),
    "unknown device": (["bench", "{drafter}", "--device", "foo"], "'foo' cannot be used"),
    "no data set": (["bench", "{drafter}", "--prompts", "datasets:"], "names no data set"),
    "unknown respond key": (["respond", "temprature=1"], "did you mean 'temperature'"),
    "no recipe": (["respond", "--config", "nowhere.yaml"], "nowhere.yaml"),
    "not a data set": (["audit", "{tmp}"], "{tmp}"),
    "empty prompt": (["generate", "{drafter}", "  "], "empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_gets_one_message_and_status_two(
    name: str, outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    arguments, message = WRONG[name]
    places = {"drafter": str(drafter_folder), "tmp": str(tmp_path)}
    status, _, error = outrider(*(argument.format(**places) for argument in arguments))
    assert status == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert message.format(**places) in error
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_drafter_of_another_target_is_refused(
    outrider: Command, drafter_folder: Path, tmp_path: Path, make_model, make_tokenizer
) -> None:
    make_model(seed=5).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    status, _, error = outrider("bench", drafter_folder, "--target", tmp_path / "other")
    assert status == 2 and "other target weights" in error


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "empty"), ("{", "not JSON"), ('{"messages": []}', "line 1")],
    ids=["empty", "not json", "no content"],
)
def test_a_prompt_file_that_is_wrong_is_refused(
    line: str, message: str, outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    status, _, error = outrider("bench", drafter_folder, "--prompts", path)
    assert status == 2 and str(path) in error
    assert error.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_refused(
    outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("word " * 700)
    status, _, error = outrider("bench", drafter_folder, "--prompts", path)
    assert status == 2 and "512" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": None}, "not a drafter's config"),
        ({"drafter": None}, "not a drafter's config"),
        ({"calibration": "x"}, "not a drafter's config"),
        ({"format": 99}, "format 99"),
    ],
    ids=["contract", "drafter", "calibration", "format"],
)
def test_an_edited_checkpoint_is_refused(
    change: dict[str, object],
    message: str,
    outrider: Command,
    drafter_folder: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(drafter_folder, tmp_path / "d")
    record = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps(record | change))
    status, _, error = outrider("bench", tmp_path / "d")
    assert status == 2 and message in error


def test_a_contract_that_the_drafter_does_not_keep_is_refused(
    outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(drafter_folder, tmp_path / "d")
    record = json.loads((tmp_path / "d" / "config.json").read_text())
    record["contract"]["captured_layers"] = [99]
    (tmp_path / "d" / "config.json").write_text(json.dumps(record))
    status, _, error = outrider("bench", tmp_path / "d")
    assert status == 2 and "captured_layers" in error


def test_a_target_with_missing_layers_is_refused(
    outrider: Command, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """transformers would fill them at random without a word."""
    shutil.copytree(tiny_target_folder, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "config.json").read_text())
    for layers, word in ((5, "missing"), (2, "unexpected")):
        (tmp_path / "t" / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": layers})
        )
        status, _, error = outrider("bench", "ngram", "--target", tmp_path / "t")
        assert status == 2 and "do not fit its config" in error and word in error


def test_tree_ranks_beyond_the_vocabulary_are_refused(
    outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"parents": [-1, 0], "ranks": [0, 20000]}))
    status, _, error = outrider("bench", drafter_folder, "--tree", tmp_path / "t.json")
    assert status == 2 and "ranks are too large" in error


def test_brackets_in_a_category_are_only_text(
    outrider: Command, drafter_folder: Path, tmp_path: Path
) -> None:
    message = {"role": "user", "content": "What is the rain?"}
    row = {"id": "1", "category": "[/bold]", "messages": [message]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    options = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 6]
    status, printed, _ = outrider("bench", drafter_folder, *options)
    assert status == 0 and "[/bold]" in printed
