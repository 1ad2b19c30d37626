"""Drafters against plain decoding and against each other, on the same prompts in the same run."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers

from heads.base import Drafter
from heads.tree import DynamicTree
from infer.acceptance import AcceptanceReport, PromptRecord, Question
from infer.degenerate import is_degenerate, repeated_share
from infer.loop import Generation, GenerationSettings, rule_for, speculative_generate
from infer.target import TargetModel
from infer.verify import rule_by_name


@dataclass(frozen=True)
class Contender:
    """A drafter with the settings that it is measured at."""

    name: str
    drafter: Drafter
    settings: GenerationSettings


def measure(
    target: TargetModel,
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    *,
    baseline: bool = True,
    on_prompt: Callable[[int, int], None] | None = None,
) -> list[AcceptanceReport]:
    """One report a contender. With `baseline`, every prompt is also decoded plainly.

    All run in turn on each prompt, in an order that rotates from prompt to prompt, so that a drift
    of the machine's speed falls on all alike. Each is warmed up once, uncounted.
    """
    for contender in contenders:
        rule_for(contender.settings, contender.drafter)
    runners: list[Contender | None] = [None, *contenders] if baseline else list(contenders)
    for runner in runners if baseline else []:
        _run(target, runner, contenders[0].settings, questions[0], max_new_tokens=8)
    records: dict[str, list[PromptRecord]] = {c.name: [] for c in contenders}
    for index, question in enumerate(questions):
        turn = index % len(runners)
        done = {
            runner.name if runner else None: _run(target, runner, contenders[0].settings, question)
            for runner in runners[turn:] + runners[:turn]
        }
        for contender in contenders:
            record = _record(target, question, done[contender.name], done.get(None), contender)
            records[contender.name].append(record)
        if on_prompt is not None:
            on_prompt(index + 1, len(questions))
    return [
        AcceptanceReport(c.name, describe(target, c, questions), records[c.name])
        for c in contenders
    ]


def measure_acceptance(
    target: TargetModel,
    drafter: Drafter,
    questions: Sequence[Question],
    settings: GenerationSettings,
) -> AcceptanceReport:
    """Acceptance of one drafter, without the plain baseline (no speed-up)."""
    return measure(target, [Contender(drafter.kind, drafter, settings)], questions, baseline=False)[
        0
    ]


def _run(
    target: TargetModel,
    runner: Contender | None,
    plain: GenerationSettings,
    question: Question,
    max_new_tokens: int | None = None,
) -> Generation:
    settings = runner.settings if runner else plain
    if max_new_tokens is not None:
        settings = replace(settings, max_new_tokens=max_new_tokens)
    drafter = runner.drafter if runner else None
    return speculative_generate(target, drafter, list(question.token_ids), settings)


def _record(
    target: TargetModel,
    question: Question,
    ours: Generation,
    plain: Generation | None,
    contender: Contender,
) -> PromptRecord:
    compared = plain is not None and rule_by_name(contender.settings.rule).greedy_only
    diverged = first_difference(ours.tokens, plain.tokens) if plain and compared else None
    margin = None
    if plain is not None and diverged is not None:
        margin = top_margin(target, [*question.token_ids, *plain.tokens[:diverged]])
    # By the plain text where there is one, so that every drafter is judged on the same prompts.
    judged = plain.tokens if plain is not None else ours.tokens
    return PromptRecord.of(
        question,
        ours,
        baseline_tokens=len(plain.tokens) if plain else None,
        baseline_seconds=plain.total_seconds if plain else None,
        compared=compared,
        first_divergence=diverged,
        margin=margin,
        degenerate=is_degenerate(judged),
        repeated_share=repeated_share(list(question.token_ids), judged),
        text=target.tokenizer.decode(ours.tokens),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token; None when both are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def top_margin(target: TargetModel, token_ids: list[int]) -> float:
    """The target's largest less its second largest logit for the token after `token_ids`."""
    states = target.forward(torch.tensor([token_ids], device=target.device))
    first, second = target.logits(states.hidden_BND[0, -1]).float().topk(2).values.tolist()
    return float(first - second)


def describe(
    target: TargetModel, contender: Contender, questions: Sequence[Question]
) -> dict[str, Any]:
    """All that a figure's reader has to know; a dynamic tree has sizes at most and no parents."""
    settings, shape = contender.settings, contender.settings.shape
    rule = rule_by_name(settings.rule)
    dynamic = shape if isinstance(shape, DynamicTree) else None
    return {
        "target": target.name,
        "kind": contender.drafter.kind,
        "rule": rule.name,
        "lossless": rule.lossless,
        "temperature": settings.sampling.temperature,
        "top_k": settings.sampling.top_k,
        "top_p": settings.sampling.top_p,
        "num_speculative_tokens": shape.depth,
        "tree_nodes": len(shape) - 1,
        "is_chain": shape.is_chain,
        "dynamic": asdict(dynamic) if dynamic else None,
        "parents": None if isinstance(shape, DynamicTree) else list(shape.parents),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "batch": 1,
        "bonus_included": True,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(questions),
        "hardware": f"{platform.machine()} {target.device}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
