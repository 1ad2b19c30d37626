"""What a run learns from: several stores as one, and the draft vocabulary counted from them."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from distill.store import read_manifest, write_manifest
from heads.base import load_drafter
from heads.errors import UserError
from heads.vocab import label
from infer.target import TargetModel
from tests.train.runs import Recipes, make_rows, refused, train_here, write_store
from train.corpus import joined_rows, load_corpus, needs_responses
from train.recipe import differences, load_training_recipe


@pytest.fixture
def target(tiny_target_folder: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target_folder), dtype="float32", device="cpu")


@pytest.fixture
def second(target: TargetModel, tmp_path: Path) -> Path:
    """Another store whose ids are those of the first one's beginning."""
    return write_store(tmp_path / "second", target, rows=make_rows(10, 160, seed=9))


# Several stores.


def test_rows_of_several_stores_are_joined_in_order_under_ids_of_their_own(
    store: Path, second: Path, target: TargetModel
) -> None:
    rows, notes = joined_rows([store, second], target)
    assert [row.id for row in rows[:40]] == [f"c{i}" for i in range(40)]
    assert [row.id for row in rows[40:]] == [f"c{i} of {second}" for i in range(10)]
    assert [row.tokens for row in rows[40:]] == [row.tokens for row in make_rows(10, 160, seed=9)]
    assert any("50 conversations" in note and str(second) in note for note in notes)
    alone, _ = joined_rows([second], target)
    assert [row.id for row in alone] == [f"c{i}" for i in range(10)]


def test_run_learns_from_every_store(
    recipes: Recipes, store: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipes(stop={"max_steps": 1})
    output = train_here(path, f"data.path=[{store},{second}]")
    assert f"data: 50 conversations of {store}, {second}" in capsys.readouterr().out
    written = yaml.safe_load((output / "recipe.yaml").read_text())
    assert written["data"]["path"] == [str(store), str(second)]


def test_every_stores_identity_is_checked(store: Path, second: Path, target: TargetModel) -> None:
    manifest = read_manifest(second)
    assert manifest is not None
    other = manifest.target.model_copy(update={"tokenizer_hash": "other"})
    write_manifest(second, manifest.model_copy(update={"target": other}))
    with pytest.raises(UserError, match=f"{second} was written by .* another tokenizer"):
        joined_rows([store, second], target)


@pytest.mark.parametrize(
    ("paths", "message"),
    [("[{a},{a}]", "named twice"), ("[]", "at least 1 item"), ("[{a},/nowhere]", "not a data set")],
)
def test_stores_that_are_none_are_refused(
    paths: str, message: str, recipes: Recipes, store: Path, target: TargetModel
) -> None:
    with pytest.raises(UserError, match=message):
        given = [f"data.path={paths.format(a=store)}"]
        load_corpus(load_training_recipe("medusa", recipes(), given), target, None)


def test_one_path_is_a_list_of_one(recipes: Recipes, store: Path) -> None:
    path = recipes()
    single, listed = (
        load_training_recipe("medusa", path, [o]) for o in ("seed=0", f"data.path=[{store}]")
    )
    assert single.data.path == (store,) and differences(single, listed) == []
    listing = recipes("listing", data__path=[str(store), "/nowhere"])
    assert load_training_recipe("medusa", listing, [f"data.path={store}"]).data.path == (store,)


def test_responses_are_written_for_the_first_store_only(recipes: Recipes, store: Path) -> None:
    for paths, expected in ((["/nowhere", str(store)], True), ([str(store), "/nowhere"], False)):
        path = recipes(data__path=paths, data__respond="respond.yaml")
        assert needs_responses(load_training_recipe("medusa", path, [])) == expected


# The draft vocabulary.


def test_coverage_is_told_by_category_of_held_out_and_of_measured_prompts(
    recipes: Recipes, target: TargetModel, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = [("weather", "What is the rain?"), ("weather", "the plain"), ("horses", "a horse")]
    prompts.write_text(
        "".join(
            json.dumps(
                {"id": str(i), "category": c, "messages": [{"role": "user", "content": text}]}
            )
            + "\n"
            for i, (c, text) in enumerate(texts)
        )
    )
    path = recipes(eval__prompts=str(prompts))
    corpus = load_corpus(load_training_recipe("medusa", path, []), target, 60)
    assert corpus.vocab is not None
    held_out, measured = (note for note in corpus.notes if "covers" in note)
    assert "of the training tokens" in held_out and "(count " in held_out
    kept = set(corpus.vocab.target_ids_Vd.tolist())
    for category in ("weather", "horses"):
        tokens = [t for q in corpus.questions if q.category == category for t in q.token_ids]
        share = 100 * sum(token in kept for token in tokens) / len(tokens)
        assert f"{category} {share:.1f} %" in measured
    assert "of the tokens of 3 prompts to measure" in measured
    of_held_out = load_corpus(load_training_recipe("medusa", recipes("other"), []), target, 60)
    assert sum("covers" in note for note in of_held_out.notes) == 1


def test_too_few_distinct_tokens_are_filled_up_and_it_is_said(
    recipes: Recipes, target: TargetModel, tmp_path: Path
) -> None:
    data = write_store(tmp_path / "narrow", target, rows=make_rows(40, 20))
    path = recipes(data__path=str(data))
    corpus = load_corpus(load_training_recipe("medusa", path, []), target, 50)
    assert corpus.vocab is not None
    assert corpus.vocab.target_ids_Vd.tolist() == list(range(50))
    note = next(note for note in corpus.notes if "filled up" in note)
    assert "only 18 distinct tokens" in note and "most frequent ids of the tokenizer" in note


def test_the_contract_holds_the_digest_of_the_draft_vocabulary(recipes: Recipes) -> None:
    output = train_here(recipes(drafter__draft_vocab_size=60, stop={"max_steps": 1}))
    last = load_drafter(output / "last")
    ids = last.drafter.state_dict()["draft_ids"]
    assert last.contract.draft_vocab == label(ids)
    assert last.contract.draft_vocab.startswith("reduced:60:")


def test_resuming_over_other_data_that_give_another_draft_vocabulary_is_refused(
    recipes: Recipes, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_store(tmp_path / "data", target, rows=make_rows(40, 120))
    path = recipes(drafter__draft_vocab_size=60, data__path=str(data), stop={"max_steps": 2})
    output = train_here(path)
    (output / "summary.json").unlink()
    assert "drafter.draft_vocab_size differ" in refused(capsys, path, "drafter.draft_vocab_size=61")
    shutil.rmtree(data)
    write_store(data, target, rows=make_rows(40, 120, seed=4))
    error = refused(capsys, path)
    assert "has the draft vocabulary reduced:60:" in error and "the data give reduced:60:" in error
    assert "give another output" in error
    shutil.rmtree(data)
    write_store(data, target, rows=make_rows(40, 120))
    train_here(path)
