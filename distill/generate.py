"""Batched generation in the same process: what a model itself writes after each prompt.

Shapes: B rows, T prompt positions, M new positions, L cache length, A attempts, V vocabulary.

The layout of a batch with prompts [p, q, a] and [p, q, b, c, d] (`_` is padding):

    shared prefix, once for all    rest, left-padded     generated
    p q                            _ _ a                 x y z
    p q                            b c d                 u v w
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from heads.cache import TreeCache
from infer.sampling import Sampling, draw

# Tokens a forward of the prefill: larger pieces fall out of the processor's caches.
CHUNK_TOKENS = {"cpu": 1024, "cuda": 16384}
# A batch is compacted when this share of its rows or less is still being written.
COMPACT_AT = 0.75
# Draws against the nucleus before the exact way that sorts.
ATTEMPTS = 8
BLOCK = 256
# Rows that tokens are drawn for at once: more need memory that has to be fetched anew each step.
DRAW_ROWS = 64


class States(Protocol):
    """One forward's result."""

    @property
    def hidden_BND(self) -> Tensor:
        """States after the final norm."""
        ...


class Writer(Protocol):
    """What writes: a target (`infer.target.TargetModel`), or a drafter (`heads.writing.Writer`)."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def max_positions(self) -> int:
        """The context length."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a response."""
        ...

    def new_cache(self, capacity: int = 512) -> TreeCache:
        """An empty cache."""
        ...

    def forward(
        self,
        tokens_BN: Tensor,
        cache: TreeCache,
        *,
        positions_BN: Tensor | None = None,
        visible_BNL: Tensor | None = None,
    ) -> States:
        """Process new tokens behind the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of states [..., D]."""
        ...


def batched_generate(
    target: Writer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    max_length: int | None = None,
) -> list[list[int]]:
    """What the target, or a drafter, writes after each prompt, with the end token if it got there.

    A row's randomness is its seed's alone. A row stops at an end token, after `max_new_tokens`, or
    when it is `max_length` (or the target's context) long, its prompt included. Prompts must not
    be empty and must be shorter than that.
    """
    if not prompts:
        return []
    longest = min(max_length or target.max_positions, target.max_positions)
    batch = _prefill(target, prompts, max_new_tokens)
    uniforms_BMA = _uniforms(seeds, max_new_tokens, sampling).to(target.device)
    ends = torch.tensor(sorted(target.end_tokens) or [-1], device=target.device)
    written_BM = torch.full((len(prompts), max_new_tokens), -1, device=target.device)
    for step in range(max_new_tokens):
        uniforms_BA = uniforms_BMA[batch.rows_B, step]
        tokens_B = choose(target.logits(batch.hidden_BD), sampling, uniforms_BA)
        written_BM[batch.rows_B, step] = torch.where(batch.open_B, tokens_B, -1)
        ended_B = torch.isin(tokens_B, ends) | (batch.lengths_B + step + 1 >= longest)
        batch.open_B &= ~ended_B
        num_open = int(batch.open_B.sum())
        if not num_open or step + 1 == max_new_tokens:
            break
        if num_open <= COMPACT_AT * len(tokens_B):
            tokens_B = tokens_B[batch.open_B]
            batch.compact()
        batch.advance(target, tokens_B, step)
    return [[token for token in row if token >= 0] for row in written_BM.tolist()]


