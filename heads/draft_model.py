"""Independent draft models: a small causal LM of the target's own tokens, behind its own cache.

Source: speculative decoding (2211.17192) and its distillation (DistillSpec, 2310.08461). It reads
tokens alone: the state after token t + 1 foretells token t + 2, in training as in drafting.

Shapes: B rows, T positions, R requests, N nodes, L cached and new positions, D student's hidden
size, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from heads.adapters import Lora, adapt, is_adapter, merged, plain_name
from heads.align import own_states
from heads.base import (
    Criterion,
    DraftBudget,
    DrafterConfig,
    DraftState,
    Needs,
    SharedWeights,
    StepLoss,
    TargetIdentity,
    TrainingBatch,
)
from heads.blocks import OutputHead, TiedEmbedding, fill_nan
from heads.cache import TreeCache
from heads.decoder import NodePlan, Plan, UnrolledPlan, spans_of
from heads.errors import UserError
from heads.rounds import MEASURED_STEPS, Step, SteppingDrafter
from heads.students import (
    Student,
    cut_student,
    fields_from,
    load_student,
    names_in,
    new_decoder,
    refuse_undrivable,
    refuse_unfit,
    student_fields,
)
from heads.tree import TokenTree, chain
from heads.vocab import VocabMap
from heads.writing import Writer

PROBE = (1, 0, 2, 1, 3, 0)
"""Tokens at which a student run here must give its own logits."""


class DraftModelConfig(DrafterConfig):
    """`student`: where it comes from. `lora`: adapters are trained, and the student kept.

    `embedding`: `shared` reads the target's own embedding and output matrix, frozen; `own` trains
    a copy. None: shared for a cut student, own for a model from elsewhere, which has its own.
    `transformer`: the student's transformers config, written down when it is made.
    """

    kind: Literal["draft_model"] = "draft_model"
    draft_vocab_size: None = None
    student: Student = Field(default_factory=Student)
    embedding: Literal["shared", "own"] | None = None
    lora: Lora | None = None
    transformer: dict[str, Any] | None = None

    @property
    def shares(self) -> bool:
        """Whether embedding and output matrix are the target's."""
        if self.embedding == "shared" and self.student.model is not None:
            raise UserError(
                "drafter.embedding is 'shared' and drafter.student.model is a model with an "
                "embedding of its own; drop one of them"
            )
        return self.embedding != "own" and self.student.model is None


