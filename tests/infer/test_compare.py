"""Reports: what is counted, what is judged, and that greedy output is the target's own."""

import json
import math

import pytest
import torch

from heads.base import Drafter, drafter_class
from heads.tree import DynamicTree, chain
from infer.acceptance import (
    AcceptanceReport,
    PromptRecord,
    Question,
    acceptance_length,
    bootstrap,
    macro_acceptance_length,
    paired_difference,
)
from infer.compare import Contender, describe, first_difference, measure, measure_acceptance
from infer.loop import PARTS, GenerationSettings, speculative_generate
from infer.report import clean, render, to_html, to_json
from infer.target import TargetModel
from infer.trees import grow_static_tree
from tests.infer.test_loop import PROMPT, Growing

ACCURACIES = [[0.4, 0.2, 0.1], [0.3, 0.1, 0.05], [0.2, 0.1, 0.05]]
JSON_NAMES = {
    "acceptance_length",
    "acceptance_length_macro",
    "counts",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "time_share",
    "settings",
    "prompts",
}


def questions(count: int) -> list[Question]:
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(3, 160, (6 + i % 9,), generator=generator).tolist() for i in range(count)
    ]
    return [Question(f"q{i}", f"c{i % 3}", (1, *text)) for i, text in enumerate(texts)]


def trained_drafter(target: TargetModel) -> Drafter:
    cls = drafter_class("medusa")
    drafter = cls.create(cls.Config(kind="medusa"), target.identity, target.shared)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.1)
    return drafter.eval()


def contenders(target: TargetModel, new_tokens: int) -> list[Contender]:
    cls = drafter_class("ngram")
    lookup = cls.create(cls.Config(kind="ngram"), target.identity, target.shared)
    heads = trained_drafter(target)
    shapes = {"chain": chain(3), "tree": grow_static_tree(ACCURACIES, 12)}
    named = [
        Contender(name, heads, GenerationSettings(new_tokens, shape=shape))
        for name, shape in shapes.items()
    ]
    return [*named, Contender("lookup", lookup, GenerationSettings(new_tokens, shape=chain(10)))]


def record(rounds: int, accepted: int, **changes: object) -> PromptRecord:
    fields: dict[str, object] = {
        "id": f"{rounds}-{accepted}",
        "category": "c",
        "prompt_tokens": 5,
        "tokens": rounds + accepted,
        "rounds": rounds,
        "drafted": 3 * rounds,
        "accepted": accepted,
        "proposed_per_position": [rounds] * 3,
        "accepted_per_position": [accepted],
        "seconds": dict.fromkeys(PARTS, 0.1),
    }
    return PromptRecord(**(fields | changes))  # type: ignore[arg-type]


def test_greedy_text_is_the_targets_on_forty_prompts(tiny_target: TargetModel) -> None:
    for report in measure(tiny_target, contenders(tiny_target, 40), questions(40)):
        divergence = report.divergence()
        assert divergence["compared"] == divergence["identical"] == 40, report.name


def test_the_json_has_the_names_that_readers_rely_on(tiny_target: TargetModel) -> None:
    reports = measure(tiny_target, contenders(tiny_target, 12), questions(4))
    written = json.loads(json.dumps(to_json(reports)))
    assert set(written["drafters"]) == {"chain", "tree", "lookup"}
    for report in written["drafters"].values():
        assert report.keys() >= JSON_NAMES
        counts = report["counts"]
        assert counts.keys() >= {"rounds", "drafted", "accepted", "accepted_per_position"}
        assert set(report["time_share"]) == {"target", "draft", "verify", "commit", "other"}
        assert len(report["prompts"]) == 4
        rounds, accepted = counts["rounds"], counts["accepted"]
        assert report["acceptance_length"] == pytest.approx(1 + accepted / rounds)
        assert report["settings"]["bonus_included"] is True
    assert "<table>" in to_html(reports)
    assert render(reports) is not None


def test_a_dynamic_tree_is_described_by_its_sizes(tiny_target: TargetModel) -> None:
    drafter = Growing(speculative_generate(tiny_target, None, PROMPT, GenerationSettings()).tokens)
    settings = GenerationSettings(12, shape=DynamicTree(60))
    asked = [Question("q0", "c", tuple(PROMPT)), Question("q1", "c", tuple(PROMPT))]
    reports = measure(tiny_target, [Contender("own", drafter, settings)], asked)
    said = to_json(reports)["drafters"]["own"]["settings"]
    assert said["dynamic"] == {"num_drafts": 60, "depth": 6, "top_k": 10}
    assert (said["tree_nodes"], said["is_chain"], said["num_speculative_tokens"]) == (60, False, 6)
    assert said["parents"] is None
    assert reports[0].divergence()["identical"] == 2
    assert "dynamic tree of 60 (depth 6, top-k 10)" in to_html(reports)
    static = describe(tiny_target, contenders(tiny_target, 5)[1], asked)
    assert static["dynamic"] is None and len(static["parents"]) == 13


def test_without_a_baseline_there_is_no_speed_up(tiny_target: TargetModel) -> None:
    settings = GenerationSettings(12, shape=chain(2))
    report = measure_acceptance(tiny_target, trained_drafter(tiny_target), questions(2), settings)
    assert math.isnan(report.figures()["speedup"])
    assert clean(report.to_json())["speedup"] is None


def test_micro_pools_rounds_and_macro_averages_prompts() -> None:
    records = [record(10, 10), record(30, 0)]
    assert acceptance_length(records) == 1.25
    assert macro_acceptance_length(records) == 1.5
    assert macro_acceptance_length([*records, record(0, 0)]) == 1.5


def test_the_interval_holds_the_figure_and_narrows_with_more_prompts() -> None:
    few = [record(10, i) for i in range(6)]
    many = few * 12
    low, high = bootstrap(few, acceptance_length) or (0.0, 0.0)
    narrow_low, narrow_high = bootstrap(many, acceptance_length) or (0.0, 0.0)
    assert low <= acceptance_length(few) <= high
    assert high - low > 2 * (narrow_high - narrow_low)
    assert bootstrap(few[:1], acceptance_length) is None


def test_looping_prompts_are_left_out_of_their_own_figures() -> None:
    records = [record(10, 0), record(10, 30, degenerate=True), record(10, 5, repeated_share=0.6)]
    report = AcceptanceReport("d", {"lossless": True}, records)
    written = report.to_json()
    assert written["degenerate_share"] == pytest.approx(1 / 3)
    assert written["without_degenerate"]["acceptance_length"] == 1.25
    assert written["new_text"]["acceptance_length"] == 1.0


def test_paired_difference_is_taken_on_common_prompts() -> None:
    better = AcceptanceReport("a", {}, [record(10, 8, id=str(i)) for i in range(5)])
    worse = AcceptanceReport("b", {}, [record(10, 3, id=str(i)) for i in range(5)])
    pair = paired_difference(better, worse)
    assert pair["difference"] == pytest.approx(0.5)
    assert pair["interval"] == pytest.approx([0.5, 0.5])


def test_the_first_difference_is_found() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
