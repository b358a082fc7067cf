"""Remote input through fsspec: the same rows from memory: and from a local HTTP server (spec I1)."""

import importlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.errors import InputError, UsageError
from cbatch.io.sources import open_source

CONTENT = b"".join(b'{"row": %d, "text": "%s"}\n' % (row, b"x" * 50) for row in range(1000))


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def files() -> dict[str, bytes]:
    return {}


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[str]:
    """Serves `files`, with ranges; paths that start with /broken stop in the middle."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path not in files:
                self.send_error(404)
                return
            content, status, headers = files[path], 200, {}
            span = self.headers.get("Range")
            if span and not path.startswith("/stream"):
                first, last = span.removeprefix("bytes=").split("-")
                end = min(int(last or len(content) - 1), len(content) - 1)
                headers = {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
                content, status = content[int(first) : end + 1], 206
            if not path.startswith("/stream"):
                headers["Accept-Ranges"] = "bytes"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content[: len(content) // 2] if path.startswith("/broken") else content)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def parquet_bytes() -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"row": range(1000)}), buffer)
    return bytes(buffer.getvalue().to_pybytes())


def rows_read(*urls: str) -> list[int]:
    return [row.columns["row"] for row in open_source(urls)]


def test_memory_holds_every_format(memory: Any) -> None:
    memory.pipe("/a.jsonl", CONTENT)
    memory.pipe("/a.parquet", parquet_bytes())
    memory.pipe("/a.csv", b"row\n5\n")
    assert rows_read("memory://a.jsonl") == rows_read("memory://a.parquet") == list(range(1000))
    (row,) = open_source(["memory://a.csv"])
    assert (row.location, row.columns) == ("memory://a.csv:2", {"row": "5"})


def test_remote_patterns_are_expanded_and_sorted(memory: Any) -> None:
    for name in ("b", "a"):
        memory.pipe(f"/data/{name}.jsonl", CONTENT)
    source = open_source(["memory://data/*.jsonl"])
    assert [name.rsplit("/", 1)[1] for name in source.inputs] == ["a.jsonl", "b.jsonl"]
    assert [row.index for row in source] == list(range(2000))
    with pytest.raises(UsageError, match="no file matches"):
        open_source(["memory://data/*.csv"])


def test_http_files_are_read(server: str, files: dict[str, bytes]) -> None:
    files |= {"/a.jsonl": CONTENT, "/a.parquet": parquet_bytes(), "/stream.jsonl": CONTENT}
    assert rows_read(f"{server}/a.jsonl") == list(range(1000))
    assert rows_read(f"{server}/a.parquet?token=1") == list(range(1000))
    assert rows_read(f"{server}/stream.jsonl") == list(range(1000))  # a server without ranges


def test_what_a_remote_place_does_not_have_is_an_input_error(memory: Any, server: str) -> None:
    for url in ("memory://missing.jsonl", f"{server}/missing.jsonl"):
        with pytest.raises(InputError, match=r"missing.jsonl: no such file"):
            open_source([url])


def test_a_connection_that_breaks_is_an_input_error(server: str, files: dict[str, bytes]) -> None:
    files["/broken.jsonl"] = CONTENT
    with pytest.raises(InputError, match=r"cannot read http.*broken\.jsonl"):
        rows_read(f"{server}/broken.jsonl")


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"nowhere://x.jsonl"):
        open_source(["nowhere://x.jsonl"])


def test_a_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, package: str | None = None) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(UsageError) as caught:
        open_source(["memory://a.jsonl"])
    assert caught.value.hint == 'pip install "cbatch[remote]"'
