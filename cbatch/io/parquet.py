"""Parquet in and out, streamed by row batches and row groups. Called by `cbatch.io.sources` and `cbatch.io.sinks`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch.errors import InputError, RowError
from cbatch.io.arrowform import clean_text, from_json, is_json_text, replace_non_finite, to_json
from cbatch.io.atomic import writing
from cbatch.io.jsonform import load
from cbatch.io.rows import Row
from cbatch.io.schema import portable_column, portable_schema, portable_type
from cbatch.io.sinks import Sink
from cbatch.io.streams import open_binary

READ_ROWS = 256  # rows turned into Python values at a time
READ_BUFFER_BYTES = 1 << 20  # of a column's pages, instead of all of a row group's
WRITE_ROWS = 256
ROW_GROUP_BYTES = 64 << 20  # in Arrow's uncompressed form


def read_schema(name: str) -> pa.Schema:
    """Return the columns of a Parquet file in portable types. Raises InputError and UsageError."""
    with _open(name) as file:
        return portable_schema(file.schema_arrow, name)


def read_parquet(name: str, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
    """Yield the rows of one file, its columns cast to those of `schema`, whose JSON form names NaN and infinities.

    Raises InputError where the file cannot be read further.
    """
    with _open(name) as file:
        yield from rows_of_batches(name, _batches(file), first_index, schema)


def rows_of_batches(
    name: str, batches: Iterable[pa.RecordBatch], first_index: int, schema: pa.Schema | None
) -> Iterator[Row]:
    """Yield the rows of Arrow batches; `schema` as in `read_parquet`."""
    number = 0
    for batch in batches:
        for columns, error in _batch_rows(batch, schema):
            yield Row(first_index + number, f"{name}[{number}]", columns, error)
            number += 1


def _batch_rows(batch: pa.RecordBatch, schema: pa.Schema | None) -> Iterator[tuple[dict[str, Any], RowError | None]]:
    names = batch.schema.names
    try:
        columns = [_values(column, field, schema) for field, column in zip(batch.schema, batch.columns, strict=True)]
    except UnicodeDecodeError as error:  # a text column whose bytes are none: find the row
        if batch.num_rows == 1:
            yield {}, RowError("invalid_utf8", f"a text column is not UTF-8: {error.reason}")
            return
        for position in range(batch.num_rows):
            yield from _batch_rows(batch.slice(position, 1), schema)
        return
    for position in range(batch.num_rows):
        yield {name: values[position] for name, values in zip(names, columns, strict=True)}, None


def _values(column: pa.Array, field: pa.Field, schema: pa.Schema | None) -> list[Any]:
    if is_json_text(field):
        return [_parse(text) for text in to_json(portable_column(column, pa.string()))]
    if schema is not None:
        return to_json(portable_column(column, schema.field(field.name).type))
    kind = portable_type(column.type)
    as_numbers = replace_non_finite(kind, float)
    values = to_json(portable_column(column, kind))
    return values if as_numbers is None else [as_numbers(value) for value in values]


def _parse(text: str | None) -> Any:
    """What a job has written as JSON text, for want of a type; text that has become none stays as it is."""
    try:
        return None if text is None else load(text)
    except ValueError:
        return text


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Row group by row group, so that a damaged one takes no rows of the one before it with it."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(batch_size=READ_ROWS, row_groups=[group], use_threads=False)


@contextmanager
def _open(name: str) -> Iterator[pq.ParquetFile]:
    with open_binary(name) as stream:
        try:
            yield pq.ParquetFile(stream, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
        except pa.ArrowException as error:
            raise InputError(f"cannot read {name} as Parquet: {error}", hint="is the file complete?") from error


class ParquetSink(Sink):
    """Parquet of one declared schema, in row groups of bounded memory."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path)
        self._schema = schema
        self._names = frozenset(schema.names)
        self._records: list[dict[str, Any]] = []
        self._num_chars = 0  # of the records' text
        self._batches: list[pa.RecordBatch] = []
        self._num_bytes = 0  # of the batches
        with writing(path):
            self._writer = pq.ParquetWriter(self._file.file, schema, compression="zstd")

    def write(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        self._num_chars += _text_size(record)
        if len(self._records) == WRITE_ROWS or self._num_chars >= ROW_GROUP_BYTES:
            self._convert()
            if self._num_bytes >= ROW_GROUP_BYTES:
                self._write_row_group()

    def commit(self) -> None:
        self._convert()
        self._write_row_group()
        with writing(self._file.path):
            self._writer.close()
        super().commit()

    def abort(self) -> None:
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):  # writes a footer that nobody will see
            self._writer.close()
        super().abort()

    def _convert(self) -> None:
        """Turn the records at hand into a batch."""
        records = [self._by_schema(record) for record in self._records]
        columns = [from_json([record.get(field.name) for record in records], field) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._batches.append(batch)
        self._num_bytes += batch.nbytes
        self._records.clear()
        self._num_chars = 0

    def _by_schema(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record under the schema's names, which hold no lone surrogates."""
        if record.keys() <= self._names:
            return record
        record = {clean_text(name): value for name, value in record.items()}
        assert record.keys() <= self._names, f"columns without a type: {sorted(record.keys() - self._names)}"
        return record

    def _write_row_group(self) -> None:
        if sum(batch.num_rows for batch in self._batches):
            with writing(self._file.path):
                table = pa.Table.from_batches(self._batches, self._schema)
                self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches.clear()
        self._num_bytes = 0


def _text_size(value: Any) -> int:
    """Count the characters of all text in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    has_text = isinstance(value, list) and value and isinstance(value[0], str | dict | list)
    return sum(map(_text_size, value)) if has_text else 0
