"""Acceptance in a real engine beside ours: the same folder, prompts and K, at temperature 0.

Our side drafts with what lies in the exported folder, read back, not with the checkpoint that it
was made from: a difference is then the export's, the engine's or our loop's, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heads.base import Drafter, check_contract
from heads.errors import UserError
from heads.tree import chain
from infer.acceptance import Counts, PromptRecord, Question
from infer.endpoint import VllmServer
from infer.engines import (
    EngineJob,
    EngineRun,
    ServingEngine,
    VllmProcess,
    find_vllm_python,
)
from infer.export import ENGINES, Exported, read_back
from infer.loop import Generation, GenerationSettings, speculative_generate
from infer.parity import TOLERANCE, CheckResult
from infer.replay import replay
from infer.target import TargetModel, resolve

__all__ = ["CheckResult", "CheckSettings", "check", "open_exported"]

DEFAULT_DEPTH = 3
"""The K of a drafter that has no depth of its own, where none is asked for."""


@dataclass(frozen=True)
class CheckSettings:
    """How to check. K is `num_speculative_tokens`; None takes the server's or the drafter's depth.

    `max_num_seqs` requests run at a time in the engine (ours runs one); `kv_gib` is the engine's
    room for keys and values on a CPU; the engine is ended after `timeout_s`.
    """

    num_speculative_tokens: int | None = None
    max_new_tokens: int = 64
    max_num_seqs: int = 8
    kv_gib: int = 1
    seed: int = 0
    timeout_s: int = 600


def open_exported(folder: Path, engine: str = "vllm") -> Exported:
    """An exported folder, proven complete and read back."""
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; expected one written by outrider export")
    ENGINES[engine].prove(folder)
    return read_back(folder)


def check(
    exported: Exported,
    target: TargetModel,
    questions: Sequence[Question],
    settings: CheckSettings,
    *,
    endpoint: str | None = None,
) -> CheckResult:
    """Run the questions through our loop and through the engine, and compare.

    The engine is vLLM in a subprocess (its Python: see `infer.engines.find_vllm_python`), or the
    server at `endpoint`. Raises UserError when the folder was made for another target, K exceeds
    the drafter's depth, a prompt does not fit, or the engine cannot do the job.
    """
    check_contract(exported.checkpoint.contract, target.identity, str(exported.folder))
    engine = _engine(exported, target, questions, settings, endpoint)
    deepest = exported.drafter.max_depth
    depth = engine.depth(settings.num_speculative_tokens, deepest or DEFAULT_DEPTH)
    refuse_depth(depth, deepest, exported)
    refuse_prompts(questions, min(target.max_positions, engine.max_model_len), settings, depth)
    drafter = exported.bound(target.dtype, target.device, target.shared)
    outputs, ours = measure_ours(target, drafter, questions, settings, depth)
    run = engine.run(_job(target, questions, settings, depth))
    replayed = None
    if outputs != run.outputs:
        replayed = measure_replay(target, drafter, questions, run.outputs, depth)
    described = _describe(target, questions, settings, depth, endpoint)
    return CheckResult(
        exported=str(exported.folder),
        engine=run.engine,
        settings=described,
        ours=ours,
        engines=engine_counts(run, depth),
        identical=sum(a == b for a, b in zip(outputs, run.outputs, strict=True)),
        tolerance=TOLERANCE[described["dtype"]],
        replayed=replayed,
    )


def measure_ours(
    target: TargetModel,
    drafter: Drafter,
    questions: Sequence[Question],
    settings: CheckSettings,
    depth: int,
) -> tuple[list[list[int]], Counts]:
    """New token ids of every question, and the counts, from our loop."""
    generation = GenerationSettings(
        max_new_tokens=settings.max_new_tokens, shape=chain(depth), seed=settings.seed
    )
    done = [
        speculative_generate(target, drafter, list(question.token_ids), generation)
        for question in questions
    ]
    return [g.tokens for g in done], _counts(questions, done, depth)


def measure_replay(
    target: TargetModel,
    drafter: Drafter,
    questions: Sequence[Question],
    texts: Sequence[list[int]],
    depth: int,
) -> Counts:
    """The counts of our drafter along the texts that the engine wrote."""
    done = [
        replay(target, drafter, list(question.token_ids), text, depth)
        for question, text in zip(questions, texts, strict=True)
    ]
    return _counts(questions, done, depth)


def engine_counts(run: EngineRun, depth: int) -> Counts:
    """The engine's counts in our form; it must have drafted K tokens in every round."""
    if run.rounds == 0 or run.drafted != depth * run.rounds:
        raise UserError(
            f"{run.engine} counted {run.rounds} rounds and {run.drafted} draft tokens; expected "
            f"{depth} a round: give prompts with longer answers, or look for another load on it"
        )
    return Counts(
        rounds=run.rounds,
        drafted=run.drafted,
        accepted=run.accepted,
        proposed_per_position=[run.rounds] * depth,
        accepted_per_position=run.accepted_per_position,
        tokens=sum(map(len, run.outputs)),
        prompts=len(run.outputs),
    )


