"""Runs one workload with a public engine, in whatever Python has that: PYTHON peer_driver.py

A program of its own that imports nothing of cbatch, started by `cbatch bench --against`. It reads one JSON object from
standard input, the task, and writes one to standard output, the outcome; whatever the libraries print goes to standard
error. It ends when standard input is closed, so that it never outlives whoever started it.

Task: peer, model, revision (null: the main one), dtype, device, trust_remote_code, max_requests, max_batch_tokens
(null: the engine's own), longest (tokens of the longest row, its output included), rows of [token ids, number of tokens
to generate]; greedy, no row ends early. Outcome: token_times (for each row the seconds, from the start, of every
token), load_s, peak_rss_bytes, peak_device_bytes, version, settings; or error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, TextIO

Task = dict[str, Any]
Rows = list[tuple[list[int], int]]
WARM_UP_ROWS = 4
WARM_UP_PROMPT = 64  # tokens
WARM_UP_TOKENS = 8
STATIC_BATCH = 32  # rows that generate() gets at a time, where the task does not say
VLLM_REQUESTS = 128
VLLM_BATCH_TOKENS = 4096
POLL_S = 1.0


def claim_stdout() -> TextIO:
    """Give the standard output that this process was started with, and send what anybody prints to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def read_task() -> Task:
    """Read the task, and end this process once the sender is gone."""
    line = sys.stdin.readline()

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    task: Task = json.loads(line)
    return task


def answer(stream: TextIO, outcome: dict[str, Any]) -> None:
    """Send the outcome, times in microseconds' precision."""
    if "token_times" in outcome:
        outcome["token_times"] = [[round(t, 6) for t in times] for times in outcome["token_times"]]
    stream.write(json.dumps(outcome) + "\n")
    stream.close()


def warm_up_rows(vocab_size: int, longest: int) -> Rows:
    """Make rows of at most `longest` tokens that share nothing with each other, and hardly anything with others."""
    count = min(WARM_UP_TOKENS, longest - 1)
    length = min(WARM_UP_PROMPT, longest - count)
    return [
        ([(7919 * row + 104729 * i) % vocab_size for i in range(length)], count) for row in range(1, 1 + WARM_UP_ROWS)
    ]


def peak_rss_bytes() -> int:
    """Read the most memory that this program had resident; on Linux what it replaced on exec is left out."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
            peak = next(line for line in file if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_device_bytes() -> int | None:
    """Read the most accelerator memory that torch had reserved; None without one."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def run_task(task: Task) -> dict[str, Any]:
    """Load, warm up, run, and tell how it went."""
    began = time.perf_counter()
    engine = ENGINES[task["peer"]](task)
    load_s = time.perf_counter() - began
    engine.run(warm_up_rows(engine.vocab_size, task["longest"]))
    engine.forget()
    times = engine.run([(ids, count) for ids, count in task["rows"]])
    return {
        "token_times": times,
        "load_s": load_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": peak_device_bytes(),
        "version": engine.version,
        "settings": engine.settings,
    }


class Transformers:
    """generate() over batches in the order of the rows, padded on the left; each waits for its slowest row."""

    def __init__(self, task: Task) -> None:
        import torch
        import transformers

        library: Any = transformers
        self.version = f"transformers {library.__version__}"
        self.model: Any = library.AutoModelForCausalLM.from_pretrained(
            task["model"],
            revision=task.get("revision"),
            dtype=getattr(torch, task["dtype"]),
            trust_remote_code=task["trust_remote_code"],
        )
        self.model = self.model.to(task["device"]).eval()
        self.batch = task["max_requests"] or STATIC_BATCH
        self.settings: dict[str, Any] = {"batch": self.batch}
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        # A setting that is None counts as not set, and then the model's own would.
        self.model.generation_config = library.GenerationConfig(do_sample=False, pad_token_id=0)

    def forget(self) -> None:
        """Keep nothing from one run to the next; generate() does not."""

    def run(self, rows: Rows) -> list[list[float]]:
        start = time.perf_counter()
        times: list[list[float]] = []
        for first in range(0, len(rows), self.batch):
            times += self._run_batch(rows[first : first + self.batch], start)
        return times

    def _run_batch(self, rows: Rows, start: float) -> list[list[float]]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        counts = [count for _, count in rows]
        steps: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                if input_ids.is_cuda:
                    torch.cuda.synchronize()
                steps.append(time.perf_counter() - start)
                return torch.tensor([count <= len(steps) for count in counts], device=input_ids.device)

        width = max(len(ids) for ids, _ in rows)
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in rows], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows], device=device)
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max(counts), stopping_criteria=StoppingCriteriaList([Clock()])
            )
        return [steps[:count] for count in counts]


