"""Runs one job in vLLM, in an environment that knows nothing of Outrider.

    python -P vllm_runner.py JOB.json RESULT.json

It is run by the Python of vLLM's environment, so it imports nothing of ours. The job:

    {"target": folder or id, "revision": null, "drafter": folder or null, "method": name,
     "num_speculative_tokens": K, "dtype": "float32", "prompts": [[ids]], "stop_token_ids": [ids],
     "max_tokens": 64, "seed": 0, "max_num_seqs": 8, "max_model_len": 2048, "kv_gib": 1,
     "deadline_s": 600}

The result: `outputs` (new token ids a prompt, an end token included), the differences of vLLM's
counters around the generate call (`rounds`, `drafted`, `accepted`, `accepted_per_position`),
`seconds` and `version`. Decoding is greedy. An alarm ends the process at the deadline.

What vLLM 0.32 counts (v1/core/sched/scheduler.py, `update_from_output`): one round each time a
request with scheduled draft tokens comes back from the model; `accepted` is the number of sampled
tokens less one, taken **before** the output is cut at an end token or at `max_tokens`. The prefill
has no drafts and is no round; the last round counts in full. Our loop counts the same way. Where it
would differ, and what is done against it:

- A request whose prompt is cached but for one token is padded with K placeholder drafts, which are
  counted and never accepted; so is a prompt of one token. Prefix caching is off; `check` refuses
  prompts of one token.
- Drafts are cut where prompt, output and drafts reach the context's end, or the step's token
  budget: `check` refuses prompts that come so near, and the budget is never below 2,048.
"""

import json
import os
import signal
import sys
import time
from typing import Any

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def configure_environment(job: dict[str, Any]) -> None:
    """Settings that vLLM reads when it is imported.

    The engine runs in this process; on a CPU its one worker is a child that ends with it. Threads
    are not bound to cores: by default vLLM leaves one core free, half of a machine of two.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job["kv_gib"])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def start_engine(job: dict[str, Any]) -> Any:
    """The engine with the job's target and drafter."""
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    speculation = None
    if job["method"] is not None:
        speculation = {
            "method": job["method"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
        if job["drafter"] is not None:
            speculation["model"] = job["drafter"]
    return LLM(
        model=job["target"],
        revision=job["revision"],
        dtype=job["dtype"],
        seed=job["seed"],
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        speculative_config=speculation,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )


def snapshot(engine: Any) -> dict[str, list[int]]:
    """The speculation counters, each as a list."""
    values: dict[str, list[int]] = {name: [0] for name in COUNTERS}
    values["accepted_per_position"] = [0]
    names = {full: name for name, full in COUNTERS.items()}
    for metric in engine.get_metrics():
        if metric.name in names:
            values[names[metric.name]] = [metric.value]
        elif metric.name == PER_POSITION:
            values["accepted_per_position"] = list(metric.values)
    return values


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Generate for every prompt and count."""
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = start_engine(job)
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    before, start = snapshot(engine), time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds, after = time.perf_counter() - start, snapshot(engine)
    counts = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after
    }
    return {
        "version": vllm.__version__,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        **{name: counts[name][0] for name in COUNTERS},
        "accepted_per_position": counts["accepted_per_position"],
    }


def main(job_path: str, result_path: str) -> None:
    """Read the job, run it, write the result in one move."""
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    signal.alarm(job["deadline_s"])
    configure_environment(job)
    result = run(job)
    with open(result_path + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
