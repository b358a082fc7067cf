"""`--shard`: which part of the rows is this process's, and what its part is called. Called at the start of a job.

Parts are contiguous, so that shared prefixes stay together, and counted from 0. Nothing is taken from the environment
unless `slurm` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.errors import UsageError
from cbatch.io.atomic import writing
from cbatch.jobs.paths import report_path
from cbatch.jobs.report import read_report

PARTS_SUFFIX = ".parts"
SUCCESS = "_SUCCESS"
SLURM = "slurm"
MAX_SHARDS = 99_999  # what five digits can name


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`, and where that was said."""

    index: int
    count: int
    source: str

    def rows(self, num_rows: int) -> range:
        """Return this part's rows of all."""
        return range(num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count)

    def path(self, output: str) -> Path:
        """Return where this part of an output goes."""
        return part_path(Path(output), self.index, self.count)


@dataclass(frozen=True, slots=True)
class Part:
    """A shard of an input whose number of rows is known."""

    shard: Shard
    rows: range
    all_rows: int
    job: str  # hash of input, settings and model: parts of one job have the same one

    def as_dict(self) -> dict[str, int | str]:
        """Return what the part's report says of it."""
        return {
            "index": self.shard.index,
            "count": self.shard.count,
            "first_row": self.rows.start,
            "all_rows": self.all_rows,
            "job": self.job,
        }


def parts_folder(output: Path) -> Path:
    """Return the folder that holds the parts of an output until they are merged."""
    return output.with_name(output.name + PARTS_SUFFIX)


def part_path(output: Path, index: int, count: int) -> Path:
    """Return where one part of an output is."""
    return parts_folder(output) / f"part-{index:05}-of-{count:05}{output.suffix}"


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """Read "i/n" or "slurm". Raises UsageError."""
    if text == SLURM:
        return _slurm_shard(environment)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UsageError(
            f"--shard must be i/n or {SLURM}: it is '{text}'", hint="--shard 0/4 is the first part of four"
        )
    return _checked(int(match[1]), int(match[2]), f"--shard {text}")


def _slurm_shard(environment: Mapping[str, str]) -> Shard:
    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else None

    task = number("SLURM_ARRAY_TASK_ID")
    if task is not None:
        low, high = number("SLURM_ARRAY_TASK_MIN"), number("SLURM_ARRAY_TASK_MAX")
        step, count = number("SLURM_ARRAY_TASK_STEP") or 1, number("SLURM_ARRAY_TASK_COUNT")
        if low is None or high is None or count is None:
            raise UsageError("SLURM_ARRAY_TASK_ID is set, and MIN, MAX or COUNT is not", hint="pass --shard i/n")
        if (task - low) % step or (high - low) // step + 1 != count:
            raise UsageError(
                f"the Slurm array has gaps: {count} tasks from {low} to {high} by {step}",
                hint="pass --shard i/n, with i and n as they are in the whole array",
            )
        return _checked((task - low) // step, count, f"Slurm array task {task} of {low} to {high} by {step}")
    process, count = number("SLURM_PROCID"), number("SLURM_NTASKS")
    if process is None or count is None:
        raise UsageError("--shard slurm, and no Slurm task is set in the environment", hint="pass --shard i/n")
    return _checked(process, count, f"Slurm task {process} of {count}")


def _checked(index: int, count: int, source: str) -> Shard:
    if not 1 <= count <= MAX_SHARDS:
        raise UsageError(f"{source}: the number of shards must be 1 to {MAX_SHARDS}")
    if index >= count:
        raise UsageError(f"{source}: shards are counted from 0, so the last of {count} is {count - 1}/{count}")
    return Shard(index, count, source)


def find_problem(output: Path, count: int) -> str | None:
    """Say what keeps the parts of an output from being one whole: a part missing, or of another job than the first."""
    first: dict[str, Any] = {}
    for index in range(count):
        path = part_path(output, index, count)
        if not path.exists():
            return f"{path} is missing"
        report = read_report(report_path(path))
        first = first or report
        try:
            problem = _find_difference(report, Shard(index, count, ""), first)
        except (KeyError, TypeError):
            problem = "has no report beside it"
        if problem is not None:
            return f"{path} {problem}"
    return None


def _find_difference(report: dict[str, Any], own: Shard, first: dict[str, Any]) -> str | None:
    """Say what is wrong with a part by its report. Raises KeyError and TypeError where that is none."""
    shard = report["shard"]
    expected = Part(own, own.rows(shard["all_rows"]), shard["all_rows"], shard["job"])
    if shard != expected.as_dict() or report["rows"] != len(expected.rows):
        return f"does not hold the rows that part {own.index} of {own.count} should"
    if shard["all_rows"] != first["shard"]["all_rows"]:
        return f"is of {shard['all_rows']} rows, the first part of {first['shard']['all_rows']}"
    if (shard["job"], *_columns_of(report)) != (first["shard"]["job"], *_columns_of(first)):
        return "is of another job than the first part: its input, settings or model differ"
    return None


def _columns_of(report: dict[str, Any]) -> tuple[object, object]:
    return report["hashes"]["columns"], report["row_column"]


def mark_success(output: Path, count: int) -> None:
    """Mark the folder of the parts once they are one whole, and unmark it where they are not."""
    mark = parts_folder(output) / SUCCESS
    if find_problem(output, count) is not None:
        mark.unlink(missing_ok=True)
    else:
        with writing(mark):
            mark.touch()  # empty, so that shards that end at the same moment need not take turns
