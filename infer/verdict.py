"""What a verification rule is given and what it gives: the target's view, the choices, a verdict.

p is the target's distribution, q the drafter's, both after the same temperature and truncation.
Shapes: N tree nodes (root included), V target vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infer.sampling import Sampling, draw


class Choices(Protocol):
    """The randomness a rule may use."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, probs_V: Tensor) -> int:
        """A token id drawn from probs [V]."""
        ...


class RandomChoices:
    """Choices from a generator on the CPU: the same seed makes the same choices on any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        """True with this probability; 0 never, 1 always."""
        return float(self._uniform()) < probability

    def draw(self, probs_V: Tensor) -> int:
        """A token id drawn from probs [V], never one of probability zero."""
        return int(draw(probs_V, self._uniform().to(probs_V.device)))

    def _uniform(self) -> Tensor:
        return torch.rand((), dtype=torch.float64, generator=self.generator)


class TargetView:
    """What a rule sees of the target's forward over a tree.

    Row i of `logits_NV` predicts the token after node i.
    """

    def __init__(self, logits_NV: Tensor, sampling: Sampling) -> None:
        self._logits_NV = logits_NV
        self._sampling = sampling
        self._argmax_N: list[int] | None = None
        self._probs_V: dict[int, Tensor] = {}

    def argmax(self, node: int) -> int:
        """The most likely token after a node, the lowest id among ties (all nodes at once)."""
        if self._argmax_N is None:
            logits_NV = self._logits_NV
            if logits_NV.dtype in (torch.bfloat16, torch.float16):
                logits_NV = logits_NV.float()  # exact, and several times faster on a CPU
            self._argmax_N = logits_NV.argmax(-1).tolist()
        return self._argmax_N[node]

    def probs(self, node: int) -> Tensor:
        """The target's distribution p [V] after a node, computed at its first use and kept."""
        if node not in self._probs_V:
            self._probs_V[node] = self._sampling.probs(self._logits_NV[node])
        return self._probs_V[node]

    def all_probs(self) -> Tensor:
        """The target's distributions p [N, V] after every node, for rules that read them all."""
        return self._sampling.probs(self._logits_NV)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path`: the accepted nodes, root (0) first, ascending; `next_token`: what follows them.

    The next token is the correction after a rejected draft, the bonus when there was none left.
    """

    path: tuple[int, ...]
    next_token: int


def normalised(weights_V: Tensor, instead: Tensor) -> Tensor:
    """Weights [V] divided by their sum; `instead` when there is nothing to divide."""
    total = weights_V.sum(dtype=torch.float64)
    return weights_V / total if bool(total > 0) else instead


def without(probs_V: Tensor, token: int) -> Tensor:
    """Probabilities [V] given that it is not `token`."""
    others_V = probs_V.clone()
    others_V[token] = 0.0
    return normalised(others_V, instead=probs_V)
