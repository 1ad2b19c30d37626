"""What a run is going to do and to need, said before it starts."""

import resource
import sys

import torch

from distill.features import FeatureSource, features_gib
from distill.workspace import loss_memory_gib
from infer.target import TargetModel
from train.corpus import Corpus
from train.engine import Engine
from train.pacing import Pace
from train.recipe import Recipe

ADAM_COPIES = 4
"""Parameter, gradient and two moments, each in float32."""


def cache_shares(recipe: Recipe, corpus: Corpus, engine: Engine) -> tuple[float, float]:
    """This process's part of the feature cache, for training and for validation rows (GiB)."""
    mine = recipe.data.feature_cache_gib / engine.local_processes
    train, held_out = corpus.train.num_tokens, corpus.validation.num_tokens
    return mine * train / (train + held_out), mine * held_out / (train + held_out)


def describe_data(corpus: Corpus, pace: Pace, rows_per_step: int) -> list[str]:
    """Tokens, supervised positions, rows, planned steps."""
    lines = []
    for name, part in (("train", corpus.train), ("held out", corpus.validation)):
        length = len(part.rows[0].tokens_T)
        filled = part.num_tokens / (len(part.rows) * length)
        cut = f", {part.num_cut} cut at {length:,} tokens" if part.num_cut else ""
        lines.append(
            f"{name}: {part.num_conversations:,} conversations in {len(part.rows):,} rows of "
            f"{length:,} ({100 * filled:.0f} % full{cut}), {part.num_tokens:,} tokens, "
            f"{part.num_supervised:,} supervised positions"
        )
    minutes = pace.stop.max_minutes
    ends = [f"{pace.max_steps:,} steps"] if pace.max_steps is not None else []
    ends += [f"{minutes:g} minutes"] if minutes is not None else []
    lines.append(
        f"plan: {rows_per_step} rows a step, {pace.steps_per_epoch:.1f} steps an epoch, "
        f"until {' or '.join(ends)}; {len(corpus.questions)} prompts in the loop"
    )
    return lines


def describe_memory(
    recipe: Recipe, engine: Engine, target: TargetModel, corpus: Corpus, features: FeatureSource
) -> list[str]:
    """The estimate for one process, part by part."""
    drafter, biggest = sum(engine.parameter_counts), max(engine.parameter_counts)
    head = target.shared.lm_head_VD
    vocab_size = len(corpus.vocab) if corpus.vocab else len(head)
    section = recipe.optimizer
    loss = loss_memory_gib(
        recipe.loss.settings,
        num_positions=section.micro_batch * recipe.data.sequence_length,
        hidden_size=head.shape[1],
        vocab_size=vocab_size,
        matmul_bytes=4 if recipe.precision == "fp32" else 2,
        trained_weight=biggest >= vocab_size * head.shape[1],
    )
    wanted = features_gib(
        corpus.train.num_tokens + corpus.validation.num_tokens, target, features.needs
    )
    kept = min(wanted, recipe.data.feature_cache_gib / engine.local_processes)
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters()) / 2**30
    rows = section.micro_batch * section.accumulation
    step = features_gib(rows * recipe.data.sequence_length, target, features.needs)
    learned = ADAM_COPIES * 4 * drafter / 2**30
    enough = "all kept" if kept == wanted else f"of {wanted:.2f}, the rest anew each epoch"
    return [
        f"memory a process: target {weights:.2f} GiB, drafter of {drafter:,} parameters with "
        f"optimizer {learned:.2f}, loss {loss:.2f}, features {kept:.2f} ({enough}) and "
        f"{step:.2f} for a step's rows: about "
        f"{weights + learned + loss + kept + step + base_gib():.1f} GiB in all"
    ]


def base_gib() -> float:
    """What the libraries themselves hold, roughly."""
    return 0.5 if not torch.cuda.is_available() else 1.5


def peak_memory_gib() -> float:
    """The most this process has held so far: of the accelerator where it computes there."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
