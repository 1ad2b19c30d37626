"""`outrider demo`: the whole flow on the embedded target, every step resumable.

Leaves under the output folder: `data/`, one folder a kind (`<kind>/best` is a drafter),
`report.json` and `report.html`, `export/<engine>/<kind>`.
"""

from pathlib import Path
from time import perf_counter

from rich.console import Console

from heads.errors import UserError
from outrider.measuring import CONFIGS, MeasureOptions, measure_drafters

KINDS = ("medusa",)
ENGINE = "vllm"
RESPOND_MINUTES = 5
"""On a slow machine the answers that are there by then have to do."""

MEASURE = MeasureOptions(per_category=3, max_new_tokens=96)


def run_demo(output: Path, console: Console) -> None:
    """Respond, train every kind, compare beside prompt lookup, export; says what each step took."""
    start = perf_counter()

    def step(number: int, what: str) -> None:
        minutes = (perf_counter() - start) / 60
        console.rule(f"{number}/4 {what} (minute {minutes:.1f})", align="left")

    missing = [kind for kind in KINDS if not _finished(kind, output)]
    for kind in sorted(set(KINDS) - set(missing)):
        console.print(f"{output / kind} holds a finished run; remove it to train again")
    if missing:
        step(1, "the target answers questions that it wrote itself")
        _respond(output)
        step(2, "a drafter learns from the answers")
        for kind in missing:
            _train(kind, output)
    step(3, "acceptance and speed against plain decoding and prompt lookup")
    drafters = [str(output / kind / "best") for kind in KINDS]
    reports = measure_drafters([*drafters, "ngram"], MEASURE, console)
    from infer.report import write_report

    write_report(reports, output)
    step(4, f"export to {ENGINE}")
    for kind in KINDS:
        _export(output / kind / "best", output / "export" / ENGINE / kind, console)
    console.rule(f"done in {(perf_counter() - start) / 60:.1f} minutes", align="left")
    console.print(f"everything is under {output}; report.html is the comparison as a page")


def _respond(output: Path) -> None:
    from distill.respond import RespondConfig, respond
    from heads.schema import load_recipe

    overrides = [f"output={output / 'data'}", f"max_minutes={RESPOND_MINUTES}"]
    respond(load_recipe(RespondConfig, CONFIGS / "respond.yaml", overrides))


def _finished(kind: str, output: Path) -> bool:
    from train.snapshots import SUMMARY

    return (output / kind / SUMMARY).exists()


def _train(kind: str, output: Path) -> None:
    from train.launch import launch

    overrides = [f"data.path={output / 'data'}", f"output={output / kind}"]
    status = launch(kind, None, overrides)
    if status == 2:
        raise UserError(f"training {kind} was refused: see above")
    if status:
        raise RuntimeError(f"training {kind} ended with exit status {status}")


def _export(drafter: Path, out: Path, console: Console) -> None:
    from infer.opening import export_from

    if out.exists():
        console.print(f"{out} is there already and stays as it is; remove it to export again")
        return
    console.print(f"exported to {export_from(str(drafter), ENGINE, out)}")
