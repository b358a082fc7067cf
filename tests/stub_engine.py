"""A stub engine and tokenizer for tests of jobs and the command line: no torch, no transformers, no randomness.

A completion is a function of prompt and seed alone, one token a character, so a test can compute it (`expected_text`).
As a script, `python -m tests.stub_engine run IN -o OUT --model DIR ...` is the real command line with this engine
behind it, and `python -m tests.stub_engine job JSON` runs the `JobConfig` that the JSON object spells, with the model's
directory under "model". Environment variables (`load_from_environment`) then set how the engine behaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from cbatch.config import DEFAULT_MAX_TOKENS, EngineConfig, SamplingParams
from cbatch.engine import load
from cbatch.engine.cache.manager import CacheLoad
from cbatch.engine.observer import Observer, RequestEvent, StepRecord, StepTimes
from cbatch.engine.record import TokenLogprobs
from cbatch.engine.request import Prompt, RequestMetrics, RequestOutput, RequestStatus
from cbatch.engine.samples import join_samples, sample_seed
from cbatch.engine.stats import EngineStats
from cbatch.errors import CbatchError, EngineError, RowError

LETTERS = "abcdefghijklmnopqrstuvwxyz \n\u2028é漢👍"
EOS = 0
BOS = 1
FIRST_LETTER = 2  # token id of the character with code point 0
VOCAB_SIZE = FIRST_LETTER + 0x110000
DEFAULT_LENGTH = 8  # tokens of a completion that ends by itself


class StubTokenizer:
    """One token a character; BOS goes before every prompt; a chat is its roles and contents line by line."""

    vocab_size = VOCAB_SIZE

    def __init__(self, *, has_chat_template: bool = True, encode_s: float = 0.0) -> None:
        self.has_chat_template = has_chat_template
        self.num_encoded = 0
        self._encode_s = encode_s

    def encode(self, text: str) -> list[int]:
        self.num_encoded += 1
        if self._encode_s:
            time.sleep(self._encode_s)
        text.encode()
        return [BOS, *(ord(char) + FIRST_LETTER for char in text)]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        now: datetime,
    ) -> list[int]:
        """Write a chat; the time goes before it where a template argument of that name asks for it."""
        clock = (chat_template_kwargs or {}).get("clock")
        roles = [message["role"] for message in messages]
        if any(left == right for left, right in pairwise(roles)):
            raise ValueError("roles must alternate")
        lines = [now.strftime(clock)] if clock else []
        lines += [f"{message['role']}: {message['content']}\n" for message in messages]
        extra = f"{tools or ''}{chat_template_kwargs or ''}"
        return self.encode("".join(lines) + extra + "assistant: ")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) or "</s>"

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token - FIRST_LETTER) for token in ids if token >= FIRST_LETTER)


@dataclass(frozen=True, slots=True)
class StubPlan:
    max_model_len: int = 4096
    max_requests_per_batch: int = 8
    mode: str = "continuous+chunked"
    num_host_pages: int = 0
    layer_windows: tuple[int | None, ...] = (None,)

    def settings(self) -> dict[str, dict[str, object]]:
        return {"max_requests_per_batch": {"value": self.max_requests_per_batch, "reason": "stub"}}


@dataclass(slots=True)
class _Running:
    prompt: Prompt
    token_ids: list[int]
    given_at: float
    text_length: int | None
    stop_reason: str | None
    finish_reason: str
    scheduled_at: float | None = None
    num_done: int = 0


@dataclass(slots=True)
class StubEngine:
    """Follows the engine's interface: a waiting window, a batch, one token a step for each running request."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="stub"))
    plan: StubPlan = field(default_factory=StubPlan)
    tokenizer: StubTokenizer = field(default_factory=StubTokenizer)
    generation_defaults: dict[str, object] = field(default_factory=dict)
    load_s: float = 0.25
    stats: EngineStats = field(default_factory=EngineStats)
    step_s: float = 0.0  # how long a step takes
    fail_at_step: int | None = None
    num_started: int = 0
    observer: Observer | None = None
    log: Path | None = None  # every prompt that starts is written here, a line of its text each
    prepared: list[SamplingParams] = field(default_factory=list)
    _waiting: list[_Running] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)

    def steps(self, prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        exhausted = False
        while not exhausted or self._waiting or self._running:
            refused: list[RequestOutput] = []
            while not exhausted and len(self._waiting) < 2 * self.plan.max_requests_per_batch:
                try:
                    prompt = next(prompts)
                except StopIteration:
                    exhausted = True
                    break
                if prompt is None:
                    break
                refused += self._take(prompt)
            while self._waiting and len(self._running) < self.plan.max_requests_per_batch:
                self._start(self._waiting.pop(0))
            self.stats.num_running, self.stats.num_waiting = len(self._running), len(self._waiting)
            if self._running:
                yield refused + self._step()
            else:
                if not exhausted:
                    time.sleep(0.001)
                yield refused

    def _all_samples(self, request: _Running) -> RequestOutput:
        prompt, sampling = request.prompt, request.prompt.sampling
        if sampling.n == 1:
            return _output(request)
        outputs = []
        for sample in range(sampling.n):
            one = replace(sampling, n=1, seed=sample_seed(sampling.seed, sample))
            planned = plan_completion(replace(prompt, sampling=one), self.tokenizer, self.plan.max_model_len)
            planned.scheduled_at, planned.given_at = request.scheduled_at, request.given_at
            outputs.append(_output(planned))
        return join_samples(outputs)

    def observe(self, observer: Observer) -> None:
        self.observer = observer

    def prepare(self, params: SamplingParams) -> None:
        self.prepared.append(params)

    def drop_waiting(self) -> list[int]:
        dropped = [request.prompt.request_id for request in self._waiting]
        self._waiting.clear()
        return dropped

    def _take(self, prompt: Prompt) -> list[RequestOutput]:
        if self._refuses(prompt):
            error = RowError("does_not_fit", "the cache cannot hold this request")
            return [RequestOutput(prompt.request_id, len(prompt.token_ids), [], "error", error=error)]
        self._waiting.append(plan_completion(prompt, self.tokenizer, self.plan.max_model_len))
        return []

    def _refuses(self, prompt: Prompt) -> bool:
        return self.tokenizer.decode(prompt.token_ids).startswith("never fits")

    def _start(self, request: _Running) -> None:
        request.scheduled_at = time.time()
        self._running.append(request)
        self.num_started += 1
        self.stats.prompt_tokens += len(request.prompt.token_ids)
        self.stats.computed_tokens += len(request.prompt.token_ids)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(ascii(self.tokenizer.decode(request.prompt.token_ids)) + "\n")

    def _step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        if self.step_s:
            time.sleep(self.step_s)
        self.stats.steps += 1
        if self.stats.steps == self.fail_at_step:
            raise EngineError("the device was lost")
        finished = []
        for request in list(self._running):
            request.num_done += 1
            self.stats.output_tokens += request.num_done <= len(request.token_ids)
            if request.num_done >= len(request.token_ids):
                self._running.remove(request)
                finished.append(self._all_samples(request))
        self.stats.cache_usage = len(self._running) / self.plan.max_requests_per_batch
        ended = time.perf_counter()
        self.stats.generate_s += ended - started
        if self.observer is not None:
            self.observer.on_step(self._record(StepTimes(started, started, ended, ended), finished))
        return finished

    def _record(self, times: StepTimes, finished: list[RequestOutput]) -> StepRecord:
        """What a step looks like to an observer, as far as the stub has it."""
        events = [
            RequestEvent(
                done.request_id, 0, RequestStatus.FINISHED, times.ended, done.num_prompt_tokens, len(done.token_ids), 0
            )
            for done in finished
        ]
        count, load = len(self._running) + len(finished), CacheLoad(0.0, 0.0, 1.0, usage=0.0, waste=None)
        return StepRecord(
            times, count, 0, count, 0.0, 0, len(self._running), len(self._waiting), load, 0, 0, 0, tuple(events)
        )


def plan_completion(prompt: Prompt, tokenizer: StubTokenizer, max_model_len: int) -> _Running:
    """Decide the whole completion when the prompt comes in."""
    sampling = prompt.sampling
    seed = sampling.seed if sampling.temperature > 0 else 0
    source = hashlib.blake2b(repr((prompt.token_ids, seed)).encode()).digest()
    wanted = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    limit = min(wanted, max_model_len - len(prompt.token_ids))
    length = limit if sampling.ignore_eos else min(limit, DEFAULT_LENGTH)
    letters = [LETTERS[source[index % len(source)] % len(LETTERS)] for index in range(length)]
    ids = [ord(char) + FIRST_LETTER for char in letters]
    reason = "length" if length == limit else "stop"
    if reason == "stop":
        ids[-1] = EOS
    text = tokenizer.decode(ids)
    matches = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
    if matches:
        at, stop = min(matches)
        return _Running(prompt, ids[: at + len(stop)], time.time(), at, stop, "stop")
    return _Running(prompt, ids, time.time(), None, None, reason)


def expected_text(prompt: Prompt) -> str:
    """The completion's text for a prompt, as a test computes it."""
    tokenizer = StubTokenizer()
    planned = plan_completion(prompt, tokenizer, StubPlan().max_model_len)
    return tokenizer.decode(planned.token_ids)[: planned.text_length]


def _output(request: _Running) -> RequestOutput:
    assert request.scheduled_at is not None
    now = time.time()
    metrics = RequestMetrics(
        scheduled_at=request.scheduled_at,
        queue_s=request.scheduled_at - request.given_at,
        prefill_s=0.001,
        itl_mean_s=0.002 if len(request.token_ids) > 1 else None,
        itl_p99_s=0.003 if len(request.token_ids) > 1 else None,
        e2e_s=now - request.given_at,
        computed_tokens=len(request.prompt.token_ids) + len(request.token_ids) - 1,
    )
    return RequestOutput(
        request.prompt.request_id,
        len(request.prompt.token_ids),
        request.token_ids,
        request.finish_reason,  # type: ignore[arg-type]
        stop_reason=request.stop_reason,
        text_length=request.text_length,
        logprobs=_logprobs(request.prompt.sampling.logprobs, request.token_ids),
        prompt_logprobs=_logprobs(request.prompt.sampling.prompt_logprobs, request.prompt.token_ids, first=None),
        metrics=metrics,
    )


def _logprobs(num_top: int | None, token_ids: list[int], first: float | None = -0.5) -> TokenLogprobs | None:
    """Every token at -0.5 but for the first one, the likeliest ones a token and those after it."""
    if num_top is None:
        return None
    tokens = [first, *[-0.5] * len(token_ids)][: len(token_ids)]
    top = [[(token + i, -0.5 - i) for i in range(num_top)] for token in token_ids] if num_top else None
    return TokenLogprobs(tokens, top)


def load_from_environment(config: EngineConfig) -> StubEngine:
    """Load as the engine does, with the delays and failures that the environment asks for."""
    time.sleep(float(os.environ.get("STUB_LOAD_S", "0")))
    if "STUB_LOAD_HANGS" in os.environ:  # in a long call outside Python, which no signal handler gets into
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    if "STUB_CONFIG" in os.environ:  # what the engine was asked for is written there
        Path(os.environ["STUB_CONFIG"]).write_text(json.dumps(asdict(config)))
    fail_at = os.environ.get("STUB_FAIL_AT_STEP")
    log = os.environ.get("STUB_LOG")
    return StubEngine(
        config,
        tokenizer=StubTokenizer(
            has_chat_template="STUB_NO_TEMPLATE" not in os.environ,
            encode_s=float(os.environ.get("STUB_ENCODE_S", "0")),
        ),
        step_s=float(os.environ.get("STUB_STEP_S", "0")),
        fail_at_step=int(fail_at) if fail_at else None,
        log=Path(log) if log else None,
    )


def run_job_of(text: str) -> int:
    """Run the job that a JSON object spells, say how it ended as JSON on standard output, and return the exit code."""
    from cbatch.cli.summary import show_summary
    from cbatch.config import JobConfig
    from cbatch.jobs.run import run_job

    options = json.loads(text)
    engine = EngineConfig(model=options.pop("model"), max_model_len=options.pop("max_model_len", None))
    quiet = options.pop("quiet", False)
    try:
        job = JobConfig(**options | {"inputs": tuple(options["inputs"])})
        summary = run_job(job, engine, load_engine=load_from_environment, quiet=quiet)
    except CbatchError as error:
        sys.stderr.write(f"cbatch: {error}\n")
        return error.exit_code
    if summary.status == "interrupted":  # the rest is on standard output
        show_summary(summary, quiet=quiet)
    ended = {"status": summary.status, "rows": summary.rows, "rows_replayed": summary.rows_replayed}
    sys.stdout.write(json.dumps(ended) + "\n")
    return summary.exit_code


def main() -> int:
    """Run the real command line, or a job, with the stub in the engine's place."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1] == "job":
        return run_job_of(sys.argv[2])
    load.load_engine = load_from_environment  # type: ignore[assignment]
    is_search = "tune" in sys.argv[1:]
    if is_search:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        sys.modules["cbatch.tune.engines"] = import_module("tests.tune.stub_engines")
    from cbatch.cli.app import main as command_line

    code = command_line()
    assert "torch" not in sys.modules or is_search  # the optimiser of a search computes with it
    return code


if __name__ == "__main__":
    sys.exit(main())
