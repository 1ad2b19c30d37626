"""The target: the only code that touches a causal LM.

Shapes: B rows, T positions, N new nodes, L cache length after the forward, D hidden size,
A captured layers, V vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from heads.base import Needs, SharedWeights, TargetIdentity, native_prefixes
from heads.cache import TreeCache
from heads.decoder import decoder_fields
from heads.errors import UserError
from heads.files import quiet_transformers
from heads.tree import TokenTree, TreeShape
from infer.embedded import embedded_target

DType = Literal["float32", "bfloat16"]
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class TargetStates:
    """One forward's result: `hidden_BND` after the final norm, `captured_BNAD` or None."""

    hidden_BND: Tensor
    captured_BNAD: Tensor | None


class TargetModel:
    """A frozen causal LM with tree attention, captured layers and an exact cache.

    Raises UserError when the model cannot be driven this way (no causal LM, sliding-window
    attention, logits that are not `lm_head(hidden)`).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str | None = None,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer: Any = tokenizer
        self.name, self.revision = name, revision
        self.config: Any = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.lm_head: Any = self.model.get_output_embeddings()
        self._refuse_unsupported()
        self.identity = identify(self)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: DType = "bfloat16",
        device: str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "TargetModel":
        """A target by name: `demo` (the embedded one), a local folder, or a Hugging Face id."""
        source = resolve(name)
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        with quiet_transformers():
            try:
                config = AutoConfig.from_pretrained(source, **options)
                tokenizer = AutoTokenizer.from_pretrained(source, **options)
                model, loading = AutoModelForCausalLM.from_pretrained(
                    source,
                    config=config,
                    dtype=getattr(torch, dtype),
                    attn_implementation="sdpa",
                    output_loading_info=True,
                    **options,
                )
            except LOADING_ERRORS as error:
                raise UserError(_load_message(name, error)) from error
        _refuse_partial(name, loading)
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"device {device!r} cannot be used: {reason}; expected cpu, or cuda "
                "where there is one"
            ) from None
        return cls(model, tokenizer, name, revision)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.lm_head.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        dtype: torch.dtype = self.lm_head.weight.dtype
        return dtype

    @property
    def max_positions(self) -> int:
        """The context length."""
        return int(self.config.max_position_embeddings)

    @cached_property
    def shared(self) -> SharedWeights:
        """The frozen tensors that drafters read: the same objects each time, so casts are kept."""
        embed_VD = self.model.get_input_embeddings().weight.detach()
        return SharedWeights(
            self.lm_head.weight.detach(), embed_VD, self._final_norm(), self.model, self.tokenizer
        )

    @torch.no_grad()
    def _final_norm(self) -> Tensor | None:
        """The scale of the final norm, whatever its class makes of its weight: that of ones."""
        norm = getattr(self.decoder, "norm", None)
        ones_D = torch.ones(self.config.hidden_size, device=self.device, dtype=self.dtype)
        return None if norm is None else norm(ones_D)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a response: the generation config's and the tokenizer's."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        own = self.tokenizer.eos_token_id
        return frozenset(ids + ([own] if own is not None else []))

    def new_cache(self, capacity: int = 512) -> TreeCache:
        """An empty cache with room for `capacity` positions before it has to grow."""
        return TreeCache(self.config.num_hidden_layers, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens_BN: Tensor,
        cache: TreeCache | None = None,
        *,
        positions_BN: Tensor | None = None,
        visible_BNL: Tensor | None = None,
        needs: Needs | None = None,
    ) -> TargetStates:
        """Process new tokens behind the cache.

        `visible_BNL` (bool; B may be 1) says which of the L = cached + N positions each new one
        attends to; None is plain causal attention. `positions_BN` default to cached + 0..N-1.
        """
        base = 0 if cache is None else cache.length
        num = tokens_BN.shape[1]
        if positions_BN is None:
            positions_BN = torch.arange(base, base + num, device=tokens_BN.device)[None]
        if visible_BNL is None and base and num > 1:
            visible_BNL = causal(base, num, tokens_BN.device)
        captured: dict[int, Tensor] = {}
        layers = needs.captured_layers if needs else ()
        with self._capture(layers, captured):
            hidden = self.decoder(
                input_ids=tokens_BN,
                position_ids=positions_BN.expand(tokens_BN.shape[0], -1),
                attention_mask=None
                if visible_BNL is None
                else additive(visible_BNL, self.dtype)[:, None],
                cache=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        stacked = torch.stack([captured[k] for k in layers], dim=2) if layers else None
        return TargetStates(hidden, stacked)

    def forward_tree(
        self, tree: TokenTree, cache: TreeCache, needs: Needs | None = None
    ) -> TargetStates:
        """Process a tree behind the cache: positions from the depths, each node sees its ancestors.

        The cache then holds every node; `cache.commit` keeps the accepted path.
        """
        base, shape = cache.length, tree.shape
        positions_1N = torch.tensor([shape.depths], device=self.device) + base
        return self.forward(
            tree.tokens_N[None].to(self.device),
            cache,
            positions_BN=positions_1N,
            visible_BNL=tree_visibility(shape, base, self.device) if len(shape) > 1 else None,
            needs=needs,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of post-norm states [..., D]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    @contextmanager
    def _capture(self, layers: tuple[int, ...], into: dict[int, Tensor]) -> Iterator[None]:
        """Hooks that record the residual stream after k layers, for each k in `layers`."""

        def recorder(k: int) -> Callable[..., None]:
            def record(module: nn.Module, inputs: Any, output: Any) -> None:
                into[k] = output[0] if isinstance(output, tuple) else output

            return record

        handles = [self.decoder.layers[k - 1].register_forward_hook(recorder(k)) for k in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_unsupported(self) -> None:
        window = getattr(self.config, "sliding_window", None)
        default = ["sliding_attention" if window else "full_attention"]
        kinds = set(getattr(self.config, "layer_types", None) or default)
        if kinds != {"full_attention"}:
            raise UserError(
                f"target {self.name} has layers of type {', '.join(sorted(kinds))} "
                "with a sliding window or a recurrent state; only full attention can be verified "
                "as a tree here"
            )
        if self.lm_head is None or not hasattr(self.decoder, "layers"):
            raise UserError(
                f"target {self.name} is not a decoder with an output head; give a causal LM"
            )
        probe = torch.tensor([[1, 0]], device=self.device)
        with torch.no_grad():
            full = self.model(input_ids=probe, use_cache=False).logits
            ours = self.logits(self.forward(probe).hidden_BND)
        if not torch.allclose(full.float(), ours.float(), atol=1e-2, rtol=1e-2):
            raise UserError(
                f"target {self.name} changes its logits after lm_head (soft cap or scale); "
                "such targets are not supported"
            )


def causal(base: int, num: int, device: torch.device) -> Tensor:
    """Visibility [1, num, base + num] of `num` new positions behind `base`: everything before."""
    return torch.ones(num, base + num, dtype=torch.bool, device=device).tril(base)[None]


def tree_visibility(shape: TreeShape, base: int, device: torch.device) -> Tensor:
    """Visibility [1, N, base + N]: all that is committed, and of the tree one's own ancestors."""
    ones = torch.ones(len(shape), base, dtype=torch.bool)
    return torch.cat([ones, shape.ancestors_NN], dim=1)[None].to(device)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to attention scores: 0 where visible, the lowest number elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def resolve(name: str) -> str:
    """Where a target's files are: the embedded one's folder for `demo`, else the name itself."""
    return str(embedded_target()) if name == "demo" else name


