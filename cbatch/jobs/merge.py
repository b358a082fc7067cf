"""`cbatch merge`: the parts of a sharded job become one ordered output. Called by the command of that name.

Parts share column names and schema, so their rows are copied as they are; each is checked to be the one that belongs
there. The merged file appears complete or not at all, with a report that adds the parts' up.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.errors import EXIT_OK, InputError, UsageError
from cbatch.io.atomic import AtomicFile, write_json, writing
from cbatch.io.jsonform import load
from cbatch.io.sinks import check_output
from cbatch.jobs.lock import JobLock
from cbatch.jobs.merged_report import merge_reports
from cbatch.jobs.paths import errors_path, lock_path, report_path
from cbatch.jobs.report import read_report
from cbatch.jobs.shards import PARTS_SUFFIX, find_problem, mark_success, part_path, parts_folder
from cbatch.jobs.stop import Interrupted, Stop, handling_signals

if TYPE_CHECKING:
    import pyarrow as pa

INTERRUPTED_EXIT_CODE = 75
MERGED = "_MERGED"  # in the folder of the parts, once a merge has begun to write
RUN_AGAIN = "remove it and run that shard again: its finished rows are in its journal"
_PART_NAME = re.compile(r"part-\d{5}-of-(\d{5})(\.\w+)")


@dataclass(frozen=True, slots=True)
class MergeSummary:
    """How a merge ended."""

    exit_code: int
    output: Path
    num_parts: int = 0
    rows: int = 0
    reason: str | None = None  # of an interruption


def merge_parts(output: str, *, force_unlock: bool = False) -> MergeSummary:
    """Join the parts of a sharded job, named by its output, in order.

    Raises UsageError where there are no parts, or an output of unknown origin, InputError where a part is missing or
    does not belong, OutputError.
    """
    path = Path(output.rstrip("/").removesuffix(PARTS_SUFFIX))
    count = _count_parts(path)
    stop = Stop()
    try:
        with (
            handling_signals(stop, grace_s=0.0, exit_code=INTERRUPTED_EXIT_CODE),
            JobLock(lock_path(path), force=force_unlock),
        ):
            check_output(str(path))
            problem = find_problem(path, count)
            if problem is not None:
                raise InputError(problem, hint="run that shard, then merge again")
            parts = [part_path(path, index, count) for index in range(count)]
            mark_success(path, count)
            report = merge_reports(parts)
            _check_origin(path)
            num_rows = _MERGERS[path.suffix.lower()](path, parts, stop.check)
            write_json(report_path(path), report)
    except Interrupted as interrupted:
        return MergeSummary(INTERRUPTED_EXIT_CODE, path, reason=str(interrupted))
    return MergeSummary(EXIT_OK, path, count, num_rows)


def _check_origin(output: Path) -> None:
    """Refuse to write over what neither a merge nor a run has left; mark that from now on it is a merge's."""
    mark = parts_folder(output) / MERGED
    if output.exists() and not mark.exists() and not read_report(report_path(output)):
        raise UsageError(f"{output} exists, and there is no report of it: it is of unknown origin", hint="move it away")
    with writing(mark):
        mark.touch()


def _count_parts(output: Path) -> int:
    """How many parts there should be, by the names of those that are there."""
    folder = parts_folder(output)
    if not folder.is_dir():
        raise UsageError(
            f"{output} has no parts: there is no folder {folder}", hint="name the output of a job that ran with --shard"
        )
    matches = [match for path in sorted(folder.iterdir()) if (match := _PART_NAME.fullmatch(path.name))]
    counts = {int(match[1]) for match in matches}
    if not counts:
        raise InputError(f"{folder} holds no parts", hint="run the shards first")
    if len(counts) > 1:
        numbers = ", ".join(map(str, sorted(counts)))
        raise InputError(
            f"{folder} holds parts of different jobs: of {numbers}", hint="remove those that are not meant"
        )
    return counts.pop()


def _merge_jsonl(output: Path, parts: list[Path], tick: Callable[[], None]) -> int:
    """Copy lines, each of which must be the next row; responses carry no row and are counted. Raises InputError."""
    _merge_error_files(output, parts)
    num_rows = 0
    with AtomicFile(output) as joined:
        for part in parts:
            report = read_report(report_path(part))
            column, expected = report["row_column"], num_rows
            with writing(output), part.open("rb") as file:
                for line in file:
                    tick()
                    columns = _parse(part, line)
                    if column is not None:
                        _check_row(part, columns.get(column), expected)
                    expected += 1
                    joined.file.write(line)
            _check_count(part, expected - num_rows, report["rows"] - (report["rows_error"] if column is None else 0))
            num_rows += report["rows"]
        joined.commit()
    return num_rows


def _parse(part: Path, line: bytes) -> dict[str, Any]:
    """Read a line of a part, which may have been damaged since it was written. Raises InputError."""
    value: object = None
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError):
            value = load(line.decode())
    if not isinstance(value, dict):
        raise InputError(f"{part} holds a line that is no row", hint=RUN_AGAIN)
    return value


def _merge_error_files(output: Path, parts: list[Path]) -> None:
    """Join the error files of an OpenAI Batch. Raises InputError where one is missing, or does not hold its rows."""
    reports = {part: read_report(report_path(part)) for part in parts}
    counts = {part: report["rows_error"] for part, report in reports.items() if report.get("errors_file")}
    target = errors_path(output)
    if not counts:
        target.unlink(missing_ok=True)
        return
    with AtomicFile(target) as joined:
        for part, expected in counts.items():
            path, num_rows = errors_path(part), 0
            if not path.exists():
                raise InputError(f"{path} is missing", hint="run that shard, then merge again")
            with writing(target), path.open("rb") as file:
                for line in file:
                    _parse(path, line)
                    joined.file.write(line)
                    num_rows += 1
            _check_count(path, num_rows, expected)
        joined.commit()


def _merge_parquet(output: Path, parts: list[Path], tick: Callable[[], None]) -> int:
    """Copy record batches, whose rows must be the next ones. Raises InputError."""
    import pyarrow.parquet as pq

    with _reading_parquet(parts[0]):
        schema = pq.read_schema(parts[0])
    num_rows = 0
    with AtomicFile(output) as file, writing(output), pq.ParquetWriter(file.file, schema) as writer:
        for part in parts:
            report = read_report(report_path(part))
            first = num_rows
            for batch in _batches(part, schema):
                tick()
                for row in batch.column(report["row_column"]).to_pylist():
                    _check_row(part, row, num_rows)
                    num_rows += 1
                writer.write_batch(batch)
            _check_count(part, num_rows - first, report["rows"])
        writer.close()
        file.commit()
    return num_rows


def _batches(part: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with _reading_parquet(part), pq.ParquetFile(part) as file:
        if not file.schema_arrow.equals(schema):
            raise InputError(f"{part} has other columns than the first part", hint=RUN_AGAIN)
        yield from file.iter_batches()


@contextlib.contextmanager
def _reading_parquet(part: Path) -> Iterator[None]:
    """Turn what is wrong with a part into InputError."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise InputError(f"{part} is not Parquet, or damaged: {error}", hint=RUN_AGAIN) from error


_MERGERS = {".jsonl": _merge_jsonl, ".parquet": _merge_parquet}


def _check_row(part: Path, row: object, expected: int) -> None:
    if row != expected:
        raise InputError(f"{part} holds row {row} where row {expected} should be", hint=RUN_AGAIN)


def _check_count(part: Path, num_rows: int, expected: int) -> None:
    if num_rows != expected:
        raise InputError(f"{part} holds {num_rows} rows where {expected} should be", hint=RUN_AGAIN)
