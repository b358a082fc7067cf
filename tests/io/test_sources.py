"""What can be named as input, and what is said of what cannot (spec I1, I7)."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from cbatch.errors import InputError, UsageError
from cbatch.io.sources import open_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("part-2.jsonl", "part-10.jsonl", "part-1.jsonl", "other.jsonl", "[a]*.jsonl"):
        Path(name).write_text(f'{{"file": "{name}"}}\n')
    return tmp_path


def files_read(*inputs: str) -> list[str]:
    return [row.columns["file"] for row in open_source(inputs)]


def test_several_files_are_read_in_the_order_given(folder: Path) -> None:
    assert files_read("part-2.jsonl", "other.jsonl", "part-1.jsonl") == ["part-2.jsonl", "other.jsonl", "part-1.jsonl"]


def test_a_pattern_is_its_files_sorted(folder: Path) -> None:
    (folder / "part-dir.jsonl").mkdir()
    assert files_read("part-*.jsonl") == ["part-1.jsonl", "part-10.jsonl", "part-2.jsonl"]
    assert files_read("other.jsonl", "part-[12].jsonl") == ["other.jsonl", "part-1.jsonl", "part-2.jsonl"]
    assert files_read(f"{folder}/**/part-1*.jsonl") == ["part-1.jsonl", "part-10.jsonl"]
    assert open_source(["part-*.jsonl"]).inputs == ("part-1.jsonl", "part-10.jsonl", "part-2.jsonl")


def test_a_name_that_exists_is_no_pattern(folder: Path) -> None:
    assert files_read("[a]*.jsonl") == ["[a]*.jsonl"]


def test_a_pattern_without_a_match_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no file matches nothing-\*\.jsonl"):
        open_source(["part-1.jsonl", "nothing-*.jsonl"])


def test_a_missing_file_is_an_error(folder: Path) -> None:
    for name in ("missing.jsonl", "missing", "some/where/missing.jsonl", "data/missing.parquet"):
        with pytest.raises(UsageError, match=f"no such input: {name}"):
            open_source([name])


def test_a_directory_is_an_error_with_the_way_out(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"is a directory.*\*\.jsonl"):
        open_source([str(folder)])


def test_an_unreadable_file_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"cannot read other.jsonl: Permission denied"):
        open_source(["other.jsonl"])


def test_an_unknown_suffix_is_an_error_unless_json_lines_are_inside(folder: Path) -> None:
    Path("prompts.txt").write_text("Hello there\n")
    with pytest.raises(UsageError, match=r"prompts\.txt.*\.jsonl.*\.parquet.*\.csv"):
        open_source(["prompts.txt"])
    Path("prompts").write_bytes(b'\xef\xbb\xbf\n{"file": "prompts"}\n')
    assert files_read("prompts") == ["prompts"]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "JSONL"])
def test_json_lines_have_many_suffixes(folder: Path, suffix: str) -> None:
    Path(f"x.{suffix}").write_text('{"file": "x"}\n')
    assert files_read(f"x.{suffix}") == ["x"]


def test_a_file_that_is_something_else_is_told_when_it_is_opened(folder: Path) -> None:
    Path("array.json").write_text('[\n{"a": 1}\n]\n')
    with pytest.raises(InputError, match=r"array\.json is one JSON array"):
        open_source(["other.jsonl", "array.json"])


def test_empty_files_have_no_rows(folder: Path) -> None:
    for name in ("empty.jsonl", "empty.csv"):
        Path(name).write_bytes(b"")
        assert list(open_source([name])) == []


def test_a_pipe_is_read_once_and_whole(folder: Path) -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_text('{"file": "pipe"}\n' * 3))
    writer.start()
    assert files_read("pipe") == ["pipe"] * 3
    writer.join()


def test_standard_input_cannot_be_read_twice() -> None:
    with pytest.raises(UsageError, match="only once"):
        open_source(["-", "-"])


def test_a_split_of_a_file_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="--dataset-split"):
        open_source(["other.jsonl"], split="train")


def test_only_inputs_that_all_declare_types_have_a_schema(folder: Path) -> None:
    Path("a.csv").write_text("x,y\n1,2\n")
    Path("b.csv").write_text("y,z\n3,4\n")
    assert open_source(["a.csv", "b.csv"]).schema == pa.schema([(name, pa.string()) for name in "xyz"])
    assert open_source(["a.csv", "other.jsonl"]).schema is None


def test_json_lines_need_no_arrow(folder: Path) -> None:
    """What is slow to import is imported where it is used."""
    code = (
        "import sys; from cbatch.io.sources import open_source; from cbatch.io.sinks import open_sink;"
        "rows = list(open_source(['other.jsonl'])); sink = open_sink('out.jsonl'); sink.write(rows[0].columns);"
        "sink.commit(); print([name for name in ('pyarrow', 'fsspec', 'datasets', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
