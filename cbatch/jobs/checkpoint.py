"""What earlier runs of a job left: the journal, and which rows are finished by it. Called once the lock is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cbatch.errors import UsageError
from cbatch.io.atomic import writing
from cbatch.jobs.journal import Head, Journal
from cbatch.jobs.ledger import Ledger
from cbatch.jobs.results import Session
from cbatch.jobs.setup import JobSetup

# What decides over a result's bits beside model and row: settings, and versions.
BITS_SETTINGS = ("dtype", "device", "num_threads", "patched", "attention")
BITS_VERSIONS = ("torch", "transformers")
CLOCK = "clock"  # the fact that says when the job began, in the local time of the machine on which it did


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open journal and what it says."""

    journal: Journal
    ledger: Ledger
    session: Session  # this process's
    facts: dict[str, Any]  # what the last session wrote down of itself
    clock: datetime  # when the job's first session began: the time in prompts whose template prints it


def open_checkpoint(setup: JobSetup, say: Callable[[str], None]) -> Checkpoint:
    """Open or begin the journal. Raises UsageError for an output that is not this job's, OutputError."""
    job, paths = setup.job, setup.paths
    if job.restart:
        # The report too: by it a finished output is known for what the journal holds, which begins anew.
        for path in (paths.journal, paths.trace, paths.report):
            with writing(path):
                path.unlink(missing_ok=True)
    elif paths.output.exists() and not paths.journal.exists():
        raise UsageError(
            f"{paths.output} exists, and there is no journal of it at {paths.journal}",
            hint="--restart replaces it; or name another output",
        )
    journal = Journal(paths.journal)
    try:
        return _recover(setup, journal, say)
    except BaseException:
        journal.close()
        raise


def _recover(setup: JobSetup, journal: Journal, say: Callable[[str], None]) -> Checkpoint:
    job, paths = setup.job, setup.paths
    reader = journal.reader()
    ledger = Ledger(journal.count_lines(), reader.has_key, reader.has_source)
    session = Session(0, setup.fit, job.return_token_ids, job.retry_errors)

    def add(head: Head, offset: int) -> None:
        ledger.add(head.key, offset, head.attempt, ok=head.ok, retry=session.wants_again(head))

    recovery = journal.recover(add)
    if len(ledger):
        say(f"{len(ledger)} finished rows found in {paths.journal}")
    if recovery.num_damaged:
        say(f"{recovery.num_damaged} damaged lines in {paths.journal} are left out")
    session = Session(recovery.num_sessions + 1, setup.fit, job.return_token_ids, job.retry_errors)
    began = recovery.facts.get(CLOCK)
    clock = datetime.now() if began is None else datetime.fromisoformat(began)
    return Checkpoint(journal, ledger, session, recovery.facts, clock)


def check_same_bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on, where the same bits were asked for, with arithmetic unlike that of the rows that are finished.

    Takes the facts of two sessions. Raises UsageError.
    """
    earlier, current = _arithmetic(before), _arithmetic(now)
    changed = [name for name in earlier if name in current and earlier[name] != current[name]]
    if changed:
        name = changed[0]
        raise UsageError(
            f"the finished rows were computed with {name} {earlier[name]}, and this run has {current[name]}: "
            "deterministic cannot hold over both",
            hint="run with what there was; or --restart computes all rows anew",
        )


def _arithmetic(facts: Mapping[str, Any]) -> dict[str, object]:
    settings, versions = facts.get("settings", {}), facts.get("versions", {})
    found = {name: settings[name]["value"] for name in BITS_SETTINGS if name in settings}
    return found | {name: versions[name] for name in BITS_VERSIONS if name in versions}
