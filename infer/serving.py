"""Acceptance in a real engine beside ours: the same folder, prompts and K, at temperature 0.

Our side drafts with what lies in the exported folder, read back, not with the checkpoint that it
was made from: a difference is then the export's, the engine's or our loop's, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from heads.base import check_contract
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
from infer.loop import GenerationSettings, speculative_generate
from infer.target import TargetModel, resolve

TOLERANCE = {"float32": 0.01, "bfloat16": 0.03}
"""How far acceptance lengths may differ: in bfloat16 texts of different code paths part soon."""


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


@dataclass(frozen=True)
class CheckResult:
    """Both sides' counts, and how many prompts gave the same text on both."""

    exported: str
    engine: str
    settings: dict[str, Any]
    ours: Counts
    engines: Counts
    identical: int
    tolerance: float

    @property
    def difference(self) -> float:
        """The engine's acceptance length over ours, less one."""
        return self.engines.acceptance_length / self.ours.acceptance_length - 1

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.difference) <= self.tolerance

    @property
    def verdict(self) -> str:
        """One line."""
        relation = "within" if self.passed else "OUTSIDE"
        return (
            f"acceptance length differs by {self.difference:+.2%}, {relation} the tolerance of "
            f"{self.tolerance:.0%}; {self.identical} of {self.ours.prompts} texts are identical"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, by the names that reports use."""
        return {
            "exported": self.exported,
            "engine": self.engine,
            "settings": self.settings,
            "ours": _side(self.ours),
            "engine_side": _side(self.engines),
            "difference": self.difference,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "identical": self.identical,
            "identical_share": self.identical / self.ours.prompts,
        }

    def table(self) -> Table:
        """Both sides, row by row."""
        title = f"{self.exported}, K = {self.settings['num_speculative_tokens']}"
        table = Table("", "ours", self.engine, "difference", title=f"{title}: {self.verdict}")
        for name, ours, theirs, form in self._rows():
            table.add_row(
                name, format(ours, form), format(theirs, form), format(theirs - ours, "+" + form)
            )
        return table

    def _rows(self) -> list[tuple[str, float, float, str]]:
        ours, theirs = self.ours, self.engines
        rates = zip(ours.acceptance_rate, theirs.acceptance_rate, strict=True)
        return [
            ("acceptance length", ours.acceptance_length, theirs.acceptance_length, ".4f"),
            *((f"accepted at {k}", a, b, ".4f") for k, (a, b) in enumerate(rates, start=1)),
            ("rounds", ours.rounds, theirs.rounds, ",d"),
            ("draft tokens", ours.drafted, theirs.drafted, ",d"),
            ("accepted", ours.accepted, theirs.accepted, ",d"),
            ("new tokens", ours.tokens, theirs.tokens, ",d"),
        ]


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
    deepest = exported.drafter.max_depth or settings.num_speculative_tokens or 1
    depth = engine.depth(settings.num_speculative_tokens, deepest)
    refuse_depth(depth, deepest, exported)
    refuse_prompts(questions, target, settings, depth)
    outputs, ours = measure_ours(exported, target, questions, settings, depth)
    run = engine.run(
        EngineJob(
            prompts=[question.token_ids for question in questions],
            stop_token_ids=sorted(target.end_tokens),
            num_speculative_tokens=depth,
            max_new_tokens=settings.max_new_tokens,
            max_num_seqs=settings.max_num_seqs,
            seed=settings.seed,
            timeout_s=settings.timeout_s,
        )
    )
    dtype = str(target.dtype).removeprefix("torch.")
    return CheckResult(
        exported=str(exported.folder),
        engine=run.engine,
        settings={
            **asdict(settings),
            "num_speculative_tokens": depth,
            "target": target.name,
            "dtype": dtype,
            "temperature": 0.0,
            "prompts": len(questions),
            "endpoint": endpoint,
        },
        ours=ours,
        engines=engine_counts(run, depth),
        identical=sum(a == b for a, b in zip(outputs, run.outputs, strict=True)),
        tolerance=TOLERANCE[dtype],
    )


def measure_ours(
    exported: Exported,
    target: TargetModel,
    questions: Sequence[Question],
    settings: CheckSettings,
    depth: int,
) -> tuple[list[list[int]], Counts]:
    """New token ids of every question, and the counts, from our loop with the read-back drafter."""
    drafter = exported.bound(target.dtype, target.device, target.shared.embed_VD)
    generation = GenerationSettings(
        max_new_tokens=settings.max_new_tokens, shape=chain(depth), seed=settings.seed
    )
    done = [
        speculative_generate(target, drafter, list(question.token_ids), generation)
        for question in questions
    ]
    records = [PromptRecord.of(q, g) for q, g in zip(questions, done, strict=True)]
    return [g.tokens for g in done], _with_positions(Counts.of(records), depth)


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


def refuse_depth(depth: int, deepest: int, exported: Exported) -> None:
    """Raise UserError when more draft tokens are asked for than the drafter has heads or steps."""
    if not 1 <= depth <= deepest:
        raise UserError(
            f"{depth} draft tokens a round were asked for and {exported.folder} drafts at most "
            f"{deepest}; use a K of 1 to {deepest}"
        )


def refuse_prompts(
    questions: Sequence[Question], target: TargetModel, settings: CheckSettings, depth: int
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
        if needed > target.max_positions:
            raise UserError(
                f"prompt {question.id} of {len(question.token_ids)} tokens needs {needed} "
                f"positions and target {target.name} has {target.max_positions}; take a shorter "
                "prompt or fewer new tokens"
            )


def _engine(
    exported: Exported,
    target: TargetModel,
    questions: Sequence[Question],
    settings: CheckSettings,
    endpoint: str | None,
) -> ServingEngine:
    if endpoint is not None:
        return VllmServer(endpoint, settings.timeout_s)
    python, source = find_vllm_python(), resolve(target.name)
    depth = settings.num_speculative_tokens or exported.drafter.max_depth or 1
    longest = max((_needed(q, settings, depth) for q in questions), default=0)
    return VllmProcess(
        python=python,
        target=str(Path(source).resolve()) if Path(source).is_dir() else source,
        revision=target.revision,
        drafter=exported.folder,
        method=exported.method,
        dtype=str(target.dtype).removeprefix("torch."),
        max_model_len=min(target.max_positions, max(2048, longest)),
        kv_gib=settings.kv_gib,
    )


def _needed(question: Question, settings: CheckSettings, depth: int) -> int:
    """Positions for prompt, answer, and the drafts behind its last token."""
    return len(question.token_ids) + settings.max_new_tokens + depth + 1


def _with_positions(counts: Counts, depth: int) -> Counts:
    """The counts with an entry for every one of the K positions."""
    if counts.rounds == 0:
        raise UserError("every answer ended with its first token; give prompts with longer answers")
    accepted = counts.accepted_per_position
    padded = accepted + [0] * (depth - len(accepted))
    return Counts(**asdict(counts) | {"accepted_per_position": padded})


def _side(counts: Counts) -> dict[str, Any]:
    return {
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.acceptance_rate,
        "counts": asdict(counts),
    }
