"""Reports for people and programs: a table on the terminal, JSON, and one HTML page."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heads.files import write_text
from heads.tree import DynamicTree
from infer.acceptance import (
    AcceptanceReport,
    PromptRecord,
    bootstrap,
    paired_difference,
    speedup,
    time_share,
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Outrider: comparison of drafters</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 2rem } caption { text-align: left; color: #555 }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
</style></head><body>
<h1>Comparison of drafters</h1>
<p>Acceptance length: tokens emitted per target forward, bonus included, pooled over rounds (micro)
and as the mean over prompts (macro), with 95 % bootstrap intervals over prompts. Speed-up: median
over prompts of tokens per second against plain decoding of the same target in the same run.</p>
{% for section in sections %}
<table><caption>{{ section.title }}</caption>
<tr>{% for head in section.head %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
<h2>Remarks</h2>
<ul>{% for remark in remarks %}<li>{{ remark }}</li>{% endfor %}</ul>
<h2>Settings</h2>
{% for name, settings in settings.items() %}<p><b>{{ name }}</b>:
{% for key, value in settings.items() %}{{ key }} {{ value }}{{ ", " if not loop.last }}
{% endfor %}</p>{% endfor %}
</body></html>
"""

FEW = 16
"""Fewer prompts than that leave the figures to chance."""

SHOWN = 6
"""Positions shown in the tables; the JSON holds all."""

Section = dict[str, Any]


def sections(reports: Sequence[AcceptanceReport]) -> list[Section]:
    """The tables of a comparison: overall, by subset, by category, by position, time."""
    parts = [_overall("all prompts", reports)]
    subsets: dict[str, Callable[[PromptRecord], bool]] = {
        "without degenerate outputs (texts that end in a loop)": lambda p: not p.degenerate,
        "new text only (no loop, at most a quarter of the tokens repeat a 3-gram)": (
            lambda p: p.new_text
        ),
    }
    for title, keep in subsets.items():
        kept = [r.subset(keep) for r in reports]
        if any(len(k.prompts) < len(r.prompts) for k, r in zip(kept, reports, strict=True)):
            parts.append(_overall(title, kept))
    return [*parts, _by_category(reports), _by_position(reports), _by_time(reports)]


def _overall(title: str, reports: Sequence[AcceptanceReport]) -> Section:
    head = ["drafter", "drafts", "prompts", "tau (95 %)", "macro"]
    head += ["tokens/s", "plain", "speed-up (95 %)"]
    rows = []
    for report in reports:
        f, settings = report.figures(), report.settings
        rows.append(
            [
                report.name,
                drafts(settings),
                str(len(report.prompts)),
                with_interval(f["acceptance_length"], f["acceptance_length_interval"]),
                number(f["acceptance_length_macro"]),
                number(f["tokens_per_second"], 1),
                number(f["baseline_tokens_per_second"], 1),
                with_interval(f["speedup"], f["speedup_interval"]),
            ]
        )
    return {"title": title, "head": head, "rows": rows}


def _by_category(reports: Sequence[AcceptanceReport]) -> Section:
    names = sorted({p.category for r in reports for p in r.prompts})
    rows = []
    for report in reports:
        cells = [report.subset(lambda p, n=n: p.category == n) for n in names]  # type: ignore[misc]
        rows.append([report.name, *(number(c.acceptance_length) for c in cells)])
    return {"title": "acceptance length by category", "head": ["drafter", *names], "rows": rows}


def _by_position(reports: Sequence[AcceptanceReport]) -> Section:
    depth = min(SHOWN, max((len(r.counts.acceptance_rate) for r in reports), default=0))
    rows = []
    for report in reports:
        counts = report.counts
        pairs = list(zip(counts.acceptance_rate, counts.conditional_rate, strict=False))
        cells = [f"{number(share)} ({number(given)})" for share, given in pairs[:depth]]
        rows.append([report.name, *cells, *[""] * (depth - len(cells))])
    head = ["drafter", *(f"@{k + 1}" for k in range(depth))]
    title = "accepted / proposed by position (given that the position before held)"
    if any(len(r.counts.acceptance_rate) > depth for r in reports):
        title += f", the first {depth}; the JSON holds all"
    return {"title": title, "head": head, "rows": rows}


