"""How far a run is, when it ends, and the learning rate that follows from it.

Progress runs from 0 to 1 by whichever stop comes first, wall clock included, so that a schedule
ends where the run ends even when nobody knows how many steps fit into the minutes.
"""

import math
from dataclasses import dataclass

from train.recipe import OptimizerSection, StopSection


@dataclass(frozen=True)
class Pace:
    """The stops of a run whose epochs are `steps_per_epoch` steps long (a fraction is allowed)."""

    stop: StopSection
    optimizer: OptimizerSection
    steps_per_epoch: float

    @property
    def max_steps(self) -> int | None:
        """The last step's number by `max_steps` and `max_epochs`; None when only time stops."""
        limits = [self.stop.max_steps] if self.stop.max_steps is not None else []
        if self.stop.max_epochs is not None:
            steps = self.stop.max_epochs * self.steps_per_epoch
            limits.append(max(1, math.ceil(steps - 1e-9)))
        return min(limits, default=None)

    def progress(self, steps: float, elapsed_s: float) -> float:
        """The share of the run that lies behind, at most 1."""
        shares = [0.0] if self.max_steps is None else [steps / self.max_steps]
        if self.stop.max_minutes is not None:
            shares.append(elapsed_s / (60 * self.stop.max_minutes))
        return min(1.0, max(shares))

    def finished(self, steps: int, elapsed_s: float) -> bool:
        """Whether no further step is taken after `steps` of them."""
        return self.progress(steps, elapsed_s) >= 1

    def learning_rate(self, steps: int, elapsed_s: float) -> float:
        """The rate of the next step, `steps` lying behind: read at that step's middle."""
        return self.optimizer.lr * self.factor(self.progress(steps + 0.5, elapsed_s))

    def factor(self, progress: float) -> float:
        """Linear warmup to 1, then the schedule down to 0 (constant stays at 1)."""
        warmup = self.optimizer.warmup
        if progress < warmup:
            return progress / warmup
        rest = (progress - warmup) / (1 - warmup)
        if self.optimizer.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * rest))
        return 1 - rest if self.optimizer.schedule == "linear" else 1.0

    def planned_steps(self, steps: int, elapsed_s: float) -> int:
        """How many steps the run will have, by its pace so far where time may stop it first."""
        progress = self.progress(steps, elapsed_s)
        return max(steps, round(steps / progress)) if progress > 0 else self.max_steps or 0

    def remaining_s(self, steps: int, elapsed_s: float) -> float:
        """Seconds to the end at the pace so far."""
        progress = self.progress(steps, elapsed_s)
        return elapsed_s * (1 - progress) / progress if progress > 0 else 0.0
