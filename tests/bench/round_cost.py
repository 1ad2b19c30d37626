"""What one round costs here, by tree size: `python -m tests.bench.round_cost [TARGET]`.

Prints the target's forward over a tree of N drafts as a ratio to a plain step of the same run, and
what the loop adds around the forwards. Run by hand; figures are ratios, since machines are noisy.
"""

import sys

from rich.console import Console
from rich.table import Table

from heads.tree import chain
from infer.acceptance import DECODE_PARTS, PromptRecord, Question, time_share
from infer.loop import GenerationSettings, speculative_generate
from infer.opening import bind_drafter
from infer.session import measure_round_times
from infer.target import TargetModel

SIZES = (4, 8, 16, 24, 32, 64)
PROMPT = tuple(range(100, 164))


def main() -> None:
    """Measure and print."""
    target = TargetModel.load(sys.argv[1] if len(sys.argv) > 1 else "demo", dtype="bfloat16")
    times = measure_round_times(target, SIZES, repeats=15)
    table = Table("nodes", "forward and argmax", "to a plain step")
    for nodes, seconds in times.items():
        table.add_row(str(nodes), f"{1e3 * seconds:.1f} ms", f"{seconds / times[1]:.2f}")
    console = Console()
    console.print(table)
    drafter = bind_drafter(None, "ngram", target).drafter
    shares = Table("drafts", *DECODE_PARTS)
    for size in SIZES[:4]:
        settings = GenerationSettings(max_new_tokens=96, shape=chain(size))
        result = speculative_generate(target, drafter, list(PROMPT), settings)
        share = time_share([PromptRecord.of(Question("0", "none", PROMPT), result)])
        shares.add_row(str(size), *(f"{100 * share[part]:.1f} %" for part in DECODE_PARTS))
    console.print(shares)


if __name__ == "__main__":
    main()