class DraftModel(SteppingDrafter):
    """A decoder of transformers' own with planned attention, and an output matrix."""

    kind = "draft_model"
    Config = DraftModelConfig
    reduces_vocab = False
    can_write = True

    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, target: TargetIdentity) -> None:
        super().__init__()
        fields = config.transformer or fields_from(config.student, target)
        self.config = config.model_copy(update={"transformer": fields})
        self.vocab_size = target.vocab_size
        self.decoder = new_decoder(fields)
        own, size = self.decoder.config, self.decoder.get_input_embeddings().weight.shape[1]
        self.num_layers, self.max_positions = own.num_hidden_layers, own.max_position_embeddings
        self.tied = bool(fields.get("tie_word_embeddings"))
        self.decoder.set_input_embeddings(
            None if config.shares else TiedEmbedding(target.vocab_size, size)
        )
        if not (config.shares or self.tied):
            self.lm_head = OutputHead(size, target.vocab_size)
        if config.lora is not None:
            self.requires_grad_(False)
            adapt(self.decoder, config.lora)

    @classmethod
    def create(
        cls,
        config: Any,
        target: TargetIdentity,
        shared: SharedWeights,
        vocab: VocabMap | None = None,
    ) -> "DraftModel":
        """Cut from the target, or read from a folder or hub id and checked against it."""
        assert shared.model is not None, "a draft model is made from a whole target"
        student: Student = config.student
        if student.model is None:
            model = cut_student(student, target, shared.model)
        else:
            model = load_student(student.model)
            refuse_unfit(student.model, model, target, shared)
        drafter = cls.holding(model, config, target)
        drafter.bind(shared)
        return drafter

    @classmethod
    def holding(cls, model: Any, config: Any, target: TargetIdentity) -> "DraftModel":
        """A drafter with the tensors of a causal LM, which it is bound to for now.

        Raises UserError for a model that cannot be driven here.
        """
        refuse_undrivable(model)
        fields = student_fields(model.config.get_text_config())
        drafter = cls(config.model_copy(update={"transformer": fields}), target)
        tensors = {f"decoder.{k}": v for k, v in model.get_decoder().state_dict().items()}
        tensors["lm_head.weight"] = model.get_output_embeddings().weight
        with torch.no_grad():
            for name, tensor in drafter.state_dict().items():
                if not is_adapter(name):
                    tensor.copy_(tensors[plain_name(name)])
        embed_VD = model.get_input_embeddings().weight.detach()
        drafter.bind(SharedWeights(tensors["lm_head.weight"].detach(), embed_VD))
        drafter._refuse_unlike(model.eval())
        return drafter

    @classmethod
    def blank(cls, config: Any, target: TargetIdentity) -> "DraftModel":
        """All NaN, to be filled from a checkpoint."""
        drafter = cls(config, target)
        fill_nan(drafter)
        return drafter

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftModel":
        """A cast spares what is computed and not saved: the rotary frequencies stay float32."""
        saved = self.state_dict().keys()
        spared = {name: value for name, value in self.named_buffers() if name not in saved}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in spared.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, last, value.to(getattr(module, last).device))
        return self

    def ordinary(self, shared: SharedWeights) -> dict[str, Tensor]:
        """Its tensors as transformers names them in a folder; adapters are merged."""
        assert self.config.transformer is not None
        names, _ = names_in(self.config.transformer)
        own = merged(self.state_dict(), self.config.lora)
        found = {
            f"{names.decoder}{name.removeprefix('decoder.')}": tensor
            for name, tensor in own.items()
            if name.startswith("decoder.")
        }
        if self.config.shares:
            found[names.embed] = shared.embed_VD
        if names.head is not None:
            found[names.head] = shared.lm_head_VD if self.config.shares else own["lm_head.weight"]
        return found

    @property
    def needs(self) -> Needs:
        """Nothing: it reads tokens."""
        return Needs()

    @property
    def trained_steps(self) -> int:
        """One: its states hang on the text alone, whoever wrote it."""
        return 1

    def contract_fields(self) -> dict[str, Any]:
        """Its rope; it goes on from its own tokens, never from states."""
        assert self.config.transformer is not None
        return super().contract_fields() | {
            "rope": dict(self.config.transformer.get("rope_parameters") or {}),
            "recurrence": "none: a language model of its own",
        }

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] in the dtype of the layers, whose sums keep it."""
        if self.config.shares:
            assert self.shared is not None, "bind the drafter to its target first"
            embeds = F.embedding(tokens, self.shared.embed_VD)
        else:
            embeds = self.decoder.get_input_embeddings()(tokens)
        return embeds.to(next(self.decoder.parameters()).dtype)

    def with_matrix(self, output: Tensor, apply: Any) -> Any:
        """The target's output matrix or its own."""
        if self.config.shares:
            assert self.shared is not None, "bind the drafter to its target first"
            return apply(output, self.shared.lm_head_VD)
        return (self.decoder.get_input_embeddings() if self.tied else self.lm_head)(output, apply)

    def states(self, tokens_BT: Tensor, positions_BT: Tensor, plans: Sequence[Plan]) -> Tensor:
        """States [B, T, D] after the final norm."""
        found: Tensor = self.decoder(
            inputs_embeds=self.embed(tokens_BT),
            position_ids=positions_BT,
            plans=plans,
            use_cache=False,
        ).last_hidden_state
        return found

    def forward(self, batch: TrainingBatch, criterion: Criterion) -> list[StepLoss]:
        """One StepLoss; in eval mode it stands for every depth of a draft.

        Behind true tokens its states are the same at every depth, and so is its accuracy.
        """
        spans = spans_of(batch.segments_BT)
        plans = [UnrolledPlan(spans) for _ in range(self.num_layers)]
        states_BTD = own_states(self.states(batch.tokens_BT, batch.positions_BT, plans))
        features = states_BTD if self.config.student.model is None else None
        loss = partial(criterion, step=0, features_BTD=features)
        found: StepLoss = self.with_matrix(states_BTD, loss)
        return [found] if self.training else [found] * MEASURED_STEPS

    def writer(self, end_tokens: frozenset[int]) -> Writer:
        """Itself as a writer, where it stands."""
        return Writer(self, end_tokens, next(self.decoder.parameters()).device)

    def propose_batch(self, states: Sequence[DraftState], budget: DraftBudget) -> list[TokenTree]:
        """Trees, the roots alone where the student's own context would end."""
        longest = max(len(state.tokens) for state in states)
        if longest + budget.shape.depth > self.max_positions:
            return [TokenTree(chain(0), torch.tensor(state.tokens[-1:])) for state in states]
        return super().propose_batch(states, budget)

    def absorb(self, states: Sequence[DraftState]) -> Step:
        """Run what was committed since, the root included."""
        tokens: list[int] = []
        positions: list[int] = []
        counts = []
        for state in states:
            end = len(state.tokens)
            base = min(state.memory.length, end - 1)
            state.memory.commit(base, [])
            tokens += state.tokens[base:]
            positions += range(base, end)
            counts.append(end - base)
        memories = [state.memory for state in states]
        none = torch.empty(len(tokens), 0)
        visible: list[Tensor | None] = [None] * len(states)
        done = self.nodes_step(tokens, none, positions, memories, counts, visible, depth=0)
        last = torch.tensor(counts).cumsum(0) - 1
        return Step(done.output[last], done.state[last])

    def nodes_step(
        self,
        tokens: Sequence[int] | Tensor,
        states_ND: Tensor,
        positions: Sequence[int],
        memories: Sequence[TreeCache],
        counts: Sequence[int],
        visible: Sequence[Tensor | None],
        depth: int,
    ) -> Step:
        """One forward over the nodes of several requests; no state is handed on but the cache's."""
        device = next(self.decoder.parameters()).device
        plans = [
            NodePlan([memory.tree_layers[layer] for memory in memories], counts, visible)
            for layer in range(self.num_layers)
        ]
        tokens_1N = torch.as_tensor(tokens, device=device)[None]
        positions_1N = torch.tensor([list(positions)], device=device)
        states_ND = self.states(tokens_1N, positions_1N, plans)[0]
        return Step(states_ND, states_ND)

    def _refuse_unlike(self, model: Any) -> None:
        """Raise UserError unless it gives the model's own logits here."""
        tokens_1T = torch.tensor([PROBE]) % self.vocab_size
        plans = [UnrolledPlan([(0, 0, len(PROBE))]) for _ in range(self.num_layers)]
        places_1T = torch.arange(len(PROBE))[None]
        try:
            with torch.no_grad():
                ours = self.logits(self.states(tokens_1T, places_1T, plans))
                theirs = model(input_ids=tokens_1T, use_cache=False).logits
        except (TypeError, AttributeError) as error:
            ours, theirs = torch.zeros(1), torch.full((1,), float("nan"))
            reason = f" ({error})"
        else:
            reason = ""
        if not torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2):
            raise UserError(
                f"a student of type {model.config.model_type} computes its logits in a way that "
                f"is not followed here{reason}: its layers, embedding or output have more than "
                "attention, MLP and a matrix; take a student of another type"
            )