def _by_time(reports: Sequence[AcceptanceReport]) -> Section:
    shares = [time_share(r.prompts) for r in reports]
    head = ["drafter", *(shares[0] if shares else [])]
    rows = [
        [r.name, *(f"{100 * v:.1f} %" for v in share.values())]
        for r, share in zip(reports, shares, strict=True)
    ]
    return {"title": "decoding time by part", "head": head, "rows": rows}


def render(reports: Sequence[AcceptanceReport]) -> RenderableType:
    """The tables for a terminal."""
    blocks: list[RenderableType] = []
    for section in sections(reports):
        blocks.append(Text(f"\n{section['title']}", style="bold"))
        table = Table(box=SIMPLE_HEAD)
        for index, head in enumerate(section["head"]):
            justify: Literal["left", "right"] = "left" if index == 0 else "right"
            table.add_column(Text(head), justify=justify, no_wrap=head != "drafts")
        for row in section["rows"]:
            table.add_row(*(Text(cell) for cell in row))
        blocks.append(table)
    return Group(*blocks, *(Text(line) for line in remarks(reports)))


def remarks(reports: Sequence[AcceptanceReport]) -> list[str]:
    """What a reader has to know beside the figures."""
    lines = []
    for report in reports:
        total = len(report.prompts)
        loops = sum(p.degenerate for p in report.prompts)
        new = sum(p.new_text for p in report.prompts)
        line = f"{report.name}: {loops} of {total} outputs are degenerate, {new} are new text"
        if not report.settings["lossless"]:
            line += f"; rule {report.settings['rule']} is LOSSY: the target's distribution changes"
        divergence = report.divergence()
        if divergence["compared"]:
            line += (
                f"; {divergence['identical']} of {divergence['compared']} equal plain greedy "
                f"decoding token for token ({report.settings['dtype']})"
            )
            margins = [d["margin"] for d in divergence["diverged"] if d["margin"] is not None]
            if margins:
                line += f", top-1 margin at the first difference at most {max(margins):.3f}"
        lines.append(line)
    return [*lines, *verdict(reports)]


def verdict(reports: Sequence[AcceptanceReport]) -> list[str]:
    """What to ship by these figures, where they were timed against plain decoding."""
    timed = [(speedup(r.prompts), r) for r in reports]
    timed = [(gain, r) for gain, r in timed if math.isfinite(gain)]
    if not timed:
        return []
    gain, best = max(timed, key=lambda pair: pair[0])
    measured = f"{best.name}: {with_interval(gain, bootstrap(best.prompts, speedup))}"
    if gain <= 1:
        lines = [f"none is faster than plain decoding here; the nearest is {measured}"]
    else:
        lines = [f"fastest here is {measured} times plain decoding"]
    if len(best.prompts) < FEW:
        lines.append(f"{len(best.prompts)} prompts are few: take {FEW} or more before you choose")
    return lines


def to_json(reports: Sequence[AcceptanceReport]) -> dict[str, Any]:
    """The comparison's record: one report a drafter, and paired differences to the first one."""
    pairs = [paired_difference(report, reports[0]) for report in reports[1:]]
    record: dict[str, Any] = clean(
        {"drafters": {r.name: r.to_json() for r in reports}, "paired": pairs}
    )
    return record


def clean(value: Any) -> Any:
    """The same value with null where a number is not finite, so that it is JSON."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_html(reports: Sequence[AcceptanceReport]) -> str:
    """One page that stands alone."""
    template = Environment(autoescape=True).from_string(PAGE)
    return template.render(
        sections=sections(reports),
        remarks=remarks(reports),
        settings={r.name: r.settings for r in reports},
    )


def write_report(reports: Sequence[AcceptanceReport], folder: Path) -> None:
    """`report.json` and `report.html` of a comparison."""
    write_text(folder / "report.json", json.dumps(to_json(reports), indent=2) + "\n")
    write_text(folder / "report.html", to_html(reports))


def drafts(settings: dict[str, Any]) -> str:
    """The form of what is drafted, for people."""
    if settings["dynamic"] is not None:
        return str(DynamicTree(**settings["dynamic"]))
    if settings["is_chain"]:
        return f"chain of {settings['tree_nodes']}"
    return f"tree of {settings['tree_nodes']}, depth {settings['num_speculative_tokens']}"


def number(value: float | None, digits: int = 2) -> str:
    """A figure for people; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def with_interval(value: float, pair: Sequence[float] | None) -> str:
    """A figure and its interval for people."""
    return number(value) + ("" if pair is None else f" ({pair[0]:.2f}-{pair[1]:.2f})")
