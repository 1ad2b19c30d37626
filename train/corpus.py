"""What a run learns from and is held against: packed rows, a draft vocabulary, prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from distill.questions import load_questions
from distill.store import Row, Store, open_store, read_manifest, split
from heads.decoder import rope_note
from heads.errors import UserError
from heads.schema import load_recipe
from heads.vocab import VocabMap
from infer.acceptance import Question
from infer.target import TargetModel
from train.batches import Packing, pack, shuffled
from train.recipe import CONFIGS, EvalSection, Recipe
from train.warm import WarmStart


@dataclass(frozen=True)
class Corpus:
    """Packed training and validation rows, the prompts of the tree loop, notes for people."""

    train: Packing
    validation: Packing
    questions: list[Question]
    vocab: VocabMap | None
    notes: list[str]


def needs_responses(recipe: Recipe) -> bool:
    """Whether the first store is missing or incomplete and the recipe says how to write it.

    What its own max_minutes ended is taken as it is.
    """
    manifest = read_manifest(recipe.data.path[0])
    done = manifest is not None and (manifest.complete or manifest.stopped is not None)
    return recipe.data.respond is not None and not done


def write_responses(recipe: Recipe) -> None:
    """Let this run's own target answer the respond recipe's prompts, in the first store's place."""
    from distill.respond import RespondConfig, respond

    assert recipe.data.respond is not None
    path = recipe.data.respond
    inside = CONFIGS.parent / path
    if not path.exists() and inside.exists():
        path = inside
    same = {"output": recipe.data.path[0]} | {
        ("target" if name == "name" else name): value
        for name, value in recipe.target.model_dump().items()
        if value is not None
    }
    respond(load_recipe(RespondConfig, path, [f"{key}={value}" for key, value in same.items()]))


def load_corpus(
    recipe: Recipe,
    target: TargetModel,
    draft_vocab_size: int | None,
    start: WarmStart | None = None,
) -> Corpus:
    """Everything that does not change from step to step; a warm start brings its vocabulary."""
    rows, notes = joined_rows(recipe.data.path, target)
    train, validation = split(rows, recipe.data.validation_share, recipe.seed)
    if not train or not validation:
        raise UserError(
            f"{_listed(recipe.data.path)} has {len(rows)} rows: {len(train)} to train on and "
            f"{len(validation)} held out at validation_share {recipe.data.validation_share}; "
            "expected some of both. Write more responses"
        )
    length = recipe.data.sequence_length
    packed = pack(train, length, recipe.seed)
    held_out = pack(validation, length, recipe.seed)
    for name, part in (("training", packed), ("validation", held_out)):
        if part.num_supervised == 0:
            raise UserError(
                f"no supervised position is left in the {name} rows of {length} tokens; "
                "raise data.sequence_length or look at the data with outrider audit"
            )
    questions = load_prompts_to_measure(recipe.eval, validation, target, recipe.seed)
    asked = questions if isinstance(recipe.eval.prompts, Path) else []
    vocab = None if start is None else start.vocab
    counts = supervised_counts(train, target.identity.vocab_size)
    if draft_vocab_size is not None:
        vocab, words = draft_vocabulary(counts, target, draft_vocab_size)
        notes += words
    rope = rope_note(recipe.drafter.get("rope"), target.identity)
    notes += [f"drafter.rope: {rope}"] if rope else []
    if start is not None:
        start.refuse_other_vocabulary(vocab)
        notes += start.notes
    if vocab is not None:
        notes += coverage_notes(vocab, counts, validation, asked)
    return Corpus(packed, held_out, questions, vocab, notes)


def joined_rows(paths: Sequence[Path], target: TargetModel) -> tuple[list[Row], list[str]]:
    """The rows of every store, one store after the other, and notes for people.

    An id that an earlier store has too is followed by its own store's path.
    """
    rows: list[Row] = []
    notes: list[str] = []
    taken: set[str] = set()
    for path in paths:
        store = open_store(path)
        notes += check_store(store, target)
        own = [
            replace(row, id=f"{row.id} of {path}") if row.id in taken else row
            for row in store.rows()
        ]
        taken.update(row.id for row in own)
        rows += own
    if len(paths) > 1:
        notes.append(f"data: {len(rows):,} conversations of {_listed(paths)}")
    return rows, notes


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def check_store(store: Store, target: TargetModel) -> list[str]:
    """Refuse data of another tokenizer or template; a note when other weights wrote them."""
    wrote, reads = store.identity, target.identity
    for name, what in (("tokenizer_hash", "tokenizer"), ("template_hash", "chat template")):
        if getattr(wrote, name) != getattr(reads, name):
            raise UserError(
                f"{store.path} was written by {wrote.name} with another {what} than "
                f"{target.name}'s; write the responses again with this target"
            )
    notes = []
    if wrote.weights_hash != reads.weights_hash:
        notes.append(
            f"warning: the responses are {wrote.name}'s, not {target.name}'s own; "
            "a drafter learns best from its own target's responses"
        )
    if not store.complete:
        notes.append(f"warning: {store.path} is incomplete: {len(store)} rows so far are used")
    return notes


