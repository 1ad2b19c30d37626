"""The house: who may import what, and whose name may stand where. Sources are read, never run."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each layer imports only from those before it, and from itself.
LAYERS = ["heads", "infer", "distill", "train", "outrider"]
PLACES = {
    "accelerate": {"train"},
    "deepspeed": {"train"},
    "wandb": {"train"},
    "datasets": {"distill", "train"},
    "typer": {"outrider"},
}
SHARED = [
    *("heads/base.py", "heads/tree.py", "heads/align.py", "heads/vocab.py"),
    *("heads/blocks.py", "heads/schema.py", "heads/errors.py", "heads/files.py"),
    *("heads/cache.py", "heads/decoder.py", "heads/recurrent.py", "heads/rounds.py"),
    *("heads/students.py", "heads/adapters.py", "heads/writing.py"),
    *("heads/lookup.py", "heads/union.py"),
    "heads/drawing.py",
    "infer/*.py",
    "distill/*.py",
    *("train/recipe.py", "train/trainer.py", "train/batches.py", "train/corpus.py"),
    *("train/engine.py", "train/evaluation.py", "train/stepping.py", "train/warm.py"),
    *("train/ledger.py", "train/logbook.py", "train/forecast.py", "train/snapshots.py"),
    "train/rewriting.py",
]
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that are imported anywhere in the tree, also by import_module("x")."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module.partition(".")[0]


def is_main_guard(node: ast.stmt) -> bool:
    """Whether the statement is an `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def opening(path: Path) -> Iterator[ast.stmt]:
    """The statements of a script in the order they run, those under its main guard included."""
    for node in parsed(path).body:
        yield from node.body if is_main_guard(node) else [node]


def is_drafter(path: Path) -> bool:
    """Whether a class of the module has the attribute kind = "<the file's name>"."""
    for node in ast.walk(parsed(path)):
        for statement in node.body if isinstance(node, ast.ClassDef) else []:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id="kind")], value=ast.Constant(value=str(kind)))
                    | ast.AnnAssign(target=ast.Name(id="kind"), value=ast.Constant(value=str(kind)))
                ) if kind == path.stem:
                    return True
    return False


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SCRIPTS = [
    path
    for path in sorted((ROOT / "train").glob("*.py"))
    if any(map(is_main_guard, parsed(path).body))
]
DRAFTERS = sorted(path.stem for path in (ROOT / "heads").glob("*.py") if is_drafter(path))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import heads.base as b, torch", {"heads", "torch"}),
        ("def f():\n    from train.recipe import Recipe", {"train"}),
        ("from . import x\nfrom .y import z", set()),
        ("import importlib\nimportlib.import_module('wandb.sdk')", {"importlib", "wandb"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: set[str]) -> None:
    assert set(imported(ast.parse(source))) == found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_layer_imports_only_from_its_left(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    to_the_right = LAYERS[LAYERS.index(layer) + 1 :]
    assert not {"tests", "configs", *to_the_right}.intersection(imported(parsed(path)))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_third_party_package_is_imported_only_where_it_belongs(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    elsewhere = {package for package, layers in PLACES.items() if layer not in layers}
    assert not elsewhere.intersection(imported(parsed(path)))


def test_no_file_in_train_shadows_a_module() -> None:
    """A script's folder comes first in sys.path until its guard has run."""
    stems = {path.stem for path in (ROOT / "train").iterdir()} - {"__init__", "__pycache__"}
    taken = sys.stdlib_module_names | set(importlib.metadata.packages_distributions())
    assert not stems & taken


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_training_script_replaces_its_folder_by_the_root(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the script's opening, statement by statement, until the root comes first in sys.path."""
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    names = {"__name__": "__main__", "__file__": str(path)}
    for statement in opening(path):
        if sys.path[0] != str(path.parent):
            break
        early = set(imported(statement)) - sys.stdlib_module_names
        assert not early, f"{sorted(early)} imported before sys.path[0] is replaced"
        exec(compile(ast.Module([statement], []), str(path), "exec"), names)
    assert sys.path[0] == str(ROOT)
    assert str(path.parent) not in sys.path


def test_drafters_are_found() -> None:
    assert DRAFTERS, "no module under heads/ defines a class with kind = its file's name"


@pytest.mark.parametrize("pattern", SHARED)
def test_shared_code_names_no_drafter(pattern: str) -> None:
    # An attribute or argument of that name (`path.suffix`, `suffix=`) is another thing.
    named = "|".join(map(re.escape, DRAFTERS))
    word = re.compile(rf"(?<!\.)\b({named})\b(?!=)", re.IGNORECASE)
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in sorted(ROOT.glob(pattern))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if DRAFTERS and word.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_tracked_file_names_a_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # Joined here, so that this file does not name them either.
    hosts = [
        ".".join(parts).encode()
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("anaconda", "org"),
            ("npmjs", "org"),
            ("deb", "debian", "org"),
            ("crates", "io"),
            ("golang", "org"),
        )
    ]
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    naming = [
        name_of(path)
        for path in tracked
        if path.is_file() and any(host in path.read_bytes() for host in hosts)
    ]
    assert not naming
