"""One trainer for every drafter kind: the loop, from a recipe to `<output>/best`."""

import errno
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState

from distill.features import FeatureSource
from distill.workspace import Workspace
from heads.base import Drafter, Needs, drafter_class, save_drafter
from heads.errors import UserError
from infer.target import TargetModel
from train.batches import RowStream, derive
from train.corpus import Corpus, load_corpus, needs_responses, write_responses
from train.engine import Engine, start_processes
from train.evaluation import Evaluator
from train.forecast import cache_shares, describe_data, describe_memory, peak_memory_gib
from train.ledger import Ledger
from train.logbook import (
    Logbook,
    Meter,
    accuracies,
    check_trackers,
    cut_metrics,
    eval_line,
    objective,
    step_losses,
    train_line,
)
from train.pacing import Pace
from train.recipe import Recipe, read_arguments
from train.rewriting import Rewriter, check_on_policy
from train.snapshots import (
    Snapshots,
    check_output,
    hold_output,
    write_recipe,
    write_summary,
)
from train.stepping import Stepper, StepReport
from train.warm import warm_start

UNWRITABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
}


def main(kind: str, arguments: list[str] | None = None) -> None:
    """Run a training script's command line; exit status 2 for what the user gave wrong."""
    try:
        train(kind, read_arguments(kind, sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last snapshot", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _complain(
            f"could not write the run: {error}; free some space or give another output, "
            "then the same command goes on"
        )


def _complain(message: str) -> None:
    process = os.environ.get("RANK", "0")
    print(message if process == "0" else f"[process {process}] {message}", file=sys.stderr)
    sys.exit(2)


def train(kind: str, recipe: Recipe) -> None:
    """Train a drafter and leave the best by measured acceptance in `<output>/best`."""
    check_trackers(recipe.trackers)
    snapshot = check_output(recipe)
    state = start_processes(recipe.target.device)
    with hold_output(recipe.output) if state.is_main_process else nullcontext():
        _train(kind, recipe, state, snapshot)


def _train(kind: str, recipe: Recipe, state: PartialState, snapshot: Path | None) -> None:
    if needs_responses(recipe):
        if state.is_main_process:
            write_responses(recipe)
        state.wait_for_everyone()
    target = load_target(recipe, str(state.device))
    config, start = recipe.drafter_config(kind), warm_start(recipe, kind, target)
    corpus = load_corpus(recipe, target, config.draft_vocab_size, start)
    torch.manual_seed(derive(recipe.seed))
    drafter = (
        start.drafter
        if start
        else drafter_class(kind).create(config, target.identity, target.shared, corpus.vocab)
    )
    run = Run.prepare(recipe, target, corpus, drafter)
    try:
        run.start(snapshot)
        run.learn()
        run.end()
    finally:
        run.logbook.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_target(recipe: Recipe, device: str) -> TargetModel:
    """The frozen target on this process's device."""
    section = recipe.target
    return TargetModel.load(
        section.name,
        dtype=section.dtype,
        device=device,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )


@dataclass
class Run:
    """The training loop and all that it carries from step to step."""

    recipe: Recipe
    engine: Engine
    target: TargetModel
    corpus: Corpus
    stepper: Stepper
    evaluator: Evaluator
    pace: Pace
    ledger: Ledger
    logbook: Logbook
    snapshots: Snapshots
    step: int = 0
    elapsed_s: float = 0.0
    tau: float | None = None
    best_tau: float | None = None
    best_step: int | None = None
    evaluated_at: int | None = None
    since_log: Meter = field(default_factory=Meter)
    since_eval: Meter = field(default_factory=Meter)
    last: StepReport | None = None
    _began: float = 0.0

    @classmethod
    def prepare(
        cls, recipe: Recipe, target: TargetModel, corpus: Corpus, drafter: Drafter
    ) -> "Run":
        """Put the parts together."""
        engine = Engine(recipe, drafter)
        needs = drafter.needs
        if recipe.loss.settings.reads_target:
            needs = Needs(final_hidden=True, captured_layers=needs.captured_layers)
        budgets = cache_shares(recipe, corpus, engine)
        features = FeatureSource(target, needs, budgets[0])
        held_out = FeatureSource(target, needs, budgets[1])
        workspace, logbook = Workspace(), Logbook(recipe, engine)
        conversations = corpus.train.num_conversations + corpus.validation.num_conversations
        ledger = Ledger(conversations, logbook.say)
        section = recipe.optimizer
        per_step = section.micro_batch * section.accumulation * engine.processes
        num_rows = len(corpus.train.rows)
        stream = RowStream(num_rows, per_step, recipe.seed)
        rewriter, on_policy = None, recipe.data.on_policy
        if on_policy is not None:
            check_on_policy(recipe, drafter)
            rewriter = Rewriter(recipe, on_policy, engine, target, corpus.train, features, stream)
        return cls(
            recipe=recipe,
            engine=engine,
            target=target,
            corpus=corpus,
            stepper=Stepper(
                recipe, engine, target, corpus.train, features, workspace, stream, ledger, rewriter
            ),
            evaluator=Evaluator(recipe, engine, target, corpus, held_out, workspace, ledger),
            pace=Pace(recipe.stop, section, num_rows / per_step),
            ledger=ledger,
            logbook=logbook,
            snapshots=Snapshots(recipe, engine),
        )

    def start(self, snapshot: Path | None) -> None:
        """Write the recipe, or take up an unfinished run; say what is going to happen."""
        if self.engine.is_main:
            write_recipe(self.recipe)
        if snapshot is not None:
            self._resume(self.snapshots.load(snapshot))
        if self.engine.is_main:
            cut_metrics(self.recipe.output, self.step)
        self.engine.wait()
        self.logbook.open()
        for line in (
            *self.corpus.notes,
            *describe_data(self.corpus, self.pace, self.stepper.stream.per_step),
            *describe_memory(
                self.recipe, self.engine, self.target, self.corpus, self.stepper.features
            ),
        ):
            self.logbook.say(line)
        if self.step:
            self.logbook.say(f"resumed after step {self.step} from {snapshot}")
        self._began = perf_counter() - self.elapsed_s

    def learn(self) -> None:
        """Steps until a stop is reached."""
        recipe = self.recipe
        while not self.pace.finished(self.step, self.elapsed_s):
            self.one_step()
            if self.step % recipe.log_every == 0:
                self.log()
            if self.step % recipe.eval.eval_every == 0:
                self.evaluate()
            if self.step % recipe.save.every == 0:
                self.snapshots.save(self.step, self._state())

    def end(self) -> None:
        """Evaluate what was reached, write the summary."""
        if self.evaluated_at != self.step:
            self.evaluate()
        self.logbook.say(
            f"done: {self.step} steps in {self.elapsed_s / 60:.1f} min, best tau "
            f"{self.best_tau:.2f} at step {self.best_step} in {self.recipe.output / 'best'}; "
            f"peak memory {peak_memory_gib():.1f} GiB"
        )
        rewriter = self.stepper.rewriter
        if rewriter is not None:
            self.logbook.say(
                f"on-policy: {rewriter.written:,} responses written by the drafter, "
                f"{100 * rewriter.seconds / self.elapsed_s:.0f} % of the run's time"
            )
        if self.ledger.names:
            self.logbook.say(
                f"dropped: {len(self.ledger.names)} of {self.ledger.num_conversations:,} "
                "conversations, for states that hold NaN or infinity"
            )
        if self.engine.is_main:
            write_summary(
                self.recipe.output,
                {
                    "steps": self.step,
                    "elapsed_s": self.elapsed_s,
                    "tau": self.tau,
                    "best_tau": self.best_tau,
                    "best_step": self.best_step,
                    "peak_memory_gib": peak_memory_gib(),
                    "dropped": sorted(self.ledger.names),
                },
            )
        self.engine.wait()
        self.logbook.finish()

    def one_step(self) -> None:
        """The next step, into the meters."""
        rate = self.pace.learning_rate(self.step, self.elapsed_s)
        progress = self.pace.progress(self.step, self.elapsed_s)
        report = self.stepper.take(self.step, rate, progress, self._clock)
        self.step += 1
        self.elapsed_s, self.last = report.clock_s, report
        for meter in (self.since_log, self.since_eval):
            meter.add(report.sums_SX, report.tokens, report.step_s, report.data_s)

    def _clock(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return perf_counter() - self._began

    def log(self) -> None:
        """A progress line and its record."""
        meter, self.since_log = self.since_log, Meter()
        sums = meter.sums_SX
        assert sums is not None and self.last is not None
        record = {
            "kind": "train",
            "step": self.step,
            "planned_steps": self.pace.planned_steps(self.step, self.elapsed_s),
            "loss": objective(sums, self.recipe.loss),
            "losses": step_losses(sums),
            "acc@1": [row[0] for row in accuracies(sums)],
            "tau": self.tau,
            "lr": self.engine.learning_rate,
            "grad_norm": self.last.gradient_norm,
            "epoch": self.step / self.pace.steps_per_epoch,
            "dropped": len(self.ledger.names),
            "tokens_per_second": meter.tokens / meter.step_s,
            "data_share": meter.data_s / meter.step_s,
            "elapsed_s": self.elapsed_s,
            "eta_s": self.pace.remaining_s(self.step, self.elapsed_s),
        }
        progress = self.pace.progress(self.step, self.elapsed_s)
        self.logbook.write(record, train_line(record), progress)

    def evaluate(self) -> None:
        """Validation loss beside train loss, tau in the real loop; keep the best by it."""
        found = self.evaluator.measure(self.step)
        self.elapsed_s, self.tau = self.engine.tell((self._clock(), found.tau))
        best = self.best_tau is None or self.tau > self.best_tau
        if best:
            self.best_tau, self.best_step = self.tau, self.step
        self.evaluated_at = self.step
        if found.checkpoint is not None:
            save_drafter(found.checkpoint, self.recipe.output / "last")
            if best:
                save_drafter(found.checkpoint, self.recipe.output / "best")
        meter, self.since_eval = self.since_eval, Meter()
        loss, sums = self.recipe.loss, meter.sums_SX
        record = {
            "kind": "eval",
            "step": self.step,
            "train_loss": None if sums is None else objective(sums, loss),
            "val_loss": objective(found.sums_SX[: self.engine.drafter.trained_steps], loss),
            "train_losses": None if sums is None else step_losses(sums),
            "val_losses": step_losses(found.sums_SX),
            "accuracies_HK": accuracies(found.sums_SX),
            "tau": self.tau,
            "best": best,
            "dropped": len(self.ledger.names),
            "eval_s": found.seconds,
            "elapsed_s": self.elapsed_s,
        }
        progress = self.pace.progress(self.step, self.elapsed_s)
        self.logbook.write(record, eval_line(record), progress)

    def _state(self) -> dict[str, Any]:
        rewriter = self.stepper.rewriter
        return {
            "launch": self.snapshots.launch,
            "draft_vocab": self.snapshots.draft_vocab,
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "tau": self.tau,
            "best_tau": self.best_tau,
            "best_step": self.best_step,
            "evaluated_at": self.evaluated_at,
            "dropped": sorted(self.ledger.names),
            "since_log": self.since_log.to_json(),
            "since_eval": self.since_eval.to_json(),
        } | ({"on_policy": rewriter.to_json()} if rewriter is not None else {})

    def _resume(self, state: dict[str, Any]) -> None:
        for name in ("step", "elapsed_s", "tau", "best_tau", "best_step", "evaluated_at"):
            setattr(self, name, state[name])
        self.ledger.names.update(state.get("dropped", []))
        if self.stepper.rewriter is not None:
            self.stepper.rewriter.fill_from(state["on_policy"])
        self.since_log = Meter.from_json(state["since_log"])
        self.since_eval = Meter.from_json(state["since_eval"])
