"""What a check found: acceptance on both sides, the difference, the verdict."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from infer.acceptance import Counts

TOLERANCE = {"float32": 0.01, "bfloat16": 0.03}
"""How far acceptance lengths may differ: in bfloat16 texts of different code paths part soon."""


@dataclass(frozen=True)
class CheckResult:
    """Both sides' counts, and how many prompts gave the same text on both.

    `replayed` is our drafter along the engine's own texts, counted where the texts are not all
    the same: acceptance differs from text to text, and this difference is the drafter's alone.
    """

    exported: str
    engine: str
    settings: dict[str, Any]
    ours: Counts
    engines: Counts
    identical: int
    tolerance: float
    replayed: Counts | None = None

    @property
    def difference(self) -> float:
        """The engine's acceptance length over ours, less one."""
        return self.engines.acceptance_length / self.ours.acceptance_length - 1

    @property
    def difference_on_same_texts(self) -> float:
        """The engine's acceptance length over ours along the engine's texts, less one."""
        ours = self.replayed or self.ours
        return self.engines.acceptance_length / ours.acceptance_length - 1

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance, on our own or on the same texts."""
        nearest = min(abs(self.difference), abs(self.difference_on_same_texts))
        return nearest <= self.tolerance

    @property
    def verdict(self) -> str:
        """One line."""
        relation = "within" if self.passed else "OUTSIDE"
        same = ""
        if self.replayed is not None:
            same = f" ({self.difference_on_same_texts:+.2%} along the engine's own texts)"
        return (
            f"acceptance length differs by {self.difference:+.2%}{same}, {relation} the tolerance "
            f"of {self.tolerance:.0%}; {self.identical} of {self.ours.prompts} texts are identical"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, by the names that reports use."""
        return {
            "exported": self.exported,
            "engine": self.engine,
            "settings": self.settings,
            "ours": _side(self.ours),
            "engine_side": _side(self.engines),
            "ours_on_engine_texts": None if self.replayed is None else _side(self.replayed),
            "difference": self.difference,
            "difference_on_same_texts": self.difference_on_same_texts,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "identical": self.identical,
            "identical_share": self.identical / self.ours.prompts,
        }

    def table(self) -> Table:
        """A column a side: the same texts first, when ours are others than the engine's."""
        settings = self.settings
        title = (
            f"{self.exported} for {settings['target']}, K = {settings['num_speculative_tokens']}, "
            f"{settings['dtype']}, {settings['prompts']} prompts"
        )
        sides = {"ours": self.ours, self.engine: self.engines}
        if self.replayed is not None:
            sides["ours on its texts"] = self.replayed
        table = Table("", *sides, title=title)
        for name, figure in _figures(settings["num_speculative_tokens"]).items():
            table.add_row(name, *(figure(counts) for counts in sides.values()))
        return table


def _figures(depth: int) -> dict[str, Callable[[Counts], str]]:
    """The table's rows."""

    def rate_at(position: int) -> Callable[[Counts], str]:
        return lambda counts: f"{counts.acceptance_rate[position]:.4f}"

    return {
        "acceptance length": lambda counts: f"{counts.acceptance_length:.4f}",
        **{f"accepted at {k + 1}": rate_at(k) for k in range(depth)},
        "rounds": lambda counts: f"{counts.rounds:,}",
        "draft tokens": lambda counts: f"{counts.drafted:,}",
        "accepted": lambda counts: f"{counts.accepted:,}",
        "new tokens": lambda counts: f"{counts.tokens:,}",
    }


def _side(counts: Counts) -> dict[str, Any]:
    return {
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.acceptance_rate,
        "counts": asdict(counts),
    }
