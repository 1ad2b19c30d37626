"""A small random batch, and tensors of the drafter's and the target's."""

import torch
from torch import Tensor

from distill.losses import LOSSES
from heads.base import StepLoss, TrainingBatch
from heads.vocab import VocabMap

B, T, D, V = 2, 40, 8, 21
VOCAB = VocabMap(torch.tensor([0, 1, 3, 4, 7, 8, 9, 12, 15, 19]), V)
FIELDS = ("tokens_BT", "loss_mask_BT", "segments_BT", "positions_BT", "hidden_BTD")
TERMS: list[dict[str, float]] = [
    *({name: 1.0} for name in sorted(LOSSES)),
    {"smooth_l1": 1.0},
    {"smooth_l1": 1.0, "forward_kl": 0.1},
    {"ce": 0.1, "tv": 0.9, "topk_ce": 0.5, "jsd": 0.2},
]


def batch(dtype: torch.dtype = torch.float64, mask: str = "some") -> TrainingBatch:
    make = torch.Generator().manual_seed(3)
    segments = torch.ones(B, T, dtype=torch.long)
    segments[0, 17:] = 2
    segments[1, 33:] = 0
    masks = {
        "all": torch.ones(B, T, dtype=torch.bool),
        "some": torch.rand(B, T, generator=make) < 0.6,
        "none": torch.zeros(B, T, dtype=torch.bool),
    }
    return TrainingBatch(
        tokens_BT=torch.randint(0, V, (B, T), generator=make),
        loss_mask_BT=masks[mask],
        segments_BT=segments,
        positions_BT=torch.arange(T).expand(B, T),
        hidden_BTD=torch.randn(B, T, D, generator=make, dtype=torch.float64).to(dtype),
    )


def tensors(vocab: VocabMap | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Drafter states, an output matrix, the target's output matrix, features."""
    make = torch.Generator().manual_seed(4)
    rows = V if vocab is None else len(vocab)
    shapes = (B, T, D), (rows, D), (V, D), (B, T, D)
    return tuple(torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)


def gradients(step: StepLoss, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.autograd.grad(step.loss_sum * 0.37, inputs, allow_unused=True)
    return tuple(
        torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)
    )
