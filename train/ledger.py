"""Conversations that a run leaves out, the same on every process.

The target's states of some conversations may hold NaN or infinity. They are found where their row
is computed (`distill.features`), told to everyone, named once, and counted: a few are a remark,
more than one in a hundred means that something is wrong with the target or with the data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from accelerate.utils import gather_object

from heads.errors import UserError

AT_MOST = 0.01
"""The share of a run's conversations that may be dropped."""
SHOWN = 5
"""How many are named when the run stops."""


@dataclass
class Ledger:
    """The dropped conversations among `num_conversations`; `say` prints a line for people."""

    num_conversations: int
    say: Callable[[str], None]
    names: set[str] = field(default_factory=set)

    def unknown(self, found: Iterable[str]) -> list[str]:
        """Those that are not entered yet."""
        return sorted(set(found) - self.names)

    def enter(self, found: Iterable[str]) -> None:
        """Enter what any process has found; all call it together.

        Raises UserError, on all of them, when more are dropped than may be.
        """
        new = self.unknown(gather_object(list(found)))
        self.names.update(new)
        if new:
            self.say(
                f"warning: {', '.join(new)}: dropped, the target's states of it hold NaN or "
                f"infinity ({len(self.names)} of {self.num_conversations:,} conversations so far)"
            )
        if len(self.names) > AT_MOST * self.num_conversations:
            names = sorted(self.names)
            more = ", .." if len(names) > SHOWN else ""
            raise UserError(
                f"the target's states of {len(names)} of {self.num_conversations:,} conversations "
                f"hold NaN or infinity, more than {100 * AT_MOST:g} %: {', '.join(names[:SHOWN])}"
                f"{more}; run the target in float32 (target.dtype=float32), look at its weights, "
                "or drop these conversations from the data"
            )
