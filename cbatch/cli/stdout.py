"""`-o -`: results on standard output. Used by `run`.

A job needs a place for its journal, so its output is a file in the checkpoint folder as for any other job, and is
copied once it is whole: whoever stops reading loses nothing.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from cbatch.compatibility import Facts, check
from cbatch.config import JobConfig
from cbatch.errors import OutputError, UsageError
from cbatch.io.atomic import check_folder

STDOUT = "-"
FILE = "stdout.jsonl"


def with_file(job: JobConfig) -> JobConfig:
    """Return the job with a file in the place of standard output. Raises UsageError where there is no folder for it.

    A job whose output is a file is returned as it is.
    """
    if job.output != STDOUT:
        return job
    if job.checkpoint_dir is None:
        raise UsageError(
            "-o - leaves no place for the journal from which a job resumes", hint="add --checkpoint-dir FOLDER"
        )
    check(Facts(stdout=True, shard=job.shard is not None))
    check_folder(Path(job.checkpoint_dir), "the folder of --checkpoint-dir,")
    return replace(job, output=str(Path(job.checkpoint_dir) / FILE))


def copy_out(path: Path) -> None:
    """Write a finished output to standard output. Raises BrokenPipeError, OutputError."""
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"cannot write standard output: {error.strerror}"
        raise OutputError(problem, hint=f"the results are in {path}") from error
