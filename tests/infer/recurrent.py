"""Random drafters that feed on themselves, and what they compute: for the tests of their forms."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.base import Checkpoint, Contract, Drafter, StepLoss, TrainingBatch, drafter_class
from heads.vocab import VocabMap
from infer.target import TargetModel

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle_deep": ("eagle", {"num_layers": 2}),
    "eagle_biased": ("eagle", {"attention_bias": True}),
    "fused": ("eagle3", {"aux_hidden_state_layer_ids": (1, 2, 3)}),
    "fused_vocab": (
        "eagle3",
        {"aux_hidden_state_layer_ids": (1, 3), "draft_vocab_size": 40, "norm_before_fc": True},
    ),
    "fused_flags": (
        "eagle3",
        {
            "aux_hidden_state_layer_ids": (2, 3),
            "norm_before_residual": True,
            "fc_norm": True,
            "norm_output": True,
            "attention_bias": True,
        },
    ),
    "fused_embedding": ("eagle3", {"aux_hidden_state_layer_ids": (1, 2), "embedding": "own"}),
    "fused_narrow": (
        "eagle3",
        {
            "aux_hidden_state_layer_ids": (1, 2),
            "hidden_size": 16,
            "head_dim": 4,
            "embedding": "own",
        },
    ),
    "fused_rope": (
        "eagle3",
        {
            "aux_hidden_state_layer_ids": (1, 2),
            "max_position_embeddings": 64,
            "rope": {
                "rope_type": "llama3",
                "rope_theta": 5e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def made(target: TargetModel, form: str, **changes: Any) -> Checkpoint:
    """A drafter of that form with random tensors, bound to its target."""
    kind, fields = FORMS[form]
    cls = drafter_class(kind)
    config = cls.Config(**fields | changes)
    make = torch.Generator().manual_seed(7)
    size, vocab = config.draft_vocab_size, None
    if size:
        ids = torch.randperm(target.identity.vocab_size, generator=make)[:size]
        vocab = VocabMap(ids.sort().values, target.identity.vocab_size)
    drafter = cls.blank(config, target.identity)
    with torch.no_grad():
        for parameter in drafter.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=make))
        if vocab is not None:
            drafter.get_buffer("draft_ids").copy_(vocab.target_ids_Vd)
    drafter.bind(target.shared)
    contract = Contract(target=target.identity, **drafter.contract_fields())
    return Checkpoint(drafter.eval(), contract)


def step_logits(drafter: Drafter, target: TargetModel, length: int = 48) -> Tensor:
    """Logits [steps, B, T, V] of three unrolled draft steps over random tokens and states."""
    make = torch.Generator().manual_seed(3)
    width, layers = target.identity.hidden_size, len(drafter.needs.captured_layers)
    tokens_BT = torch.randint(0, target.identity.vocab_size, (2, length), generator=make)
    batch = TrainingBatch(
        tokens_BT=tokens_BT,
        loss_mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        segments_BT=torch.ones_like(tokens_BT),
        positions_BT=torch.arange(length).expand(2, -1),
        hidden_BTD=torch.randn(2, length, width, generator=make),
        captured_BTAD=torch.randn(2, length, layers, width, generator=make) if layers else None,
        rows=("a", "b"),
    )
    found: list[Tensor] = []

    def record(hidden_BTD: Tensor, weight_VD: Tensor, **given: Any) -> StepLoss:
        found.append(F.linear(hidden_BTD, weight_VD))
        return StepLoss(*(torch.zeros(1) for _ in StepLoss._fields))

    with torch.no_grad():
        drafter(batch, record)
    return torch.stack(found)