def identify(target: TargetModel) -> TargetIdentity:
    """The target's identity for contracts."""
    config = target.config
    volatile = {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "_attn_implementation_autoset",
    }
    fields = {k: v for k, v in config.to_dict().items() if k not in volatile}
    tokenizer = target.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items())
    return TargetIdentity(
        name=target.name,
        revision=target.revision,
        config_hash=digest(json.dumps(fields, sort_keys=True, default=str)),
        weights_hash=_weights_digest(target),
        tokenizer_hash=digest(
            json.dumps([vocabulary, sorted(map(str, tokenizer.all_special_tokens))])
        ),
        template_hash=digest(str(tokenizer.chat_template or "")),
        model_type=config.model_type,
        vocab_size=target.lm_head.weight.shape[0],
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        dtype=str(target.dtype).removeprefix("torch."),
        decoder=decoder_fields(config),
    )


def digest(text: str | bytes) -> str:
    """The first 16 hex digits of the sha256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def _weights_digest(target: TargetModel) -> str:
    """A digest of a sample of every tensor, in bfloat16 so that it does not depend on the dtype."""
    parts = []
    for _, tensor in sorted(target.model.named_parameters()):
        flat = tensor.detach().flatten()
        parts.append(flat[:: max(1, len(flat) // 16)][:16].to(torch.bfloat16).float().cpu())
    return digest(torch.cat(parts).numpy().tobytes())


def _refuse_partial(name: str, loading: dict[str, Any]) -> None:
    """A model whose file holds other tensors than its config asks for would run on random ones.

    Those of a drafter that it was born with are no part of it.
    """
    own = native_prefixes()
    missing = sorted(loading["missing_keys"])
    extra = sorted(key for key in loading["unexpected_keys"] if not key.startswith(own))
    if missing or extra:
        raise UserError(
            f"target {name!r}: its weights do not fit its config: "
            f"{len(missing)} tensors missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(extra)} unexpected ({', '.join(extra[:3]) or 'none'}); "
            "look at num_hidden_layers and the like in config.json, or fetch the model again"
        )


def _load_message(name: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kind = "folder" if Path(name).exists() else "folder here or id on the model hub"
    return (
        f"target {name!r} could not be loaded as a causal LM ({kind}): {reason}; "
        "expected 'demo', a local folder with config, safetensors and tokenizer, "
        "or a Hugging Face id"
    )
