"""What `bench`, `compare` and `demo` share: their options, and the run behind them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.errors import UserError, unknown_name

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEFAULT_PROMPTS = CONFIGS / "prompts" / "demo.jsonl"


@dataclass(frozen=True)
class RunOptions:
    """The options of every command that runs a drafter."""

    chain: Annotated[int | None, typer.Option(help="Draft a chain of K tokens.")] = None
    tree: Annotated[
        str | None,
        typer.Option(
            help="Draft a tree: a number of drafts, a file, dynamic:N[:DEPTH[:TOPK]] (shaped by "
            "the drafter's own confidence), or auto (the default)."
        ),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            help="greedy, topk_tree, typical (lossy); for drafts drawn at random token, block "
            "(chains), recursive_with, recursive_without, traversal (trees). Default: a lossless "
            "one that fits."
        ),
    ] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16"
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: what is there.")] = None
    target: Annotated[
        str | None, typer.Option(help="demo, a folder or an id. Default: the drafter's own.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run code that comes with the target.")
    ] = False


@dataclass(frozen=True)
class MeasureOptions(RunOptions):
    """The options of every command that measures."""

    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL or text file, or datasets:ID. Default: forty of our own."),
    ] = None
    limit: Annotated[int | None, typer.Option(help="The first N prompts.", min=1)] = None
    per_category: Annotated[int | None, typer.Option(help="First N a category.", min=1)] = None
    batch: Annotated[int, typer.Option(help="Requests at once; only 1 for now.")] = 1


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its parameter `options` (a dataclass) as options of its own."""
    schema: type[RunOptions] = get_type_hints(command)["options"]
    hints = get_type_hints(schema, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(schema)
    ]
    parameters = inspect.signature(command).parameters.values()
    own = [p.replace(kind=keyword) for p in parameters if p.name != "options"]

    @wraps(command)
    def run(**given: Any) -> None:
        options = schema(**{p.name: given.pop(p.name) for p in shared})
        command(**given, options=options)

    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run


@contextmanager
def progress(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere; call it with (done, total)."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def checked_dtype(name: str) -> Any:
    """The dtype's name, if it is one that targets run in."""
    from infer.target import DType

    if name not in get_args(DType):
        raise unknown_name("dtype", name, get_args(DType))
    return cast(DType, name)


def open_contenders(
    specs: Sequence[str], options: RunOptions, console: Console
) -> tuple[Any, list[Any]]:
    """The target and every drafter bound to it, each with the settings that it runs at."""
    from infer.compare import Contender
    from infer.loop import GenerationSettings
    from infer.opening import bind_drafter, is_training_free, open_target, read_drafter
    from infer.sampling import Sampling
    from infer.session import ShapeChoice, default_rule, draft_shape

    choice = ShapeChoice(options.chain, options.tree)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    rule = default_rule(options.temperature, options.rule)
    checkpoints = [read_drafter(spec) for spec in specs]
    dtype = checked_dtype(options.dtype)
    target = open_target(
        checkpoints, options.target, dtype, options.device, options.trust_remote_code
    )
    contenders = []
    for name, spec, checkpoint in zip(names(specs), specs, checkpoints, strict=True):
        say = partial(_say, console, name)
        bound = bind_drafter(checkpoint, spec, target, say)
        beside = len(specs) > 1 and is_training_free(spec) and options.chain is None
        shape, note = draft_shape(ShapeChoice() if beside else choice, bound, target)
        if note:
            say(note)
        settings = GenerationSettings(options.max_new_tokens, sampling, rule, shape, options.seed)
        contenders.append(Contender(name, bound.drafter, settings))
    return target, contenders


def _say(console: Console, name: str, note: str) -> None:
    """A line on one drafter; brackets are not markup."""
    console.print(f"{name}: {note}", markup=False)


def measure_drafters(specs: Sequence[str], options: MeasureOptions, console: Console) -> list[Any]:
    """Run every drafter and plain decoding on the prompts; print the tables; the reports."""
    if options.batch != 1:
        raise UserError(f"--batch {options.batch} given; the loop measures one request at a time")
    from distill.questions import load_questions
    from infer.compare import measure
    from infer.report import render

    target, contenders = open_contenders(specs, options, console)
    questions = load_questions(
        options.prompts or DEFAULT_PROMPTS,
        target,
        limit=options.limit,
        per_category=options.per_category,
    )
    with progress("prompts", console) as on_prompt:
        reports = measure(target, contenders, questions, on_prompt=on_prompt)
    console.print(render(reports))
    return reports


def names(specs: Sequence[str]) -> list[str]:
    """A short, distinct name a drafter: the folder's, or its parent's where that says more."""
    from infer.opening import split_lookup

    short = []
    for spec in specs:
        lookup, drafter = split_lookup(spec)
        path = Path(drafter)
        plain = path.name in {"best", "last"} and path.parent.name
        name = path.parent.name if plain else path.name
        short.append(name if lookup is None else f"{lookup}+{name}")
    return [
        name if short.count(name) == 1 else spec for name, spec in zip(short, specs, strict=True)
    ]
