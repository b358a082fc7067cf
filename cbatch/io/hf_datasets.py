"""Hugging Face datasets in: folders of `save_to_disk` and names on the hub, through `datasets` (an optional extra).

Called by `cbatch.io.sources`. Rows of the hub are streamed; with HF_HUB_OFFLINE they come from the local cache.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbatch.errors import InputError, UsageError
from cbatch.io.parquet import READ_ROWS, rows_of_batches
from cbatch.io.rows import Row
from cbatch.io.schema import portable_schema

INSTALL = 'pip install "cbatch[datasets]"'
_FOLDER_FILES = ("dataset_info.json", "dataset_dict.json")


class DatasetPart:
    """One split of a dataset, opened: its schema where it is declared, and its rows as often as asked."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self._dataset = dataset
        declared = dataset.features is not None
        self.schema = portable_schema(dataset.features.arrow_schema, name) if declared else None

    def read(self, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
        """Yield the rows. Raises InputError where they cannot be read further."""
        return rows_of_batches(self.name, self._batches(), first_index, schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        tables = iter(self._dataset.with_format("arrow").iter(batch_size=READ_ROWS))
        while True:
            table = _attempt(InputError, f"cannot read {self.name}", lambda: next(tables, None))
            if table is None:
                return
            yield from table.to_batches()


def is_dataset_folder(path: Path) -> bool:
    """Tell what `save_to_disk` writes from other directories."""
    return any((path / name).is_file() for name in _FOLDER_FILES)


def is_hub_name(name: str) -> bool:
    """Tell whether a name can be a dataset of the hub: "owner/name", or "owner/name:config"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?", name) is not None


def open_folder(path: str, split: str | None) -> DatasetPart:
    """Open a folder of `save_to_disk`. Raises UsageError."""
    found = _attempt(UsageError, f"cannot open the dataset {path}", lambda: _datasets(path).load_from_disk(path))
    return DatasetPart(path, _choose(path, found, split))


def open_hub(name: str, split: str | None) -> DatasetPart:
    """Open a dataset of the hub. Raises UsageError."""
    datasets = _datasets(name, "no such file; reading it as a dataset of the Hugging Face hub needs")
    repository, _, config = name.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE

    def load() -> Any:
        return datasets.load_dataset(repository, config or None, streaming=not offline)

    found = _attempt(UsageError, f"no such file, nor can the dataset {name} be opened", load)
    return DatasetPart(name, _choose(name, found, split))


def _datasets(name: str, reason: str = "reading it needs") -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(f"{name}: {reason} the package datasets", hint=INSTALL) from error


def _choose(name: str, found: Any, split: str | None) -> Any:
    """The split asked for, or the only one."""
    if not isinstance(found, dict):  # a folder of a single split does not say which
        if split is not None and split != str(found.split):
            raise UsageError(f"{name} holds one split, {found.split}", hint="leave --dataset-split out")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        problem = "has several splits" if split is None else f"has no split {split!r}"
        raise UsageError(f"{name} {problem}", hint=f"--dataset-split {'|'.join(map(str, found))}")
    return found[split]


def _attempt(kind: type[UsageError] | type[InputError], problem: str, action: Callable[[], Any]) -> Any:
    """Run one operation of `datasets`; whatever it raises becomes one of our errors, in one line."""
    try:
        return action()
    except UsageError:
        raise
    except Exception as error:  # builders, file systems and decoders all raise their own
        raise kind(f"{problem}: {' '.join(str(error).split())}") from error
