"""The only place where targets are shifted against inputs.

Convention: the target's state at position t has seen tokens 0..t and its own lm_head predicts
token t+1. Draft step k (from 0) made from position t predicts token t + 2 + k.

Shapes: B rows, T positions.
"""

import torch
from torch import Tensor

IGNORE = -100


def shift_left(values_BT: Tensor, by: int, fill: int) -> Tensor:
    """`values_BT[t + by]` at position t, `fill` where the row has ended.

    values_BT = [a, b, c, d], by = 1  ->  [b, c, d, fill]
    """
    shifted = torch.full_like(values_BT, fill)
    if by < values_BT.shape[1]:
        shifted[:, : values_BT.shape[1] - by] = values_BT[:, by:]
    return shifted


def own_states(states_BTD: Tensor) -> Tensor:
    """The states that a language model of its own foretells with: position t has that of t + 1.

    The state after token t + 1 foretells token t + 2, the target of draft step 0. 0 at the end.

    states = [a, b, c, d]  ->  [b, c, d, 0]
    """
    return torch.cat([states_BTD[:, 1:], torch.zeros_like(states_BTD[:, :1])], dim=1)


def draft_inputs(tokens_BT: Tensor, step: int) -> Tensor:
    """Tokens that draft step `step` reads: position t is paired with token t + 1 + step.

    0 where the row has ended: there `draft_targets` is IGNORE.

    tokens_BT = [a, b, c, d], step = 0  ->  [b, c, d, 0]
    """
    return shift_left(tokens_BT, step + 1, 0)


def draft_targets(
    tokens_BT: Tensor, loss_mask_BT: Tensor, segments_BT: Tensor, step: int
) -> Tensor:
    """Targets of draft step `step`: position t is paired with token t + 2 + step.

    IGNORE where that token is not supervised (`loss_mask_BT` false), belongs to another
    conversation of a packed row (`segments_BT` differ; 0 is padding), or lies past the row's end.

    tokens_BT = [a, b, c, d], step = 0, all supervised  ->  [c, d, IGNORE, IGNORE]
    """
    by = step + 2
    targets = shift_left(tokens_BT, by, IGNORE)
    supervised = shift_left(loss_mask_BT.long(), by, 0).bool()
    same = shift_left(segments_BT, by, 0) == segments_BT
    return targets.masked_fill(~(supervised & same & (segments_BT > 0)), IGNORE)


def teacher_positions(num_positions: int, step: int, device: torch.device) -> Tensor:
    """Where the target's own distribution for draft step `step` stands: position t + 1 + step.

    Its state has seen tokens 0..t+1+step and predicts token t + 2 + step. Clamped at the row's
    end, where `draft_targets` is IGNORE anyway.

    num_positions = 4, step = 0  ->  [1, 2, 3, 3]
    """
    return (torch.arange(num_positions, device=device) + step + 1).clamp_(max=num_positions - 1)
