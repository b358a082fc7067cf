"""The output of a job: records in their JSON form to a file that appears complete or not at all. Called by jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cbatch.errors import UsageError
from cbatch.io.atomic import AtomicFile, check_writable, writing
from cbatch.io.jsonform import dump_line

if TYPE_CHECKING:
    import pyarrow as pa

    from cbatch.io.arrowform import Convert


class Sink(ABC):
    """Takes records in output order; nothing is at the final path before `commit()`. Methods raise OutputError."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self.num_nulled = 0  # records with null in the place of a number that the format lacks

    @abstractmethod
    def write(self, record: dict[str, Any]) -> None:
        """Add one record in its JSON form."""

    def commit(self) -> None:
        """Make the file durable and let it appear under its name."""
        self._file.commit()

    def abort(self) -> None:
        """Remove what was written; does nothing after `commit()`."""
        self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


class JsonlSink(Sink):
    """JSON lines: one record a line, keys in the record's order; of the schema only what JSON lacks matters."""

    def __init__(self, path: Path, schema: pa.Schema | None) -> None:
        super().__init__(path)
        self._converts: dict[str, Convert] = {}  # by column
        self._has_nulled = False  # whether the record at hand has
        if schema is not None:
            from cbatch.io.arrowform import replace_non_finite

            converts = {field.name: replace_non_finite(field.type, self._null) for field in schema}
            self._converts = {name: convert for name, convert in converts.items() if convert is not None}

    def write(self, record: dict[str, Any]) -> None:
        if self._converts:
            self._has_nulled = False
            record = {name: self._converts.get(name, _same)(value) for name, value in record.items()}
            self.num_nulled += self._has_nulled
        with writing(self._file.path):
            self._file.file.write(dump_line(record))

    def _null(self, _name: str) -> None:
        self._has_nulled = True


def check_output(path: str) -> None:
    """Check at start-up that `open_sink(path)` will be able to write. Raises UsageError or OutputError."""
    _suffix(path)
    check_writable(Path(path))


def open_sink(path: str, schema: pa.Schema | None = None) -> Sink:
    """Open the output by its suffix: .jsonl, or .parquet, which needs the `schema` of the records.

    For .jsonl give it where the input declares one, so that NaN and infinities in it become null.
    Raises UsageError for another suffix, OutputError where the file cannot be written.
    """
    return SINKS[_suffix(path)](Path(path), schema)


def _open_parquet(path: Path, schema: pa.Schema | None) -> Sink:
    from cbatch.io.parquet import ParquetSink

    assert schema is not None, "Parquet needs the schema of the records"
    return ParquetSink(path, schema)


SINKS: dict[str, Callable[[Path, pa.Schema | None], Sink]] = {".jsonl": JsonlSink, ".parquet": _open_parquet}


def _suffix(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SINKS:
        raise UsageError(f"cannot tell the format of the output {path}", hint=f"end it in {' or '.join(SINKS)}")
    return suffix


def _same(value: Any) -> Any:
    return value
