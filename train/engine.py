"""One step on any number of processes: accelerate, DDP and DeepSpeed behind one small class.

Parameters are float32, the forward runs under bf16 autocast when the recipe says so, in every
engine alike. Gradients are summed over the whole global batch and divided once, by its number of
supervised positions, or of conversations where those count alike.
"""

import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast_object_list
from torch import Tensor, nn

from heads.base import Criterion, Drafter, TrainingBatch
from heads.blocks import TiedEmbedding
from heads.errors import UserError
from train.recipe import LossSection, Recipe

PATIENCE = timedelta(hours=24)
"""How long processes wait for the first one, which alone answers prompts and runs the tree loop."""

SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.DEEPSPEED,
}


def start_processes(device: str | None) -> PartialState:
    """Join the processes that the launcher started, on an accelerator where there is one."""
    cpu = device == "cpu" or not torch.cuda.is_available()
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        _prepare_deepspeed(cpu)
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if cpu:
        _use_all_cores()
    return state


def _use_all_cores() -> None:
    """Undo `accelerate launch`, which sets OMP_NUM_THREADS to 1 where nobody set it."""
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if by_accelerate and os.environ.get("OMP_NUM_THREADS") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _prepare_deepspeed(cpu: bool) -> None:
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "this launch asks for DeepSpeed, which is not installed; "
            "pip install 'outrider[deepspeed]' or launch without it"
        ) from None
    if cpu:
        # Its shared-memory kernel would be compiled here, for minutes; gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class Forward(nn.Module):
    """The module that engines wrap: a drafter's training forward, reduced to what they may see.

    Gives the objective, the draft steps' weighted loss sums in one, and the sums [S, 2+K]
    of the S draft steps: plain loss sum, supervised positions, rank counts (float64, detached).
    """

    def __init__(self, drafter: Drafter, precision: str, loss: LossSection) -> None:
        super().__init__()
        self.drafter, self.loss = drafter, loss
        self.autocast = precision == "bf16"

    def forward(self, batch: TrainingBatch, criterion: Criterion) -> tuple[Tensor, Tensor]:
        """Objective and sums of one micro-batch."""
        device = batch.tokens_BT.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.autocast):
            steps = self.drafter(batch, criterion)
        objective = batch.tokens_BT.new_zeros((), dtype=torch.float32)
        rows = []
        for weight, step in zip(self.loss.step_weights(len(steps)), steps, strict=True):
            objective = objective + weight * step.loss_sum
            counts = torch.cat([step.num_positions[None], step.rank_counts_K])
            rows.append(torch.cat([step.plain_sum.detach()[None].double(), counts.double()]))
        return objective, torch.stack(rows)


class Engine:
    """Model and optimizer as accelerate prepared them."""

    def __init__(self, recipe: Recipe, drafter: Drafter) -> None:
        self.recipe, self.drafter = recipe, drafter
        self.accelerator = Accelerator(
            mixed_precision="no",
            log_with=list(recipe.trackers) or None,
            project_config=ProjectConfiguration(
                project_dir=str(recipe.output), logging_dir=str(recipe.output / "logs")
            ),
        )
        if self.accelerator.distributed_type not in SUPPORTED:
            raise UserError(
                f"launched as {self.accelerator.distributed_type.value}; this trainer runs on one "
                "process, DDP, or DeepSpeed ZeRO-2 and ZeRO-3 (configs/accelerate)"
            )
        self._refuse_tied()
        self._fill_deepspeed()
        self.parameter_counts = [p.numel() for p in drafter.parameters()]
        module = Forward(drafter.to(self.device), recipe.precision, recipe.loss)
        self.model, self.optimizer = self.accelerator.prepare(module, self._optimizer())

    def _refuse_tied(self) -> None:
        """A matrix that one step reads both as embedding and as output hangs under ZeRO-3."""
        plugin = self.accelerator.state.deepspeed_plugin
        tied = any(isinstance(module, TiedEmbedding) for module in self.drafter.modules())
        if plugin is not None and plugin.zero_stage == 3 and tied:
            raise UserError(
                f"a drafter of kind {self.drafter.kind!r} with an embedding of its own was given "
                "to ZeRO-3, which cannot share out a matrix that is read twice in a step; share "
                "the target's embedding, or launch with DDP or ZeRO-2"
            )

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return int(self.accelerator.num_processes)

    @property
    def local_processes(self) -> int:
        """How many of them run on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def process(self) -> int:
        """This one's number."""
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return bool(self.accelerator.is_main_process)

    @property
    def sharded(self) -> bool:
        """Whether DeepSpeed holds the optimizer's state in parts."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def backward(self, batch: TrainingBatch, criterion: Criterion, scale: float, last: bool) -> Any:
        """Add a micro-batch's gradients; `scale` is 1 / what the global batch counts.

        Engines average over processes, so the sum is restored here. Gives the sums [S, 2+K].
        """
        apart = not last and not self.sharded
        with self.accelerator.no_sync(self.model) if apart else nullcontext():
            objective, sums = self.model(batch, criterion)
            loss = objective * (scale * self.processes)
            if self.sharded:
                self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=last)
            else:
                loss.backward()
        return sums

    def gradient_norm(self) -> float:
        """The norm before clipping; clips (DeepSpeed has clipped and stepped by now)."""
        parameters = self.model.parameters()
        norm = self.accelerator.clip_grad_norm_(parameters, self.recipe.optimizer.grad_clip)
        return float("nan") if norm is None else float(norm)

    def step(self) -> None:
        """Move the parameters and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        """For the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def learning_rate(self) -> float:
        """As it was set last."""
        return float(self.optimizer.param_groups[0]["lr"])

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        summed: Tensor = self.accelerator.reduce(values.to(self.device), reduction="sum")
        return summed.cpu()

    def tell(self, value: Any) -> Any:
        """The main process's value, on every process."""
        return broadcast_object_list([value])[0] if self.processes > 1 else value

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()

    def whole_state(self) -> dict[str, Tensor]:
        """The drafter's tensors, gathered where they are sharded; a copy in main memory."""
        with self._gathered():
            return {k: v.detach().cpu().clone() for k, v in self.drafter.state_dict().items()}

    def load_whole_state(self, tensors: dict[str, Tensor]) -> None:
        """Put tensors into the drafter (not sharded)."""
        assert not self.sharded
        self.drafter.load_state_dict(tensors)

    def _gathered(self) -> Any:
        if not self.sharded:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.drafter.parameters()))

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the drafter's own parameters; the target's never get here."""
        section = self.recipe.optimizer
        own = [p for p in self.drafter.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in own), "drafters keep float32 parameters"
        if not own:
            raise UserError("this drafter has no parameter to train")
        options = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
        return torch.optim.AdamW(own, fused=True, **options)  # type: ignore[arg-type]

    def _fill_deepspeed(self) -> None:
        """The recipe's figures go into the DeepSpeed config; accumulation is driven from here."""
        if not self.sharded:
            return
        section = self.recipe.optimizer
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = section.micro_batch
        config["gradient_accumulation_steps"] = 1
        config["gradient_clipping"] = section.grad_clip
        config.pop("train_batch_size", None)
