"""What a drafter must reach to be worth its cost here, said before it is trained.

A chain of g drafts of acceptance rate a gives E = (1 - a^(g+1)) / (1 - a) tokens a round
(2211.17192, equation 1). A round costs g draft steps and one target forward over g + 1 tokens, and
a plain token one over a single token; all are measured on this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from heads.base import Drafter
from infer.session import measure_draft_time, measure_round_times
from infer.target import TargetModel

CHAINS = (1, 2, 3, 4, 5, 6, 8)
PRECISION = 1e-4
GOOD = 0.8
"""An acceptance rate that few drafters pass: who needs more is warned."""


def expected_tokens(rate: float, drafts: int) -> float:
    """Tokens a round of a chain, each draft accepted at `rate` behind an accepted one.

    rate = 0.5, drafts = 2  ->  1 + 0.5 + 0.25
    """
    return sum(rate**k for k in range(drafts + 1))


@dataclass(frozen=True)
class ChainCost:
    """A chain of `drafts`: seconds of drafting it, of verifying it, and of a plain token."""

    drafts: int
    draft_s: float
    verify_s: float
    plain_s: float

    def speedup(self, rate: float) -> float:
        """Times plain decoding at an acceptance rate."""
        tokens = expected_tokens(rate, self.drafts)
        return tokens * self.plain_s / (self.draft_s + self.verify_s)

    @property
    def break_even(self) -> float | None:
        """The acceptance rate at which it is as fast as plain decoding; None where none is."""
        if self.speedup(1.0) <= 1:
            return None
        low, high = 0.0, 1.0
        while high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle) >= 1 else (middle, high)
        return high


@dataclass(frozen=True)
class Estimate:
    """The costs of chains of one drafter; `rate` is its own measured acceptance rate, if known."""

    name: str
    costs: Sequence[ChainCost]
    rate: float | None = None

    @property
    def easiest(self) -> ChainCost | None:
        """The chain that breaks even at the lowest rate; None where none does."""
        able = [cost for cost in self.costs if cost.break_even is not None]
        return min(able, key=lambda cost: cost.break_even or 0.0, default=None)

    @property
    def verdict(self) -> str:
        """What the user should know."""
        found = self.easiest
        if found is None:
            best = max(self.costs, key=lambda cost: cost.speedup(1.0))
            return (
                f"{self.name} cannot win here: were every draft accepted, it would give "
                f"{best.speedup(1.0):.2f} times plain decoding; take fewer or narrower layers"
            )
        rate = found.break_even
        assert rate is not None
        said = (
            f"{self.name} must have {100 * rate:.0f} % of its drafts accepted to break even here "
            f"(chain of {found.drafts})"
        )
        if rate > GOOD:
            said += f"; few drafters pass {100 * GOOD:.0f} %: take fewer or narrower layers"
        if self.rate is not None:
            own = max(self.costs, key=lambda cost: cost.speedup(self.rate or 0.0))
            said += (
                f"; at its measured {100 * self.rate:.0f} % a chain of {own.drafts} gives "
                f"{own.speedup(self.rate):.2f} times plain decoding"
            )
        return said

    def table(self) -> Table:
        """A row a chain: costs, the rate that breaks even, speedups at some rates."""
        rates = (0.4, 0.6, 0.8)
        heads = ["drafts", "draft ms", "verify ms", "breaks even at"]
        table = Table(*heads, *(f"at {100 * rate:.0f} %" for rate in rates), title=self.name)
        for cost in self.costs:
            even = cost.break_even
            table.add_row(
                str(cost.drafts),
                f"{1e3 * cost.draft_s:.1f}",
                f"{1e3 * cost.verify_s:.1f}",
                "never" if even is None else f"{100 * even:.0f} %",
                *(f"{cost.speedup(rate):.2f}" for rate in rates),
            )
        return table


def estimate(
    name: str, target: TargetModel, drafter: Drafter, rate: float | None = None
) -> Estimate:
    """Measure a drafter, trained or not: what it costs does not hang on what it has learned."""
    depth = drafter.max_depth
    chains = [drafts for drafts in CHAINS if depth is None or drafts <= depth]
    verify_s = measure_round_times(target, chains)
    first_s, last_s = (measure_draft_time(target, drafter, g) for g in (chains[0], chains[-1]))
    level_s = (last_s - first_s) / max(1, chains[-1] - chains[0])
    costs = [
        ChainCost(g, first_s + level_s * (g - chains[0]), verify_s[g + 1], verify_s[1])
        for g in chains
    ]
    return Estimate(name, costs, rate)
