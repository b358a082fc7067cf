"""The output's Arrow schema: the input's columns as declared or inferred, then ours. Called by jobs for Parquet output.

Imports pyarrow, so it is itself imported only where a schema is needed.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from cbatch.errors import UsageError
from cbatch.io.arrowform import JSON_TEXT, map_inner_types
from cbatch.io.columns import RESULT_COLUMNS, TOP_LOGPROBS

# The types by their spelling in `cbatch.io.columns`.
ARROW_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "list<string>": pa.list_(pa.string()),
    "list<int64>": pa.list_(pa.int64()),
    "list<double>": pa.list_(pa.float64()),
    TOP_LOGPROBS: pa.list_(
        pa.list_(pa.struct([("token", pa.string()), ("token_id", pa.int64()), ("logprob", pa.float64())]))
    ),
    "struct<code: string, message: string>": pa.struct([("code", pa.string()), ("message", pa.string())]),
    "timestamp[us, UTC]": pa.timestamp("us", "UTC"),
}


def output_schema(input_schema: pa.Schema, names: dict[str, str]) -> pa.Schema:
    """Put our columns, under the `names` of `columns.output_names`, after the input's."""
    types = {column.name: ARROW_TYPES[column.type] for column in RESULT_COLUMNS}
    ours = [pa.field(name, types[column]) for column, name in names.items()]
    # Metadata of the whole input (pandas indices, Hugging Face features) would be wrong with other columns beside it.
    return pa.schema([*map(_parquet_field, input_schema), *ours])


def portable_schema(schema: pa.Schema, name: str) -> pa.Schema:
    """Return the input `name`'s schema in types that Parquet and the JSON form can hold. Raises UsageError."""
    fields = {field.name: field.with_type(portable_type(field.type)) for field in schema}
    if len(fields) < len(schema):
        raise UsageError(f"{name} has two columns of one name", hint="rename one of them")
    for field in schema:
        try:
            portable_column(pa.array([], field.type), fields[field.name].type)
        except (pa.ArrowException, NotImplementedError) as error:
            raise UsageError(
                f"{name}: column {field.name} has the type {field.type}, which cannot be read",
                hint="leave it out or convert it",
            ) from error
    return pa.schema(list(fields.values()))


def portable_type(kind: pa.DataType) -> pa.DataType:
    """Return the type itself where Parquet and the JSON form can hold it, else the plainest equivalent."""
    if isinstance(kind, pa.BaseExtensionType):
        return portable_type(kind.storage_type)
    if pat.is_dictionary(kind) and (pat.is_string(kind.value_type) or pat.is_large_string(kind.value_type)):
        return pa.dictionary(pa.int32(), kind.value_type)
    return map_inner_types(kind, _portable_inner)


def portable_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to the type that a portable schema gives it. Raises pa.ArrowException."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowIndexError:  # Arrow's own error: a struct of an empty dictionary cannot be cast
        return pa.array(column.to_pylist(), kind)


def _portable_inner(kind: pa.DataType) -> pa.DataType:
    return portable_type(kind.value_type if pat.is_dictionary(kind) else kind)


def _parquet_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, pa.string(), metadata=JSON_TEXT) if _has_empty_struct(field.type) else field


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Parquet cannot hold a struct without fields."""
    inner: list[Any] = [kind.field(i).type for i in range(kind.num_fields)]
    return (pat.is_struct(kind) and not inner) or any(map(_has_empty_struct, inner))
