"""Which of a few configurations of a kernel is fastest on a card: timed once, kept in the user's cache.

A file holds the choices for one kind of card, one version of Triton and one text of the kernels; a choice is a tuple of
whole numbers under a key that names the kernel and what it was timed for. Processes that start at once may all time:
each writes a file of its own with what was there and what it found, and renames it into place, so that a reader meets a
whole file always and the last one's choices at worst. A damaged file counts as none, and where the cache cannot be
written, the choices are this process's alone.

Called by `triton_tuning`. Imports no Triton: what is timed, and by which clock, it is told.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model decides which configurations are fastest."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int  # of an MLP

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and the width of either."""
        return self.num_heads, self.num_kv_heads, self.head_dim


class TunedChoices:
    """The choices of one file."""

    def __init__(self, file: Path | None) -> None:
        """Without a file nothing is kept."""
        self._file = file
        self._found = self._read()

    def get(self, key: str) -> Values | None:
        """Give what was chosen before."""
        return self._found.get(key)

    def choose(
        self, key: str, candidates: Sequence[Values], run: Callable[[Values], object], clock: Callable[..., float]
    ) -> Values:
        """Give what was chosen before, or time the candidates and keep the fastest.

        `clock` is given a call and returns how long it takes. A candidate that fails (a card may lack the memory for
        it) is none; where all fail nothing is kept and the first is given.
        """
        if (known := self._found.get(key)) in candidates:
            assert known is not None
            return known
        times: dict[Values, float] = {}
        for values in candidates:
            try:
                times[values] = clock(lambda values=values: run(values))
            except Exception as error:  # whatever the compiler or the driver says
                logger.info("%s with %s cannot run: %s", key, values, error)
        if not times:
            return candidates[0]
        best = min(times, key=times.__getitem__)
        self._keep(key, best)
        return best

    def _keep(self, key: str, values: Values) -> None:
        self._found = self._read() | self._found | {key: values}
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._file.parent, prefix=f"{self._file.stem}-", encoding="utf-8", delete=False
            ) as file:
                json.dump(self._found, file)
            Path(file.name).replace(self._file)
        except OSError as error:
            logger.info("the choices are this process's alone: %s", error)

    def _read(self) -> dict[str, Values]:
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8")) if self._file is not None else {}
            return {str(key): tuple(int(value) for value in values) for key, values in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def fingerprint(sources: Iterable[Path], *parts: str) -> str:
    """Hash what a choice depends on: the kernels' text and what else is named."""
    texts = [text for source in sorted(sources) for text in (source.name, source.read_text(encoding="utf-8"))]
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:24]
