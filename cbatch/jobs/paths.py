"""Where a job's files are: the output as named by the user, and what lies beside it. Used by everything in jobs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cbatch.errors import UsageError
from cbatch.io.atomic import check_folder, check_free, check_writable, is_same_file, temporary_path
from cbatch.io.sinks import check_output

TRACE_SUFFIX = ".trace.jsonl.gz"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The files of one job."""

    output: Path
    report: Path
    journal: Path
    locks: tuple[Path, ...]  # one beside the output, and one beside a journal that lies elsewhere
    trace: Path

    @classmethod
    def of(cls, output: str, checkpoint_dir: str | None = None) -> JobPaths:
        """Name the files after the output, the journal in `checkpoint_dir` where one is given."""
        path = Path(output)
        folder = Path(checkpoint_dir) if checkpoint_dir is not None else path.parent
        is_elsewhere = os.path.realpath(folder) != os.path.realpath(path.parent)
        return cls(
            output=path,
            report=report_path(path),
            journal=folder / f"{path.name}.journal.jsonl",
            locks=(lock_path(path), *([lock_path(folder / path.name)] if is_elsewhere else [])),
            trace=trace_path(path),
        )

    def check(self, inputs: Iterable[str]) -> None:
        """Check, by trial, that everything can be written and overwrites no input. Raises UsageError, OutputError."""
        check_output(str(self.output))
        check_folder(self.journal.parent, "the checkpoint directory")
        if self.journal.parent != self.output.parent:
            check_writable(self.journal)
        beside = (self.report, self.journal, *self.locks, self.trace)
        for path in (*beside, *map(temporary_path, (self.output, self.report))):
            check_free(path)
        for name in inputs:
            if self.holds(name):
                raise UsageError(f"the input {name} would be overwritten by this job", hint="name another output")

    def holds(self, name: str) -> bool:
        """Tell whether a file is one that the job writes."""
        files = (self.output, errors_path(self.output), self.report, self.journal, *self.locks, self.trace)
        return any(is_same_file(name, path) for path in files)


def lock_path(output: Path) -> Path:
    """Return where the lock of an output is: beside the file itself where the output is a link to one."""
    is_link = os.path.islink(output)  # noqa: PTH114 is_symlink fails where a name is too long
    return _beside(Path(os.path.realpath(output)) if is_link else output, ".lock")


def report_path(output: Path) -> Path:
    """Return where the report of an output is."""
    return _beside(output, ".report.json")


def trace_path(output: Path) -> Path:
    """Return where the step trace of an output is."""
    return _beside(output, TRACE_SUFFIX)


def errors_path(output: Path) -> Path:
    """Return where the failed requests of an OpenAI Batch are."""
    return _beside(output, ".errors.jsonl")


def _beside(output: Path, suffix: str) -> Path:
    if not output.name:
        raise UsageError(f"'{output}' names no file", hint="name the output of a run")
    return output.with_name(output.name + suffix)