@dataclass
class _Batch:
    """The rows still being written, as the target sees them."""

    cache: TreeCache
    hidden_BD: Tensor
    visible_BL: Tensor  # over the cache's whole capacity: false on padding
    lengths_B: Tensor  # prompt lengths
    rows_B: Tensor  # which prompts these are
    open_B: Tensor  # false once a row has ended

    def compact(self) -> None:
        """Keep the open rows only."""
        keep = self.open_B.nonzero()[:, 0]
        self.cache.select_rows(keep)
        self.visible_BL, self.lengths_B = self.visible_BL[keep], self.lengths_B[keep]
        self.rows_B, self.open_B = self.rows_B[keep], self.open_B[keep]

    def advance(self, target: Writer, tokens_B: Tensor, step: int) -> None:
        """Process each row's newest token, written at `step`."""
        end = self.cache.length + 1
        # A row that has ended lingers until the next compaction, within the context.
        positions_B = (self.lengths_B + step).clamp(max=target.max_positions - 1)
        states = target.forward(
            tokens_B[:, None],
            self.cache,
            positions_BN=positions_B[:, None],
            visible_BNL=self.visible_BL[:, None, :end],
        )
        self.hidden_BD = states.hidden_BND[:, -1]


def _prefill(target: Writer, prompts: Sequence[Sequence[int]], max_new: int) -> _Batch:
    """Process the prompts: what they share once, the rest left-padded and in pieces."""
    device, num_rows = target.device, len(prompts)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    shared, longest = _shared_prefix(prompts), max(map(len, prompts))
    cache = target.new_cache(longest + max_new)
    if shared:
        target.forward(torch.tensor([list(prompts[0][:shared])], device=device), cache)
        cache.select_rows(torch.zeros(num_rows, dtype=torch.long, device=device))
    padding_B = longest - lengths_B
    places_L = torch.arange(longest + max_new, device=device)
    visible_BL = (places_L < shared) | (places_L >= shared + padding_B[:, None])
    tokens_BT = torch.zeros(num_rows, longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, longest - len(prompt) + shared :] = torch.tensor(list(prompt[shared:]))
    width = max(1, CHUNK_TOKENS.get(device.type, 4096) // num_rows)
    for start in range(shared, longest, width):
        end = min(start + width, longest)
        places_N = places_L[start:end]
        states = target.forward(
            tokens_BT[:, start:end],
            cache,
            positions_BN=(places_N - padding_B[:, None]).clamp(min=0),
            visible_BNL=_visible(visible_BL[:, :end], places_N),
        )
    return _Batch(
        cache=cache,
        hidden_BD=states.hidden_BND[:, -1],
        visible_BL=visible_BL,
        lengths_B=lengths_B,
        rows_B=torch.arange(num_rows, device=device),
        open_B=torch.ones(num_rows, dtype=torch.bool, device=device),
    )


def _visible(visible_BL: Tensor, places_N: Tensor) -> Tensor:
    """Visibility [B, N, L] of the new places: what is no padding, up to oneself.

    Padding sees itself, so that its softmax has something to sum over.
    """
    places_L = torch.arange(visible_BL.shape[1], device=visible_BL.device)
    before_NL = places_L <= places_N[:, None]
    itself_NL = places_L == places_N[:, None]
    return visible_BL[:, None] & before_NL | itself_NL


def _shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share, short of the shortest one's last."""
    most = min(map(len, prompts)) - 1
    first = prompts[0]
    for index in range(most):
        if any(prompt[index] != first[index] for prompt in prompts):
            return index
    return most


def _uniforms(seeds: Sequence[int], num_steps: int, sampling: Sampling) -> Tensor:
    """Random numbers [B, M, A] in [0, 1), row by row from its own seed."""
    num_draws = 0 if sampling.greedy else 1 if sampling.top_p == 1 else ATTEMPTS + 1
    rows = [np.random.default_rng(seed).random((num_steps, num_draws)) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def choose(logits_BV: Tensor, sampling: Sampling, uniforms_BA: Tensor) -> Tensor:
    """Token ids [B] with the probabilities of `sampling.probs`, without sorting the vocabulary.

    For top-p a token is drawn from all, and drawn anew while it lies outside the nucleus: what is
    left has the truncated distribution. A row still outside after all attempts (a small top_p) is
    drawn from the sorted distribution with its last random number.
    """
    if logits_BV.shape[0] > DRAW_ROWS:
        parts = [slice(i, i + DRAW_ROWS) for i in range(0, len(logits_BV), DRAW_ROWS)]
        return torch.cat([choose(logits_BV[p], sampling, uniforms_BA[p]) for p in parts])
    if sampling.greedy:
        return logits_BV.float().argmax(-1)  # several times faster than in bfloat16 on a CPU
    weights_BV = _weights(logits_BV, sampling)
    tokens_B = _draw(weights_BV, uniforms_BA[:, 0])
    if sampling.top_p == 1:
        return tokens_B
    outside = _outside(weights_BV, tokens_B, sampling.top_p).nonzero()[:, 0]
    for attempt in range(1, ATTEMPTS):
        if not len(outside):
            return tokens_B
        weights_RV = weights_BV[outside]
        drawn_R = _draw(weights_RV, uniforms_BA[outside, attempt])
        tokens_B[outside] = drawn_R
        outside = outside[_outside(weights_RV, drawn_R, sampling.top_p)]
    if len(outside):
        probs_RV = sampling.probs(logits_BV[outside])
        tokens_B[outside] = draw(probs_RV, uniforms_BA[outside, ATTEMPTS])
    return tokens_B


def _weights(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Unnormalised float32 probabilities [B, V] before top-p; the largest is 1.

    In place: the time goes into fresh memory, not into the arithmetic.
    """
    scaled_BV = logits_BV.to(torch.float32, copy=True).div_(sampling.temperature)
    if 0 < sampling.top_k < scaled_BV.shape[-1]:
        kth_B1 = scaled_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled_BV.masked_fill_(scaled_BV < kth_B1, float("-inf"))
    return scaled_BV.sub_(scaled_BV.amax(-1, keepdim=True)).exp_()


def _outside(weights_BV: Tensor, tokens_B: Tensor, top_p: float) -> Tensor:
    """Whether [B] the tokens that come before each row's token hold `top_p` of the mass or more.

    Before it are the more likely ones, and the equally likely ones of a lower id.
    """
    own_B1 = weights_BV.gather(1, tokens_B[:, None])
    limit_B = top_p * weights_BV.sum(-1)
    before_B = torch.where(weights_BV >= own_B1, weights_BV, 0.0).sum(-1) - own_B1[:, 0]
    outside_B = before_B >= limit_B
    # Only where it matters: equally likely tokens of a higher id come after it.
    near = outside_B.nonzero()[:, 0]
    ids_V = torch.arange(weights_BV.shape[1], device=weights_BV.device)
    after_RV = (weights_BV[near] == own_B1[near]) & (ids_V > tokens_B[near, None])
    before_R = before_B[near] - after_RV.sum(-1) * own_B1[near, 0]
    outside_B[near] = before_R >= limit_B[near]
    return outside_B


def _draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Token ids [B] by inverse transform: the block that the number falls into, then the token."""
    num_rows, size = weights_BV.shape
    if size % BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, -size % BLOCK))
    blocks = weights_BV.view(num_rows, -1, BLOCK)
    sums_BK = blocks.sum(-1).double()
    block_B, rest_B = _search(sums_BK, uniform_B.double() * sums_BK.sum(-1))
    inner_BK = blocks[torch.arange(num_rows, device=block_B.device), block_B].double()
    token_B, _ = _search(inner_BK, rest_B)
    return block_B * BLOCK + token_B


def _search(weights_BK: Tensor, threshold_B: Tensor) -> tuple[Tensor, Tensor]:
    """Where [B] the running sum passes the threshold, and what of it is left there.

    Rounding may leave a threshold above the sum: the last entry above zero is meant then.
    """
    running_BK = weights_BK.cumsum(-1)
    index_B = torch.searchsorted(running_BK, threshold_B[:, None], right=True)[:, 0]
    last_B = weights_BK.shape[1] - 1 - (weights_BK > 0).byte().flip(-1).argmax(-1)
    index_B = torch.minimum(index_B, last_B)
    before_B = (running_BK - weights_BK).gather(1, index_B[:, None])[:, 0]
    return index_B, threshold_B - before_B
