"""The input of a job: names in, one stream of rows out. Called by jobs; each file format is an entry in one table.

Errors of single rows are rows (`Row.error`); an input that cannot be read, or not to its end, raises InputError after
the good rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cbatch.errors import UsageError
from cbatch.io import csvfile, jsonl
from cbatch.io.inputs import expand
from cbatch.io.remote import is_url
from cbatch.io.rows import Row
from cbatch.io.streams import ENCODINGS, STDIN, open_binary, read_chunks, reading

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSED_SUFFIXES = (".gz", ".zst")


class Part(Protocol):
    """One file or dataset of the input."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def schema(self) -> pa.Schema | None:
        """Its columns' Arrow types where it declares them."""

    def read(self, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
        """Yield the rows, counted from `first_index`, cast to the types of the whole input where it has them."""


@dataclass(frozen=True, slots=True)
class Source:
    """Every row of the inputs, in their order. Iterating again reads again (standard input only once).

    `schema` holds the columns' Arrow types where every part declares them and they agree, else None.
    """

    parts: tuple[Part, ...]
    schema: pa.Schema | None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all parts, patterns expanded."""
        return tuple(part.name for part in self.parts)

    def __iter__(self) -> Iterator[Row]:
        index = 0
        for part in self.parts:
            for row in part.read(index, self.schema):
                yield row
                index = row.index + 1


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part that is read from bytes."""

    name: str
    format: Format
    schema: pa.Schema | None

    def read(self, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
        return self.format.read(self.name, first_index, schema)


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one format are told and read."""

    suffixes: tuple[str, ...]
    magic: bytes | None  # the first bytes, which win over the suffix
    read: Callable[[str, int, pa.Schema | None], Iterator[Row]]  # name, index of the first row, types to cast to
    schema: Callable[[str], pa.Schema | None]  # of one file; None where the format declares none


def _read_jsonl(name: str, first_index: int, _schema: pa.Schema | None) -> Iterator[Row]:
    return jsonl.read_jsonl("stdin" if name == STDIN else name, read_chunks(name), first_index)


def _read_csv(name: str, first_index: int, _schema: pa.Schema | None) -> Iterator[Row]:
    return csvfile.read_csv(name, read_chunks(name), first_index)


def _csv_schema(name: str) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(column, pa.string()) for column in csvfile.read_header(name, read_chunks(name))])


def _read_parquet(name: str, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
    from cbatch.io.parquet import read_parquet

    return read_parquet(name, first_index, schema)


def _parquet_schema(name: str) -> pa.Schema:
    from cbatch.io.parquet import read_schema

    return read_schema(name)


JSONL = Format((".jsonl", ".ndjson", ".json"), None, _read_jsonl, lambda name: None)
FORMATS = (
    JSONL,
    Format((".parquet", ".pq"), b"PAR1", _read_parquet, _parquet_schema),
    Format((".csv",), None, _read_csv, _csv_schema),
)


def open_source(
    inputs: Sequence[str], *, split: str | None = None, leave_out: Callable[[str], bool] = lambda _name: False
) -> Source:
    """Find the inputs, check that they can be opened and tell their formats; `split` is a dataset's, `leave_out` as in
    `expand`.

    An input is a file, a pattern, a URL, "-" for standard input (JSON lines), a folder of `save_to_disk` or a dataset's
    name on the hub. Raises UsageError for a name that can be none of these, InputError for what cannot be read.
    """
    parts = tuple(_open_part(name, split) for name in expand(inputs, leave_out))
    if split is not None and all(isinstance(part, FilePart) for part in parts):
        raise UsageError("--dataset-split is for datasets, and the input is none")
    return Source(parts, _common_schema([part.schema for part in parts]))


def _open_part(name: str, split: str | None) -> Part:
    if name == STDIN:
        return FilePart(name, JSONL, None)
    if not is_url(name):
        path = Path(name)
        with reading(name):
            is_folder, exists, is_file = path.is_dir(), path.exists(), path.is_file()
        if is_folder or not exists:
            return _open_dataset(path, name, split)
        if not is_file:  # a pipe, whose first bytes can be read only once
            return FilePart(name, JSONL, None)
    form = _format_of(name)
    part = FilePart(name, form, form.schema(name))
    if not is_url(name):
        next(part.read(0, part.schema), None)  # a file that is something else is told before anything costly runs
    return part


def _open_dataset(path: Path, name: str, split: str | None) -> Part:
    """Open what is no file: a dataset, or the user's mistake."""
    from cbatch.io import hf_datasets

    if path.is_dir():
        if hf_datasets.is_dataset_folder(path):
            return hf_datasets.open_folder(name, split)
        raise UsageError(f"the input {name} is a directory", hint=f"name the files in it: '{name}/*.jsonl'")
    if _format_by_suffix(name) is None and hf_datasets.is_hub_name(name):
        return hf_datasets.open_hub(name, split)
    raise UsageError(f"no such input: {name}")


def _format_of(name: str) -> Format:
    """Tell a file's format by its first bytes, else by its suffix. Raises UsageError, InputError."""
    with open_binary(name) as stream:
        head = stream.peek(max(len(encoding.magic) for encoding in ENCODINGS))
    for form in FORMATS:
        if form.magic is not None and head.startswith(form.magic):
            return form
    by_suffix = _format_by_suffix(name)
    if by_suffix is not None:
        return by_suffix
    if next(read_chunks(name), b"").removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return JSONL
    known = ", ".join(suffix for form in FORMATS for suffix in form.suffixes)
    raise UsageError(f"cannot tell the format of the input {name}", hint=f"end its name in one of {known}")


def _format_by_suffix(name: str) -> Format | None:
    path = name.partition("?")[0] if is_url(name) else name
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED_SUFFIXES), None)
    return next((form for form in FORMATS if suffix in form.suffixes), None)


def _common_schema(schemas: Sequence[pa.Schema | None]) -> pa.Schema | None:
    """The types of all columns of all parts, where every part declares its own and they agree."""
    declared = [schema for schema in schemas if schema is not None]
    if len(declared) < len(schemas):
        return None
    if len(declared) == 1:
        return declared[0]
    import pyarrow as pa

    try:
        return pa.unify_schemas(declared, promote_options="permissive")
    except pa.ArrowException:
        return None
