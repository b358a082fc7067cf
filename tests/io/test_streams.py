"""Compressed input: told by its first bytes, read to the last member, damage said after the good rows (spec I1)."""

import bz2
import gzip
import io
import lzma
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from cbatch.errors import InputError
from cbatch.io import streams
from cbatch.io.sources import Source, open_source

LINES = [b'{"row": %d, "text": "%s"}\n' % (row, b"x" * (row % 50)) for row in range(5000)]
CONTENT = b"".join(LINES)


def zstd(data: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return bytes(buffer.getvalue().to_pybytes())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstd}
compressions = pytest.mark.parametrize("suffix", COMPRESS)


def source_of(path: Path, content: bytes) -> Source:
    path.write_bytes(content)
    return open_source([str(path)])


def read(path: Path, content: bytes) -> tuple[list[int], InputError | None]:
    """The rows of a file, then what ends them; one without any row says so when it is opened."""
    try:
        source = source_of(path, content)
    except InputError as error:
        return [], error
    return drain(source)


def drain(source: Source) -> tuple[list[int], InputError | None]:
    """The rows that come, then what ends them."""
    seen: list[int] = []
    try:
        for row in source:
            seen.append(row.columns["row"])
    except InputError as error:
        return seen, error
    return seen, None


@compressions
def test_all_members_are_read(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    half = len(CONTENT) // 2  # in the middle of a line
    members = compress(CONTENT[:half]) + compress(b"") + compress(CONTENT[half:])
    assert read(tmp_path / f"in.jsonl.{suffix}", members) == (list(range(5000)), None)


@compressions
@pytest.mark.parametrize("share", [0.01, 0.8, 0.999])
def test_a_truncated_file_is_an_error_after_the_good_rows(tmp_path: Path, suffix: str, share: float) -> None:
    data = COMPRESS[suffix](CONTENT)
    seen, error = read(tmp_path / f"in.jsonl.{suffix}", data[: int(len(data) * share)])
    assert seen == list(range(len(seen)))
    assert error is not None
    assert "in.jsonl" in error.message
    assert "cut off" in error.message


@compressions
def test_a_cut_costs_no_more_than_the_last_rows(tmp_path: Path, suffix: str) -> None:
    members = list(map(COMPRESS[suffix], LINES[:200]))
    data = b"".join(members[:100]) + members[100][:-1]
    seen, error = read(tmp_path / f"in.jsonl.{suffix}", data)
    lost = sum(map(len, LINES[len(seen) : 100]))
    assert lost <= (streams.ZSTD_CHUNK_BYTES if suffix == "zst" else 0) + len(LINES[99])
    assert error is not None


@compressions
def test_damage_in_the_middle_is_an_error_after_the_good_rows(tmp_path: Path, suffix: str) -> None:
    damaged = b"".join(map(COMPRESS[suffix], LINES[:100])) + COMPRESS[suffix](CONTENT)[:8] + b"\xff" * 500
    seen, error = read(tmp_path / f"in.jsonl.{suffix}", damaged)
    assert seen[:80] == list(range(80))
    assert error is not None


def test_zeros_after_the_last_gzip_member_are_padding(tmp_path: Path) -> None:
    assert read(tmp_path / "in.gz", gzip.compress(CONTENT) + bytes(512)) == (list(range(5000)), None)


def test_skippable_zstd_frames_are_skipped(tmp_path: Path) -> None:
    frame = struct.pack("<II", 0x184D2A50, 4) + b"note"
    assert read(tmp_path / "in.zst", zstd(CONTENT) + frame + zstd(b""))[0] == list(range(5000))


@compressions
def test_first_bytes_win_over_the_suffix(tmp_path: Path, suffix: str) -> None:
    assert len(list(source_of(tmp_path / "in.jsonl", COMPRESS[suffix](CONTENT)))) == 5000
    assert len(list(source_of(tmp_path / f"plain.jsonl.{suffix}", CONTENT))) == 5000


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (bz2.compress(CONTENT), "bunzip2"),
        (lzma.compress(CONTENT), "unxz"),
        (CONTENT.decode().encode("utf-16"), "iconv -f UTF-16"),
    ],
)
def test_what_is_not_read_is_named_with_the_way_out(tmp_path: Path, content: bytes, hint: str) -> None:
    with pytest.raises(InputError, match=f"{hint}.*in.jsonl"):
        list(source_of(tmp_path / "in.jsonl", content))


def test_an_archive_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.jsonl", "w") as archive:
        archive.writestr("x", CONTENT)
    with pytest.raises(InputError, match="zip archive"):
        list(open_source([str(tmp_path / "in.jsonl")]))


class FailingDisk(io.BytesIO):
    """Gives a first part, then fails like a lost mount."""

    def read1(self, size: int | None = -1, /) -> bytes:
        data = super().read1(1000)
        if not data:
            raise OSError(116, "Stale file handle")
        return data

    def peek(self, size: int) -> bytes:
        return self.getvalue()[:size]


def test_a_file_that_fails_in_the_middle_is_an_error_after_the_good_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tmp_path / "in.jsonl", CONTENT)
    monkeypatch.setattr(Path, "open", lambda *_: FailingDisk(CONTENT[:-10]))
    seen, error = drain(source)
    assert seen == list(range(4999))
    assert error is not None
    assert "Stale file handle" in error.message


def test_a_file_that_vanishes_before_its_turn_is_an_error_after_the_good_rows(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(CONTENT)
    (tmp_path / "2.jsonl").write_bytes(CONTENT)
    source = open_source([str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl")])
    (tmp_path / "2.jsonl").unlink()
    seen, error = drain(source)
    assert seen == list(range(5000))
    assert error is not None
    assert "2.jsonl: no such file" in error.message


@contextmanager
def standard_input(content: bytes) -> Iterator[None]:
    """Put a file with `content` in the place of descriptor 0."""
    saved = os.dup(0)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            os.dup2(file.fileno(), 0)
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


@pytest.mark.parametrize("compress", [bytes, *COMPRESS.values()])
def test_standard_input_is_json_lines_plain_or_compressed(compress: Callable[[bytes], bytes]) -> None:
    with standard_input(compress(b'{"row": 0}\nnonsense\n')):
        good, bad = open_source(["-"])
    assert good.columns == {"row": 0}
    assert (bad.location, bad.error is None) == ("stdin:2", False)


def test_standard_input_that_cannot_be_read_is_named() -> None:
    for content, message in [(b"PAR1....PAR1", "Parquet"), (gzip.compress(CONTENT)[:-9], "standard input is cut off")]:
        with standard_input(content), pytest.raises(InputError, match=message):
            list(open_source(["-"]))


def test_what_is_read_at_a_time_is_bounded(tmp_path: Path) -> None:
    """Compressed data may be a thousand times smaller than what is in it."""
    path = tmp_path / "in.jsonl"
    for compress in (bytes, *COMPRESS.values()):
        path.write_bytes(compress(b"x" * (8 * streams.CHUNK_BYTES)))
        assert max(map(len, streams.read_chunks(str(path)))) <= streams.CHUNK_BYTES
