"""What a feature drafter's training step costs: `python -m tests.bench.train_step [Vd [ROWS]]`.

Three unrolled steps in bfloat16 over rows of 1,024 tokens at the embedded target's sizes, beside
its matrix products alone at the same shapes (forward and both backwards) and beside a plain
reference step: whole logits of every step at once, autograd through them. All in one run, in turn;
run by hand, on a machine that does nothing else.
"""

import resource
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distill.criterion import ChunkedCriterion, step_loss_ref
from distill.losses import LossSettings
from distill.workspace import Workspace
from heads.base import SharedWeights, StepLoss, TargetIdentity, TrainingBatch, drafter_class
from heads.vocab import VocabMap

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, GROUPS, HEAD_DIM, LAYERS = 49152, 576, 1536, 9, 3, 64, 30
LENGTH, CONVERSATION, PROMPT, STEPS, REPEATS = 1024, 256, 80, 3, 5
SETTINGS = LossSettings({"forward_kl": 1.0})


def identity() -> TargetIdentity:
    """A target of the embedded one's sizes; its weights do not matter here."""
    names = ("config_hash", "weights_hash", "tokenizer_hash", "template_hash")
    return TargetIdentity(
        name="sizes",
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        dtype="bfloat16",
        decoder={
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "hidden_act": "silu",
            "rope": {"rope_type": "default", "rope_theta": 100000.0},
        },
        **dict.fromkeys(names, ""),
    )


def random_batch(rows: int, vocab: VocabMap) -> TrainingBatch:
    """Rows of four conversations each, two thirds of them answers."""
    places = torch.arange(LENGTH).expand(rows, -1)
    positions = places % CONVERSATION
    tokens = vocab.target_ids_Vd[torch.randint(0, len(vocab), (rows, LENGTH))]
    hidden = torch.randn(rows, LENGTH, HIDDEN).bfloat16()
    captured = torch.randn(rows, LENGTH, 3, HIDDEN).bfloat16()
    segments = places // CONVERSATION + 1
    return TrainingBatch(tokens, positions >= PROMPT, segments, positions, hidden, captured)


class PlainCriterion:
    """Whole logits of a step, their losses by autograd."""

    def __init__(self, batch: TrainingBatch, lm_head_VD: Tensor) -> None:
        self.batch, self.lm_head_VD = batch, lm_head_VD

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        *,
        step: int,
        vocab: VocabMap | None = None,
        features_BTD: Tensor | None = None,
    ) -> StepLoss:
        """As `ChunkedCriterion`, in whole tensors."""
        with torch.autocast("cpu", enabled=False):
            narrow = (hidden_BTD.bfloat16(), weight_VD.bfloat16())
            return step_loss_ref(self.batch, SETTINGS, self.lm_head_VD, *narrow, step, vocab)


def products(rows: int, supervised: int, draft_vocab: int) -> Callable[[], None]:
    """The products of a step at its shapes: forward, and both backwards of each."""
    tokens, wide = rows * LENGTH, 2 * HIDDEN
    attended, kept = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    one_step = [
        *[(tokens, wide, width) for width in (attended, kept, kept)],
        (tokens, attended, HIDDEN),
        (tokens, HIDDEN, INTERMEDIATE),
        (tokens, HIDDEN, INTERMEDIATE),
        (tokens, INTERMEDIATE, HIDDEN),
        (supervised, HIDDEN, draft_vocab),
    ]
    shapes = STEPS * one_step + [(tokens, 3 * HIDDEN, HIDDEN)]
    parts = {s: [torch.randn(a, b).bfloat16() for a, b in pairs(s)] for s in set(shapes)}
    taught = [torch.randn(supervised, HIDDEN).bfloat16(), parts[one_step[-1]][1]]

    def run() -> None:
        for shape in shapes:
            x, weight, gradient = parts[shape]
            torch.mm(x, weight.T)
            torch.mm(gradient, weight)
            torch.mm(gradient.T, x)
        torch.mm(taught[0], taught[1].T)

    return run


def pairs(shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Input, weight and output gradient of a product."""
    rows, fed, given = shape
    return [(rows, fed), (given, fed), (rows, given)]


def main() -> None:
    """Measure and print."""
    draft_vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    torch.manual_seed(0)
    lm_head_VD = 0.05 * torch.randn(VOCABULARY, HIDDEN).bfloat16()
    vocab = VocabMap(torch.randperm(VOCABULARY)[:draft_vocab].sort().values, VOCABULARY)
    batch = random_batch(rows, vocab)
    cls = drafter_class("eagle3")
    config = cls.Config.model_validate({"draft_vocab_size": draft_vocab, "num_steps": STEPS})
    drafter = cls.create(config, identity(), SharedWeights(lm_head_VD, lm_head_VD), vocab).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    workspace = Workspace()

    def step(fused: bool) -> None:
        criterion = (
            ChunkedCriterion(batch, SETTINGS, lm_head_VD, workspace=workspace)
            if fused
            else PlainCriterion(batch, lm_head_VD)
        )
        with torch.autocast("cpu", torch.bfloat16):
            losses = drafter(batch, criterion)
        torch.stack([loss.loss_sum for loss in losses]).sum().div(1000).backward()
        optimizer.step()
        optimizer.zero_grad()

    supervised = int(batch.loss_mask_BT.sum())
    runs: dict[str, Callable[[], None]] = {
        "this step": lambda: step(True),
        "its matrix products": products(rows, supervised, draft_vocab),
        "plain reference step": lambda: step(False),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, int] = {}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            start = perf_counter()
            run()
            if repeat:
                times[name].append(perf_counter() - start)
            memory.setdefault(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    report(times, memory, rows * LENGTH, draft_vocab)


def report(
    times: dict[str, list[float]], memory: dict[str, int], tokens: int, draft_vocab: int
) -> None:
    """Medians, and each as a ratio to the products."""
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    title = f"{STEPS} unrolled steps, draft vocabulary {draft_vocab:,}, {tokens:,} tokens"
    table = Table("", "ms", "tokens/s", "to the products", "peak memory so far", title=title)
    for name, seconds in middle.items():
        table.add_row(
            name,
            f"{1e3 * seconds:.0f}",
            f"{tokens / seconds:,.0f}",
            f"{seconds / middle['its matrix products']:.2f}",
            f"{memory[name] / 2**20:.1f} GiB",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