def refuse_depth(depth: int, deepest: int | None, exported: Exported) -> None:
    """Raise UserError when more draft tokens are asked for than the drafter has heads or steps.

    `deepest` None is a drafter that feeds on itself, as long as it is asked to.
    """
    if deepest is None and depth < 1:
        raise UserError(f"{depth} draft tokens a round were asked for; use a K of at least 1")
    if deepest is not None and not 1 <= depth <= deepest:
        raise UserError(
            f"{depth} draft tokens a round were asked for and {exported.folder} drafts at most "
            f"{deepest}; use a K of 1 to {deepest}"
        )


def refuse_prompts(
    questions: Sequence[Question], max_positions: int, settings: CheckSettings, depth: int
) -> None:
    """Raise UserError for prompts at which the engine would count otherwise than we do.

    Near the end of the context drafts are cut; a prompt of one token is padded with placeholders.
    """
    if not questions:
        raise UserError("no prompts to check with; give at least one")
    for question in questions:
        needed = _needed(question, settings, depth)
        if len(question.token_ids) < 2:
            raise UserError(f"prompt {question.id} has fewer than two tokens; give a longer one")
        if needed > max_positions:
            raise UserError(
                f"prompt {question.id} of {len(question.token_ids)} tokens needs {needed} "
                f"positions, with its answer and drafts, and {max_positions} are there; "
                "take a shorter prompt or fewer new tokens"
            )


def _job(
    target: TargetModel, questions: Sequence[Question], settings: CheckSettings, depth: int
) -> EngineJob:
    return EngineJob(
        prompts=[question.token_ids for question in questions],
        stop_token_ids=sorted(target.end_tokens),
        num_speculative_tokens=depth,
        max_new_tokens=settings.max_new_tokens,
        max_num_seqs=settings.max_num_seqs,
        seed=settings.seed,
        timeout_s=settings.timeout_s,
    )


def _describe(
    target: TargetModel,
    questions: Sequence[Question],
    settings: CheckSettings,
    depth: int,
    endpoint: str | None,
) -> dict[str, Any]:
    """All that a figure's reader has to know."""
    return {
        **asdict(settings),
        "num_speculative_tokens": depth,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": 0.0,
        "prompts": len(questions),
        "endpoint": endpoint,
    }


def _engine(
    exported: Exported,
    target: TargetModel,
    questions: Sequence[Question],
    settings: CheckSettings,
    endpoint: str | None,
) -> ServingEngine:
    if endpoint is not None:
        return VllmServer(endpoint, settings.timeout_s)
    python = find_vllm_python()
    source = str(exported.folder) if exported.whole else resolve(target.name)
    depth = settings.num_speculative_tokens or exported.drafter.max_depth or DEFAULT_DEPTH
    longest = max((_needed(q, settings, depth) for q in questions), default=0)
    return VllmProcess(
        python=python,
        target=str(Path(source).resolve()) if Path(source).is_dir() else source,
        revision=None if exported.whole else target.revision,
        drafter=None if exported.whole else exported.folder,
        method=exported.method,
        dtype=str(target.dtype).removeprefix("torch."),
        max_model_len=min(target.max_positions, max(2048, longest)),
        kv_gib=settings.kv_gib,
    )


def _needed(question: Question, settings: CheckSettings, depth: int) -> int:
    """Positions for prompt, answer, and the drafts behind its last token."""
    return len(question.token_ids) + settings.max_new_tokens + depth + 1


def _counts(questions: Sequence[Question], done: Sequence[Generation], depth: int) -> Counts:
    """The sums, with an entry for every one of the K positions."""
    counts = Counts.of([PromptRecord.of(q, g) for q, g in zip(questions, done, strict=True)])
    if counts.rounds == 0:
        raise UserError("every answer ended with its first token; give prompts with longer answers")
    accepted = counts.accepted_per_position
    padded = accepted + [0] * (depth - len(accepted))
    return Counts(**asdict(counts) | {"accepted_per_position": padded})
