"""The `outrider` command: options in, one call, a table out. No logic of its own."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from heads.errors import UserError
from heads.files import refuse_unwritable, write_text
from outrider.measuring import (
    CONFIGS,
    MeasureOptions,
    RunOptions,
    checked_dtype,
    measure_drafters,
    with_options,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train drafters for speculative decoding, measure them, ship the best one.",
)
# Where there is no terminal whose width counts, the tables get the room they need.
console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 110)

DRAFTER = (
    "A drafter's folder or hub id, a kind without training (ngram, suffix), or both as one: "
    "suffix+FOLDER."
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, such as optimizer.lr=1e-3.")
]


def main() -> None:
    """Entry point: 0 on success, 2 for what the user gave wrong, 1 for our own failure."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record and say where it is."""
    from infer.report import clean

    write_text(path, json.dumps(clean(record), indent=2) + "\n")
    console.print(f"record in {path}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("runs/demo"),
) -> None:
    """The whole flow on the embedded target: respond, train, compare, export."""
    from outrider.demo import run_demo

    run_demo(output, console)


@app.command()
def respond(
    overrides: Overrides = None,
    config: Annotated[Path, typer.Option(help="A respond config.")] = CONFIGS / "respond.yaml",
) -> None:
    """Prompts to the target's own responses; stopped at any moment, a second call goes on."""
    from distill.respond import RespondConfig
    from distill.respond import respond as run
    from heads.schema import load_recipe

    folder = run(load_recipe(RespondConfig, config, overrides))
    console.print(f"responses in {folder}")


@app.command()
def audit(
    dataset: Annotated[Path, typer.Argument(help="A folder written by outrider respond.")],
    evaluation: Annotated[
        Path | None, typer.Option(help="Prompt file that training must not share n-grams with.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows to show.", min=0)] = 3,
) -> None:
    """Decoded rows with the loss mask coloured, lengths, overlap with an evaluation set."""
    from distill.audit import audit as run

    console.print(run(dataset, evaluation, limit=limit).render())


@app.command()
def train(
    kind: Annotated[str, typer.Argument(help="A drafter kind, such as medusa.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="Default: configs/KIND.yaml.")] = None,
    num_processes: Annotated[int, typer.Option(help="Processes (DDP).")] = 1,
    launch_config: Annotated[
        Path | None, typer.Option(help="An accelerate config, one of configs/accelerate/.")
    ] = None,
) -> None:
    """Train a drafter; the same as accelerate launch train/KIND.py."""
    from train.launch import launch

    sys.exit(launch(kind, config, overrides or [], num_processes, launch_config))


@app.command()
@with_options
def bench(
    options: MeasureOptions,
    drafter: Annotated[
        str | None,
        typer.Argument(help=DRAFTER),
    ] = None,
    drafter_option: Annotated[
        str | None, typer.Option("--drafter", help="The same, as an option.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
) -> None:
    """Acceptance and speed of one drafter against plain decoding, in one run."""
    given = [name for name in (drafter, drafter_option) if name is not None]
    if len(given) != 1:
        raise UserError("give one drafter: outrider bench DRAFTER (or --drafter DRAFTER)")
    if json_file is not None:
        refuse_unwritable(json_file)
    report = measure_drafters(given, options, console)[0]
    if json_file is not None:
        write_json(json_file, report.to_json())


@app.command()
@with_options
def compare(
    options: MeasureOptions,
    drafters: Annotated[
        list[str],
        typer.Argument(help="Folders, hub ids, kinds without training, such a kind + a drafter."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for report.json, report.html.")] = None,
) -> None:
    """Several drafters, prompt lookup and suffix decoding on the same prompts, in one run."""
    if out is not None:
        refuse_unwritable(out / "report.json")
    reports = measure_drafters([*dict.fromkeys([*drafters, "ngram", "suffix"])], options, console)
    if out is not None:
        from infer.report import write_report

        write_report(reports, out)
        console.print(f"report.json and report.html in {out}")


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder or hub id.")],
    to: Annotated[str, typer.Option("--to", help="The engine: vllm.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16. Default: the target's own.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Default: the drafter's own.")] = None,
) -> None:
    """A drafter in the exact form that a serving engine loads."""
    from infer.opening import export_from

    folder = export_from(
        drafter, to, out, checked_dtype(dtype) if dtype else None, target, console.print
    )
    console.print(f"exported to {folder}")


@app.command()
def check(
    exported: Annotated[Path, typer.Argument(help="A folder written by outrider export.")],
    engine: Annotated[str, typer.Option(help="The engine that serves the folder.")] = "vllm",
    endpoint: Annotated[
        str | None, typer.Option(help="A running server instead of a subprocess: its URL.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Default: forty of our own.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first N prompts.", min=1)] = None,
    per_category: Annotated[int | None, typer.Option(help="First N a category.", min=1)] = None,
    chain: Annotated[
        int | None, typer.Option(help="K draft tokens. Default: as many as the drafter has.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, on both sides.")] = "bfloat16",
    target: Annotated[str | None, typer.Option(help="Default: the drafter's own.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
) -> None:
    """Acceptance in the real engine beside ours; exit status 1 outside the tolerance.

    vLLM's Python is .venv-vllm/bin/python (make venv-vllm) or what OUTRIDER_VLLM_PYTHON names.
    """
    from outrider.checking import run_check

    result = run_check(
        exported,
        engine=engine,
        endpoint=endpoint,
        prompts=prompts,
        limit=limit,
        per_category=per_category,
        chain=chain,
        max_new_tokens=max_new_tokens,
        dtype=checked_dtype(dtype),
        target=target,
    )
    console.print(result.table())
    console.print(result.verdict)
    if result.ours.accepted < 100:
        console.print(
            f"only {result.ours.accepted} drafts were accepted: more prompts or a better drafter "
            "would prove more"
        )
    if json_file is not None:
        write_json(json_file, result.to_json())
    sys.exit(0 if result.passed else 1)


@app.command()
def tune(
    drafter: Annotated[
        str, typer.Argument(help="A drafter's folder or hub id, or a training recipe (YAML).")
    ],
    estimate: Annotated[
        bool, typer.Option("--estimate", help="What acceptance it needs to break even here.")
    ] = False,
    target: Annotated[str | None, typer.Option(help="Default: the drafter's own.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Default: what is there.")] = None,
) -> None:
    """What a drafter must reach on this machine, from measured times, before it is trained."""
    from outrider.tuning import run_estimate

    if not estimate:
        raise UserError("give --estimate: outrider tune --estimate DRAFTER_OR_RECIPE")
    found = run_estimate(drafter, target, checked_dtype(dtype), device)
    console.print(found.table())
    console.print(found.verdict, markup=False)


@app.command()
@with_options
def generate(
    options: RunOptions,
    drafter: Annotated[str, typer.Argument(help=DRAFTER)],
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
) -> None:
    """Stream an answer; tokens that were accepted drafts are green."""
    from outrider.streaming import stream_answer

    stream_answer(drafter, prompt, options, console)


if __name__ == "__main__":
    main()