class TransformersContinuous(Transformers):
    """transformers' own continuous batching, told of the workload as its generate_batch() tells it."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.settings = {}

    def run(self, rows: Rows) -> list[list[float]]:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        prompt, longest = max(len(ids) for ids, _ in rows), max(count for _, count in rows)
        config = self.model.generation_config_class(
            do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=longest
        )
        hints = WorkloadHints(max_prompt_length=prompt, max_generated_length=longest, num_requests=len(rows))
        times: list[list[float]] = [[] for _ in rows]
        with self.model.continuous_batching_context_manager(
            generation_config=config, block=True, workload_hints=hints
        ) as manager:
            start = time.perf_counter()
            # As its own add_requests orders them, so that shared prefixes meet.
            for i in sorted(range(len(rows)), key=lambda i: rows[i][0], reverse=True):
                ids, count = rows[i]
                manager.add_request(
                    ids, request_id=str(i), max_new_tokens=count, record_timestamps=True, eos_token_id=-1
                )
            for _ in rows:
                result = None
                while result is None or not result.is_finished():
                    result = manager.get_result(timeout=POLL_S)
                    if result is None and not manager.is_running():
                        raise RuntimeError("its generation thread ended before all rows were done")
                if result.error is not None:
                    raise RuntimeError(result.error)
                times[int(result.request_id)] = [at - start for at in result.timestamps]
        return times


class Vllm:
    """vLLM, in this process, step by step, so that every token's time is known; its text is not asked for."""

    def __init__(self, task: Task) -> None:
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.version = f"vllm {vllm.__version__}"
        self.settings: dict[str, Any] = {
            "max_num_seqs": task["max_requests"] or VLLM_REQUESTS,
            "max_num_batched_tokens": task["max_batch_tokens"] or VLLM_BATCH_TOKENS,
            "max_model_len": task["longest"],
            "enable_prefix_caching": True,
        }
        self._llm = vllm.LLM(
            task["model"],
            revision=task.get("revision"),
            dtype=task["dtype"],
            trust_remote_code=task["trust_remote_code"],
            seed=0,
            **self.settings,
        )
        self._params = vllm.SamplingParams
        self.vocab_size: int = self._llm.llm_engine.model_config.get_vocab_size()

    def forget(self) -> None:
        """Empty the prefix cache, which holds the warm-up."""
        self._llm.reset_prefix_cache()

    def run(self, rows: Rows) -> list[list[float]]:
        engine: Any = self._llm.llm_engine
        times: list[list[float]] = [[] for _ in rows]
        start = time.perf_counter()
        for i, (ids, count) in enumerate(rows):
            params = self._params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                seen = times[int(output.request_id)]
                seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
        return times


ENGINES: dict[str, Any] = {"transformers": Transformers, "transformers-cb": TransformersContinuous, "vllm": Vllm}


def main() -> None:
    """Do what standard input says."""
    stream = claim_stdout()
    task = read_task()
    try:
        outcome = run_task(task)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        outcome = {"error": f"{type(error).__name__}: {lines[-1].strip() if lines else 'no message'}"}
    answer(stream, outcome)
    os._exit(0)  # threads of the engines may still run


if __name__ == "__main__":
    main()
