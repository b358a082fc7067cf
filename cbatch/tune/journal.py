"""The journal of a search: every trial, a line of JSON each, on disk as soon as it ended; what a search resumes from.

A line belongs to a search by its key: the same model, rows, fixed options and machine. Lines of other searches stay.
Written by the search's process only, under the output's lock.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cbatch.io.atomic import fsync_directory, writing
from cbatch.tune.space import Value
from cbatch.tune.trial import Outcome

MAX_DEATHS = 2  # of a process while it ran one trial; the first may be anybody's doing
DIED = "the process ended while it ran, more than once"

_Trial = tuple[str, int]  # settings as JSON, rung


class TrialJournal:
    """The lines of one search, and the file that more are appended to."""

    def __init__(self, path: Path, key: str) -> None:
        """Read what is there. Raises OutputError."""
        self._path = path
        self._key = key
        self._recorded: dict[_Trial, list[Outcome]] = defaultdict(list)
        self._deaths: Counter[_Trial] = Counter()
        self.sample: dict[str, Any] | None = None
        self.settings: list[dict[str, Value]] = []  # of every trial that is there
        self.earlier_s = 0.0  # spent on them
        with writing(path):
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fsync_directory(path.parent)
        self._is_torn = bool(lines and lines[-1])
        for line in lines:
            self._read(line)
        self.num_trials = sum(map(len, self._recorded.values()))

    def take(self, settings: Mapping[str, Value], rung: int) -> Outcome | None:
        """Take the next recorded outcome of these settings over a rung's sample; None once all were taken."""
        trial = (_spell(settings), rung)
        recorded = self._recorded[trial]
        if recorded:
            return recorded.pop(0)
        return Outcome(status="failed", reason=DIED) if self._deaths[trial] >= MAX_DEATHS else None

    def has(self, settings: Mapping[str, Value], rung: int) -> bool:
        """Whether `take` has an outcome."""
        trial = (_spell(settings), rung)
        return bool(self._recorded[trial]) or self._deaths[trial] >= MAX_DEATHS

    def note_sample(self, sample: Mapping[str, Any], seconds: float) -> None:
        """Keep the sample, and what it took to find it."""
        self._append({"sample": dict(sample), "seconds": seconds})

    def note_start(self, settings: Mapping[str, Value], rung: int) -> None:
        """Say that a trial begins, should the process not live to say how it ended."""
        self._append({"starts": dict(settings), "rung": rung})

    def note_abandoned(self, settings: Mapping[str, Value], rung: int) -> None:
        """Say that a trial was stopped in order, and is none."""
        self._append({"abandoned": dict(settings), "rung": rung})

    def note_trial(self, settings: Mapping[str, Value], rung: int, outcome: Outcome) -> None:
        """Keep a trial's outcome."""
        self._append({"trial": dict(settings), "rung": rung, "outcome": asdict(outcome)})

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, value: dict[str, Any]) -> None:
        line = b"\n" * self._is_torn + json.dumps({"key": self._key, **value}).encode() + b"\n"
        self._is_torn = True
        with writing(self._path):
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        self._is_torn = False

    def _read(self, line: bytes) -> None:
        """Take note of a line; one that is torn, or another search's, says nothing."""
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict) or value.get("key") != self._key:
            return
        if "sample" in value:
            self.sample = value["sample"]
            self.earlier_s += value["seconds"]
        elif "starts" in value:
            self._deaths[_spell(value["starts"]), value["rung"]] += 1
        elif "abandoned" in value:
            self._deaths[_spell(value["abandoned"]), value["rung"]] -= 1
        elif "trial" in value:
            trial, outcome = (_spell(value["trial"]), value["rung"]), Outcome(**value["outcome"])
            self._recorded[trial].append(outcome)
            self._deaths[trial] = 0
            self.earlier_s += outcome.wall_s
            if value["trial"] not in self.settings:
                self.settings.append(value["trial"])


def _spell(settings: Mapping[str, Value]) -> str:
    return json.dumps(dict(sorted(settings.items())))