def draft_vocabulary(
    counts_V: Tensor, target: TargetModel, size: int
) -> tuple[VocabMap, list[str]]:
    """The tokens that the training rows supervise most (`counts_V`), special tokens among them.

    Where fewer occur than are asked for, the tokenizer's lowest ids fill it up: a BPE numbers its
    tokens in the order of its merges, the most frequent pairs of its own training text first.
    A note says so.
    """
    special = {int(token) for token in target.tokenizer.all_special_ids} | set(target.end_tokens)
    vocab = VocabMap.from_counts(counts_V, size, special)
    notes = []
    occurring = int((counts_V > 0).sum())
    if occurring < size:
        notes.append(
            f"draft vocabulary: only {occurring:,} distinct tokens occur in the training "
            f"responses; filled up to {size:,} with the most frequent ids of the tokenizer (its "
            "lowest: a BPE numbers its tokens in the order of its merges)"
        )
    return vocab, notes


def coverage_notes(
    vocab: VocabMap, counts_V: Tensor, validation: Sequence[Row], asked: Sequence[Question]
) -> list[str]:
    """How much is covered of the training rows, of the held-out ones by category, and of prompts.

    `asked`: the prompts to measure where those are of a file. What is not covered can never be
    drafted: a ceiling on acceptance.
    """
    size = len(vocab)
    inside = torch.zeros(vocab.vocab_size, dtype=torch.bool)
    inside[vocab.target_ids_Vd] = True
    held_out = _by_category([(row.category, supervised(row)) for row in validation], inside)
    trained = _share(int(counts_V[inside].sum()), int(counts_V.sum()))
    notes = [
        f"draft vocabulary of {size:,} covers {trained} of the training tokens, {held_out} of the "
        "held-out ones"
    ]
    if asked:
        prompts = _by_category([(q.category, torch.tensor(q.token_ids)) for q in asked], inside)
        notes.append(
            f"draft vocabulary of {size:,} covers {prompts} of the tokens of {len(asked)} prompts "
            "to measure"
        )
    return notes


def _by_category(texts: Sequence[tuple[str, Tensor]], inside_V: Tensor) -> str:
    """How much of some texts (category, tokens [T]) is covered, in total and by category."""
    covered: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for category, tokens_T in texts:
        covered[category] += int(inside_V[tokens_T].sum())
        total[category] += len(tokens_T)
    names = [name for name, _ in Counter(name for name, _ in texts).most_common(12)]
    parts = [f"{name or 'uncategorised'} {_share(covered[name], total[name])}" for name in names]
    return f"{_share(covered.total(), total.total())} ({', '.join(parts)})"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f} %"


def supervised(row: Row) -> Tensor:
    """The tokens of a conversation that are learned [T]."""
    mask = torch.as_tensor(row.loss_mask, dtype=torch.bool)
    return torch.as_tensor(row.tokens, dtype=torch.long)[mask]


def supervised_counts(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """How often each token is supervised [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(supervised(row), minlength=vocab_size)
    return counts


def load_prompts_to_measure(
    section: EvalSection, validation: Sequence[Row], target: TargetModel, seed: int
) -> list[Question]:
    """Prompts of the tree loop: of held-out conversations, or of a file."""
    if isinstance(section.prompts, Path):
        questions = load_questions(section.prompts, target)
    else:
        order = shuffled(len(validation), seed, 1)
        questions = [opening(validation[number]) for number in order]
    room = target.max_positions - section.max_new_tokens
    fitting = [q for q in questions if 0 < len(q.token_ids) <= room]
    if not fitting:
        raise UserError(
            f"none of {len(questions)} evaluation prompts leaves room for eval.max_new_tokens "
            f"{section.max_new_tokens} in a context of {target.max_positions}; "
            "lower it or give other prompts (eval.prompts)"
        )
    return fitting if isinstance(section.prompts, Path) else fitting[: section.prompts]


def opening(row: Row) -> Question:
    """The prompt of a conversation: everything before its first supervised token."""
    return Question(row.id, row.category, tuple(row.tokens[: row.loss_mask.index(True)]))
