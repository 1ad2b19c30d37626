"""From logits to probabilities: temperature, then top-k, then top-p."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise UserError(
                f"temperature {self.temperature} given; expected 0 (greedy) or a positive number"
            )
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k} given; expected 0 (off) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top-p {self.top_p} given; expected a number above 0 and at most 1 (off)"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] of logits [..., V]: float32 (float64 stays), cut, normalised.

        Greedy gives a one-hot at the lowest id among the largest logits.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # From the largest down and within float32, so that no temperature gives inf - inf.
        limits = torch.finfo(torch.float32)
        logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / min(max(self.temperature, limits.tiny), limits.max)
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [...] drawn from probs [..., V] by inverse transform at uniform [...] in [0, 1).

    A token of probability zero is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    last = (probs > 0).to(torch.uint8).flip(-1).argmax(-1)
    return torch.minimum(index, probs.shape[-1] - 1 - last)
