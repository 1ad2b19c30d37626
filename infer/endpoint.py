"""A running vLLM server: prompts over its OpenAI-compatible interface, counts from its metrics."""

import importlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from heads.errors import UserError
from infer.engines import EngineJob, EngineRun

DRAFTS = "vllm:spec_decode_num_drafts_total"
COUNTERS = {
    "rounds": DRAFTS,
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class ServerCounts:
    """A server's counters at one moment (or the difference of two)."""

    rounds: int
    drafted: int
    accepted: int
    tokens: int
    accepted_per_position: tuple[int, ...]

    def since(self, earlier: "ServerCounts") -> "ServerCounts":
        """What was added since."""
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return ServerCounts(
            rounds=self.rounds - earlier.rounds,
            drafted=self.drafted - earlier.drafted,
            accepted=self.accepted - earlier.accepted,
            tokens=self.tokens - earlier.tokens,
            accepted_per_position=tuple(now - then for now, then in pairs),
        )


class VllmServer:
    """A running vLLM server that serves the target with the exported drafter.

    Raises UserError when it cannot be reached, is no vLLM, or has no speculation configured.
    """

    def __init__(self, url: str, timeout_s: int = 600) -> None:
        self.url = re.sub(r"/v1$", "", url.rstrip("/"))
        self.timeout_s = timeout_s
        try:
            served = json.loads(self._get("/v1/models"))["data"][0]
            self.model, self.max_model_len = str(served["id"]), int(served["max_model_len"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url}/v1/models lists no model with its max_model_len; give the address of "
                "a vLLM server, such as http://127.0.0.1:8000"
            ) from None
        self.num_speculative_tokens = len(self.counts().accepted_per_position)

    def depth(self, asked: int | None, deepest: int) -> int:
        """The server's K, which nobody can change from here."""
        own = self.num_speculative_tokens
        if asked is not None and asked != own:
            raise UserError(
                f"{asked} draft tokens a round were asked for, and {self.url} was started with "
                f"num_speculative_tokens {own}; ask for {own} or start the server with {asked}"
            )
        return own

    def run(self, job: EngineJob) -> EngineRun:
        """Send every prompt, a few at a time, and take the counters' differences."""
        before, start = self.counts(), time.perf_counter()
        with ThreadPoolExecutor(job.max_num_seqs) as pool:
            outputs = list(pool.map(lambda prompt: self._complete(prompt, job), job.prompts))
        seconds, tokens = time.perf_counter() - start, sum(map(len, outputs))
        counts = self._settled(before, tokens)
        if counts.tokens != tokens:
            raise UserError(
                f"{self.url} generated {counts.tokens} tokens while we received {tokens}: other "
                "requests run there, and its counters mix them with ours; check a quiet server"
            )
        return EngineRun(
            engine=f"vLLM at {self.url}",
            outputs=outputs,
            rounds=counts.rounds,
            drafted=counts.drafted,
            accepted=counts.accepted,
            accepted_per_position=list(counts.accepted_per_position),
            seconds=seconds,
        )

    def counts(self) -> ServerCounts:
        """The server's counters now, summed over its engines."""
        samples = list(_samples(self._get("/metrics")))
        found = {name for name, _, _ in samples}
        if DRAFTS not in found:
            own = any(name.startswith("vllm:") for name in found)
            raise UserError(
                f"{self.url}/metrics has no {DRAFTS}: "
                + (
                    "this vLLM was started without a speculative config"
                    if own
                    else "no vLLM server"
                )
                + "; start vLLM with the exported folder in --speculative-config"
            )
        per_position: dict[int, float] = {}
        for name, labels, value in samples:
            if name == PER_POSITION:
                position = int(labels["position"])
                per_position[position] = per_position.get(position, 0) + value
        sums = {
            key: int(sum(value for name, _, value in samples if name == full))
            for key, full in COUNTERS.items()
        }
        ordered = tuple(int(per_position[position]) for position in sorted(per_position))
        return ServerCounts(**sums, accepted_per_position=ordered)

    def _settled(self, before: ServerCounts, tokens: int, patience_s: float = 10) -> ServerCounts:
        """The difference once all our tokens are counted: the server counts after it answers."""
        end = time.monotonic() + patience_s
        last, now = None, self.counts()
        while time.monotonic() < end and (now.since(before).tokens < tokens or now != last):
            time.sleep(0.3)
            last, now = now, self.counts()
        return now.since(before)

    def _complete(self, prompt: Sequence[int], job: EngineJob) -> list[int]:
        """New token ids of one prompt. The salt keeps the prompt out of the prefix cache.

        A prompt that is cached but for one token is padded with placeholder drafts, which count.
        Penalties are named because a server takes its defaults from the model's folder.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": job.max_new_tokens,
            "temperature": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "seed": job.seed,
            "stop_token_ids": list(job.stop_token_ids),
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        }
        answer = self._request("POST", "/v1/completions", body)
        try:
            return [int(token) for token in json.loads(answer)["choices"][0]["token_ids"]]
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url}/v1/completions gave no token ids; expected vLLM 0.10.2 or newer"
            ) from None

    def _get(self, path: str) -> str:
        return self._request("GET", path)

    def _request(self, verb: str, path: str, body: object = None) -> str:
        httpx = _serving_package("httpx")
        try:
            answer = httpx.request(verb, self.url + path, json=body, timeout=self.timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"{self.url} cannot be reached ({error}); start the server there or correct "
                "--endpoint, such as http://127.0.0.1:8000"
            ) from None
        if answer.status_code != 200:
            raise UserError(
                f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}; "
                "expected a vLLM server with completions and metrics"
            )
        return str(answer.text)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample in Prometheus' text form."""
    parser = _serving_package("prometheus_client.parser")
    try:
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise UserError(f"/metrics is not in Prometheus' text form: {error}") from None


def _serving_package(name: str) -> Any:
    """A package of the extra `serving`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"checking a running server needs {name.partition('.')[0]}; "
            "install it with pip install 'outrider[serving]'"
        ) from None
