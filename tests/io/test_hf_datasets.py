"""Hugging Face datasets in, from a folder and from the hub, without a network (spec I1)."""

import importlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cbatch.errors import InputError, UsageError
from cbatch.io.hf_datasets import is_hub_name
from cbatch.io.sources import open_source

datasets = pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    columns = {"prompt": ["a", "b", "c"], "n": [1, None, 3], "when": [datetime(2026, 1, 31)] * 3}
    datasets.Dataset.from_dict(columns).select([2, 0]).save_to_disk(str(tmp_path / "data"))
    return str(tmp_path / "data")


@pytest.fixture
def splits(tmp_path: Path) -> str:
    parts = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "splits"))
    return str(tmp_path / "splits")


def test_a_folder_has_rows_and_declared_types(folder: str) -> None:
    source = open_source([folder])
    assert source.schema is not None
    assert source.schema.field("n").type == pa.int64()
    assert pa.types.is_timestamp(source.schema.field("when").type)
    for _ in range(2):  # a source can be read again
        rows = list(source)
        assert [(row.columns["prompt"], row.columns["n"]) for row in rows] == [("c", 3), ("a", 1)]
    assert rows[1].location == f"{folder}[1]"
    assert rows[0].columns["when"].startswith("2026-01-31T00:00:00")


def test_a_split_is_chosen_by_name(splits: str) -> None:
    assert [row.columns["prompt"] for row in open_source([splits], split="test")] == ["test"]
    for split in (None, "dev"):
        with pytest.raises(UsageError, match=r"split.*--dataset-split train\|test"):
            open_source([splits], split=split)


def test_the_only_split_needs_no_name(folder: str, tmp_path: Path) -> None:
    datasets.DatasetDict({"dev": datasets.load_from_disk(folder)}).save_to_disk(str(tmp_path / "one"))
    assert len(list(open_source([str(tmp_path / "one")]))) == 2


def test_a_damaged_folder_is_one_clear_error(folder: str) -> None:
    (Path(folder) / "state.json").unlink()
    with pytest.raises(UsageError, match="cannot open the dataset"):
        open_source([folder])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets the hub serve files of a folder: `owner/name` is `name.jsonl`."""
    load = datasets.load_dataset

    def load_local(name: str, config: str | None, *, streaming: bool) -> Any:
        file = tmp_path / f"{name.split('/')[1]}.jsonl"
        if not file.exists():
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        assert config in (None, "main")
        return load("json", data_files={"train": str(file)}, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_local)
    return tmp_path


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_name_is_read(hub: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    (hub / "name.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "i": i}) + "\n" for i in range(600)))
    source = open_source(["owner/name:main"], split="train")
    rows = list(source)
    assert [row.columns for row in rows] == [{"prompt": f"p{i}", "i": i} for i in range(600)]
    assert rows[599].location == "owner/name:main[599]"


def test_a_stream_that_breaks_is_an_error_after_the_good_rows(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # offline nothing is streamed
    good = "".join(json.dumps({"prompt": "x" * 100}) + "\n" for _ in range(200_000))
    (hub / "name.jsonl").write_text(good + "{broken\n")
    rows = iter(open_source(["owner/name"]))
    assert next(rows).columns == {"prompt": "x" * 100}
    with pytest.raises(InputError, match="cannot read owner/name"):
        for _ in rows:
            pass


def test_an_unknown_name_is_a_usage_error(hub: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file.*doesn't exist on the Hub"):
        open_source(["owner/missing"])


def test_without_the_package_the_way_out_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, package: str | None = None) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    for name in (folder, "owner/name"):
        with pytest.raises(UsageError) as caught:
            open_source([name])
        assert caught.value.hint == 'pip install "cbatch[datasets]"'


def test_hub_names_are_told_from_paths() -> None:
    assert all(map(is_hub_name, ("owner/name", "a-b/c.d", "owner/name:main")))
    assert not any(map(is_hub_name, ("name", "./name", "../name", "a/b/c", "/a/b", "a/b c")))
