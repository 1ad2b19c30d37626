import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from distill.audit import CONTEXT, LEARNED, audit, coloured
from distill.chat import mask_from_template
from distill.store import (
    Counts,
    Manifest,
    PromptSource,
    Row,
    shard_path,
    write_manifest,
    write_shard,
)
from heads.errors import UserError
from infer.target import TargetModel

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def row(target: TargetModel, name: str, prompt: str, answer: str, finished: bool = True) -> Row:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    tokens, mask = mask_from_template(target.tokenizer, messages)
    end = len(mask) - mask[::-1].index(True) - (not finished)
    return Row(name, "[b]math", tokens[:end], mask[:end], 1, finished, prompt)


@pytest.fixture
def data(tmp_path: Path, tiny_target: TargetModel) -> Path:
    folder = tmp_path / "data"
    rows = [
        row(tiny_target, "a", LONG.upper(), "Yes."),
        row(tiny_target, "b", "Say it!", "Go" + " the house" * 30, finished=False),
        row(tiny_target, "c", "say  it", f"Well, {LONG}, that is all."),
    ]
    write_shard(shard_path(folder, "00000"), rows)
    source = PromptSource(kind="prompts", name="p", sha256="")
    counts = Counts(rows=3)
    manifest = Manifest(
        target=tiny_target.identity, source=source, settings={}, created="now", counts=counts
    )
    write_manifest(folder, manifest)
    return folder


def evaluation(path: Path, turns: dict[str, list[str]]) -> Path:
    rows = [{"question_id": name, "category": "x", "turns": t} for name, t in turns.items()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_figures_count_the_rows(data: Path, tiny_target: TargetModel) -> None:
    report = audit(data, tokenizer=tiny_target.tokenizer)
    assert report.num_rows == 3
    assert report.distinct_prompts == 2
    assert report.share_finished == pytest.approx(2 / 3)
    assert report.share_loops == pytest.approx(1 / 3)
    assert report.response_lengths[0] < report.response_lengths[50] < report.response_lengths[100]
    assert 0 < report.share_repeated < 1


def test_exactly_the_answer_is_coloured(data: Path, tiny_target: TargetModel) -> None:
    text = coloured(row(tiny_target, "a", "Hi [b]", "Yes."), tiny_target.tokenizer)
    spans = {(text.plain[s.start : s.end], s.style) for s in text.spans}
    assert ("Yes.<|im_end|>", LEARNED) in spans
    context = next(shown for shown, style in spans if style == CONTEXT)
    assert context.endswith("<|im_start|>user\nHi [b]<|im_end|>\n<|im_start|>assistant\n")


def test_overlap_is_found_in_prompts_and_in_answers(
    data: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    words = LONG.split()
    turns = {
        "clean": [" ".join([*words[:6], "other", *words[6:]])],
        "whole": [f"{LONG}?"],
        "half": [" ".join(words[1:]) + " new"],
        "split": ["First.", " ".join(words)],
        "short": ["Say it."],
        "short-new": ["Say what?"],
    }
    file = evaluation(tmp_path / "e.jsonl", turns)
    overlap = audit(data, file, tokenizer=tiny_target.tokenizer).overlap
    assert overlap is not None
    assert (overlap.num_prompts, overlap.num_short) == (6, 2)
    assert overlap.shared == {
        "whole": 1.0,
        "half": 0.5,
        "split": pytest.approx(2 / 3),
        "short": 1.0,
    }
    assert overlap.share == pytest.approx(4 / 6)
    assert [name for name, _, _ in overlap.worst] == ["short", "whole", "split", "half"]
    assert overlap.worst[1][2] == " ".join(words[:13])


def test_a_longer_ngram_finds_less(data: Path, tmp_path: Path, tiny_target: TargetModel) -> None:
    file = evaluation(tmp_path / "e.jsonl", {"a": [f"{LONG} and more"], "b": ["No overlap"]})
    found = [
        len(audit(data, file, tokenizer=tiny_target.tokenizer, n=size).overlap.shared)  # type: ignore[union-attr]
        for size in (5, 14, 15)
    ]
    assert found == [1, 1, 0]


def test_the_report_renders_everything(
    data: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    file = evaluation(tmp_path / "e.jsonl", {"q1": [LONG]})
    report = audit(data, file, limit=2, tokenizer=tiny_target.tokenizer)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.render())
    text = console.export_text()
    assert text.count("<|im_start|>assistant") == 2
    assert "[b]math" in text
    assert "1 of 1 prompts" in text
    assert "(not complete)" in text


def test_the_tokenizer_of_the_target_is_loaded_when_none_is_given(
    data: Path, tiny_target_folder: Path
) -> None:
    rename_target(data, tiny_target_folder)
    assert "<|im_end|>" in audit(data, limit=1).shown[0].plain
    rename_target(data, data / "gone")
    with pytest.raises(UserError, match=r"tokenizer of the target .*gone"):
        audit(data)


def rename_target(data: Path, name: Path) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["target"]["name"] = str(name)
    (data / "manifest.json").write_text(json.dumps(manifest))


def test_bad_input_is_refused(data: Path, tmp_path: Path, tiny_target: TargetModel) -> None:
    with pytest.raises(UserError, match="no such prompt file"):
        audit(data, tmp_path / "none.jsonl", tokenizer=tiny_target.tokenizer)
    with pytest.raises(UserError, match="is not a data set"):
        audit(tmp_path / "none", tokenizer=tiny_target.tokenizer)
    with pytest.raises(UserError, match="n-grams of 0 words"):
        audit(data, tokenizer=tiny_target.tokenizer, n=0)
