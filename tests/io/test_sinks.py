"""Output files: JSON lines by suffix, complete or absent (spec I4, J2)."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from cbatch.errors import OutputError, UsageError
from cbatch.io import atomic
from cbatch.io.sinks import Sink, check_output, open_sink


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(path: Path, *records: dict[str, object]) -> None:
    with open_sink(str(path)) as sink:
        for record in records:
            sink.write(record)
        sink.commit()


def test_records_become_lines_in_their_order(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", {"b": 1, "a": "é\u2028\ud83d"}, {"id": 98765432109876543210, "x": None})
    content = (tmp_path / "out.jsonl").read_bytes()
    assert content.decode() == '{"b": 1, "a": "é\\u2028\\ud83d"}\n{"id": 98765432109876543210, "x": null}\n'
    assert len(content.decode().splitlines()) == content.count(b"\n") == 2


def test_no_records_make_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_nothing_is_at_the_final_path_before_commit(tmp_path: Path) -> None:
    with open_sink(str(tmp_path / "out.jsonl")) as sink:
        sink.write({"a": 1})
        assert not (tmp_path / "out.jsonl").exists()
        sink.commit()
    assert names_in(tmp_path) == ["out.jsonl"]


def test_leaving_without_commit_keeps_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, {"old": 1})
    with open_sink(str(path)) as sink:
        sink.write({"new": 1})
    assert names_in(tmp_path) == ["out.jsonl"]
    assert json.loads(path.read_bytes()) == {"old": 1}


def test_what_a_killed_run_left_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = open_sink(str(path))
    sink.write({"torn": "x" * 100_000})  # beyond the buffer, so on disk
    write(path, {"a": 1})
    assert path.read_bytes() == b'{"a": 1}\n'
    assert names_in(tmp_path) == ["out.jsonl"]
    sink.abort()


def test_the_content_is_durable_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def logged_fsync(descriptor: int) -> None:
        calls.append("fsync directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "fsync file")
        fsync(descriptor)

    def logged_replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "replace", logged_replace)
    write(tmp_path / "out.jsonl", {"a": 1})
    assert calls == ["fsync file", "rename", "fsync directory"]


def test_a_symlinks_target_is_replaced_from_its_own_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "disk" / "real.jsonl")
    with open_sink(str(tmp_path / "link.jsonl")) as sink:
        assert names_in(tmp_path / "disk") == [".real.jsonl.partial", "real.jsonl"]
        sink.write({"a": 1})
        sink.commit()
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "disk" / "real.jsonl").read_bytes() == b'{"a": 1}\n'


def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "new.jsonl", {"a": 1})
    finally:
        os.umask(old)
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new.jsonl").chmod(0o604)
    write(tmp_path / "new.jsonl", {"a": 2})
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("name", ["out.csv", "out", "out.jsonl.bak", ".jsonl"])
def test_another_suffix_is_refused_with_those_that_work(tmp_path: Path, name: str) -> None:
    for function in (open_sink, check_output):
        with pytest.raises(UsageError, match=r"\.jsonl or \.parquet"):
            function(str(tmp_path / name))


def full_disk(path: Path) -> Sink:
    """A sink every byte of which fails with ENOSPC."""
    sink = open_sink(str(path))
    device = os.open("/dev/full", os.O_WRONLY)
    os.dup2(device, sink._file.file.fileno())
    os.close(device)
    return sink


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error_at_write_or_at_commit(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        full_disk(path) as sink,
        pytest.raises(OutputError, match=r"cannot write .*out\.jsonl: No space left on device"),
    ):
        sink.write({"a": "x" * 1_000_000})
    with full_disk(path) as sink:
        sink.write({"a": 1})  # buffered: the disk is asked when the file is committed
        with pytest.raises(OutputError, match="No space left on device"):
            sink.commit()
    assert names_in(tmp_path) == []


def test_the_trial_leaves_nothing_and_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check_output(str(path))
    assert names_in(tmp_path) == []
    path.write_text("old")
    check_output(str(path))
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["out.jsonl"]


def test_a_missing_directory_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist.*mkdir -p"):
        check_output(str(tmp_path / "missing" / "out.jsonl"))


def test_a_directory_or_a_pipe_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        check_output(str(tmp_path / "dir.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        check_output(str(tmp_path / "pipe.jsonl"))


def test_a_file_that_is_mounted_by_itself_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.jsonl").touch()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "out.jsonl")
    with pytest.raises(UsageError, match="mount its directory"):
        check_output(str(tmp_path / "out.jsonl"))


@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_directory_that_cannot_be_synced_is_no_failure_but_a_failing_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fails: bool
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="error") if fails else contextlib.nullcontext():
        atomic.fsync_directory(tmp_path)


def raise_on_open(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """The tests may run as root, whom no mode stops."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "open", fail)


def test_a_read_only_directory_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_on_open(monkeypatch, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    with pytest.raises(UsageError, match=r"Permission denied.*must be writable"):
        atomic.check_writable(tmp_path / "out.jsonl")


def test_a_failing_disk_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_on_open(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OutputError, match="No space left"):
        atomic.check_writable(tmp_path / "out.jsonl")
