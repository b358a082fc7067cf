"""From picked rows to the sample that trials run: encoded as a run does, their lengths learnt, as many as time allows.

How long an answer is shows only when it is there. The default settings run the rows once, in chunks that double, until
the next would take more than the time of one trial; from then on every trial takes exactly as many tokens a row. Where
the first chunk alone takes longer, its outputs are cut to what there is time for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.engine.request import Prompt
from cbatch.errors import InputError, RowError
from cbatch.jobs.encoding import RowEncoder
from cbatch.jobs.reader import JobRow
from cbatch.tune.measure import Chunk, EngineSource, build_default, fix_length, output_length, run_chunk
from cbatch.tune.trial import Outcome

FIRST_CHUNK = 16  # rows: fewer say little about batches
LEAST_ROWS = 2  # fewer than that make no batch
LEAST_LENGTH = 8  # tokens of an output that is cut
LATER_CHUNKS = 2.0  # times the time of a trial; what takes longer after all is left out
LEAST_RUNG = 8  # rows, where the sample has as many
FEW_OUTPUTS = 0.1  # fewer output tokens than this share of the prompts' say little about speed
USUAL_GROWTH = 1.5  # of a chunk's time when it doubles: larger batches compute more tokens a second
RUNG_SHARES = (0.25, 0.5)  # of the sample, before the whole of it


@dataclass(frozen=True, slots=True)
class Sample:
    """The prompts of the trials, lengths fixed, in the order in which a growing sample takes them."""

    prompts: tuple[Prompt, ...]
    rungs: tuple[int, ...]  # how many of them each rung has, the whole sample last
    first_error: str | None = None  # of the rows that were picked and cannot run
    num_failed: int = 0
    num_cut: int = 0  # rows whose outputs are shorter than they would be, for want of time

    def of(self, rung: int) -> list[Prompt]:
        """Give a rung's prompts in the order of the input."""
        return sorted(self.prompts[: self.rungs[rung]], key=lambda prompt: prompt.request_id)

    @property
    def rows(self) -> list[int]:
        """The rows' numbers in the input, in its order."""
        return sorted(prompt.request_id for prompt in self.prompts)

    @property
    def num_requests(self) -> int:
        """What they make in a batch, every sample of a row counted."""
        return sum(prompt.sampling.n for prompt in self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum((prompt.sampling.max_tokens or 0) * prompt.sampling.n for prompt in self.prompts)

    def speed(self, outcome: Outcome) -> float:
        """Give a trial's tokens per second as they are shown."""
        return outcome.processed_per_s if self.counts_prompts else outcome.tokens_per_s

    @property
    def counts_prompts(self) -> bool:
        """Whether speeds are told with the tokens of prompts, the outputs being few."""
        return self.output_tokens < FEW_OUTPUTS * self.prompt_tokens

    def record(self) -> dict[str, Any]:
        """Give what the journal keeps: the rows and their lengths, in order."""
        lengths = [[prompt.request_id, prompt.sampling.max_tokens] for prompt in self.prompts]
        return {
            "rows": lengths,
            "num_failed": self.num_failed,
            "first_error": self.first_error,
            "num_cut": self.num_cut,
        }


def encode_rows(rows: Sequence[JobRow], encoder: RowEncoder) -> tuple[list[Prompt], list[RowError]]:
    """Make the prompts of rows, and the errors of those that have none."""
    prompts, errors = [], []
    for row in rows:
        try:
            prompts.append(encoder.encode(row).prompt)
        except RowError as error:
            errors.append(error)
    return prompts, errors


def calibrate(
    engines: EngineSource, prompts: Sequence[Prompt], errors: Sequence[RowError], trial_s: float, *, whole: bool
) -> Sample:
    """Find the sample that one trial runs in about `trial_s` seconds; `whole`: all rungs need all of it.

    Raises InputError where too few rows can run, CbatchError where the default settings do not work.
    """
    engine = build_default(engines)
    failed = [str(error) for error in errors]
    fixed: list[Prompt] = []
    seconds: list[float] = []  # of each chunk
    num_cut = 0
    for chunk in _chunks(prompts):
        ran = run_chunk(engines, engine, chunk, trial_s if not fixed else LATER_CHUNKS * trial_s)
        cut = [prompt for prompt in chunk if prompt.request_id not in ran.outputs]
        if cut and fixed:
            break
        failed += [str(output.error) for output in ran.outputs.values() if output.error is not None]
        fixed += [p for prompt in chunk if (p := _fixed(prompt, ran, len(cut))) is not None]
        num_cut = len(cut)
        seconds.append(ran.seconds)
        growth = seconds[-1] / seconds[-2] if len(seconds) > 1 and seconds[-2] > 0 else USUAL_GROWTH
        if cut or ran.seconds * min(growth, 2.0) ** 2 > trial_s:  # the next chunk, and with it all that went before
            break
    if len(fixed) < LEAST_ROWS:
        raise too_few(len(fixed), failed[0] if failed else None)
    rungs = choose_rungs(len(fixed), whole=whole)
    return Sample(tuple(fixed), rungs, failed[0] if failed else None, len(failed), num_cut)


def _fixed(prompt: Prompt, ran: Chunk, num_cut: int) -> Prompt | None:
    """Fix a prompt's length at what it had, or at what there was time for; None for one that failed."""
    output = ran.outputs.get(prompt.request_id)
    if output is not None:
        return None if output.error is not None else fix_length(prompt, output_length(output))
    length = max(LEAST_LENGTH, ran.tokens_left // num_cut)
    asked = prompt.sampling.max_tokens
    return fix_length(prompt, length if asked is None else min(length, asked))


def recall(record: dict[str, Any], prompts: Sequence[Prompt], *, whole: bool) -> Sample:
    """Make the sample that an earlier process found."""
    by_id = {prompt.request_id: prompt for prompt in prompts}
    fixed = [fix_length(by_id[row], length) for row, length in record["rows"]]
    rungs = choose_rungs(len(fixed), whole=whole)
    return Sample(tuple(fixed), rungs, record["first_error"], record["num_failed"], record["num_cut"])


def choose_rungs(num_rows: int, *, whole: bool) -> tuple[int, ...]:
    """Choose how many rows each rung has: growing shares of the sample, at least two rungs."""
    shares = [max(LEAST_RUNG, round(num_rows * share)) for share in RUNG_SHARES]
    growing = sorted({size for size in shares if size < num_rows and not whole})
    return (*(growing or [num_rows]), num_rows)


def too_few(num_rows: int, error: str | None) -> InputError:
    """The error of an input with no or one row that can run."""
    if num_rows == 0 and error is not None:
        return InputError(f"no row of the input can run; the first: {error}")
    count = "no rows" if num_rows == 0 else "only one row that can run"
    return InputError(
        f"the input has {count}, and settings are tuned on batches of rows", hint=f"give at least {LEAST_ROWS} rows"
    )


def _chunks(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    start, size = 0, FIRST_CHUNK
    while start < len(prompts):
        yield prompts[start : start + size]
        start, size = start + size, 2 * size
