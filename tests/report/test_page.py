"""The page of a run: whole, small, self-contained, safe, and fine with a browser."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import InputError
from cbatch.io.gziplog import GzipLog
from cbatch.jobs.totals import BINS_PER_DECADE
from cbatch.report.content import read_content
from cbatch.report.history import MAX_REQUESTS, read_history, reported_history
from cbatch.report.page import html_path, render, write_page
from cbatch.report.shapes import areas, columns, nice_ceiling
from tests.cli.clikit import run_job, run_stub, write_input
from tests.diagnose.runs import finished_run
from tests.simulate.traces import stop_the_clock

VOID = {"meta", "link", "br", "img"}
EVIL = "<script>alert('x')</script>\" onload=\"y"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Checker(HTMLParser):
    """Follows the tags of a page, each of which must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was short of cache, with a trace, and everything that a report has."""
    works = [(20 + 7 * n % 90, 0, 10 + 11 * n % 50) for n in range(80)]
    histogram = {"first_bin": -5, "counts": [3, 40, 20, 17]}
    report = {
        "rows": 80, "rows_error": 1, "errors": {EVIL: 1}, "first_error": EVIL, "output_tokens": 2800,
        "prompt_tokens": 5000, "cached_tokens": 100, "output_tokens_per_s": 99.5, "wall_s": 12.5,
        "latency": {"ttft_s": {"p50": 0.5, "p99": 1.0, "max": 1.5, "histogram": histogram}, "queue_s": {"count": 0}},
        "model": EVIL, "inputs": [EVIL], "versions": {"python": EVIL}, "kv_waste_fraction": 0.03,
    }  # fmt: skip
    return finished_run(
        tmp_path, stop_the_clock(monkeypatch), works, num_blocks=40, max_batch_tokens=128, report=report
    )


def test_the_page_shows_all_that_happened(output: Path) -> None:
    page = checked(render(read_content(output)))
    for words in (
        "Tokens in a step", "Requests in the batch", "Cache", "Requests moved out", "Preemptions", "Requests over time",
        "Time to first token", "Settings", "max_batch_tokens", "as the test wants it", "99.5", "owned without a token",
    ):  # fmt: skip
        assert words in page.text, words
    classes = {str(attributes.get("class")) for _, attributes in page.tags}
    assert {"pending", "prefilling", "decoding", "preempted", "prefill", "decode", "owned", "cached"} <= classes
    assert "line waste" in classes


def test_nothing_in_it_comes_from_elsewhere_and_no_text_is_markup(output: Path) -> None:
    text = render(read_content(output))
    page = checked(text)
    assert "<script>alert" not in text
    assert EVIL in page.text
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "img"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href"):
            assert str(attributes.get(name, "data:")).startswith("data:")
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def write_long_trace(path: Path, steps: int) -> None:
    """A trace of so many steps, each of which ends a request of its own."""
    path.unlink()
    log = GzipLog(path)
    log.append([b'{"session": 1, "settings": {}, "layers": [[null, 1]]}\n'])
    names = [
        "schedule_s",
        "update_s",
        "pairs",
        "offloads",
        "restores",
        "soft_resets",
        "cached_blocks",
        "kv_tokens_read",
        "prefill_tokens",
        "kv_waste",
    ]
    for start in range(0, steps, 1000):
        lines = []
        for n in range(start, min(steps, start + 1000)):
            step = dict.fromkeys(names, 0) | {"at_s": n * 0.01, "run_s": 0.01, "requests": 4, "decode_tokens": 4}
            step |= {"running": 4, "waiting": 3, "owned_blocks": 50, "free_blocks": 50}
            states = ("pending", n - 3.0), ("prefilling", n - 2.0), ("decoding", n - 1.0), ("finished", float(n))
            step["events"] = [[n, 0, state, at * 0.01, 9, 3, 0] for state, at in states]
            lines.append(json.dumps(step).encode() + b"\n")
        log.append(lines)
    log.close()


def test_a_long_run_makes_no_larger_page(output: Path) -> None:
    write_long_trace(output.with_name("out.jsonl.trace.jsonl.gz"), steps=20_000)
    history = read_history(output.with_name("out.jsonl.trace.jsonl.gz"))
    assert len(history.columns["at_s"]) <= 512
    assert MAX_REQUESTS / 2 < len(history.requests) <= MAX_REQUESTS
    assert all(len(request.segments) == 3 for request in history.requests)
    assert len(render(read_content(output))) < 250_000


def test_a_run_without_a_trace_shows_what_its_report_has(output: Path) -> None:
    output.with_name("out.jsonl.trace.jsonl.gz").unlink()
    page = checked(render(read_content(output)))
    assert "Tokens in a step" in page.text
    assert "Requests over time" not in page.text
    assert "--trace" in page.text
    assert "last session" not in page.text
    path = output.with_name("out.jsonl.report.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"session": {"number": 2, "generate_s": 5.0}}))
    assert "that of the last session" in checked(render(read_content(output))).text


def test_what_is_empty_is_a_share_of_the_cache_as_all_of_its_chart(output: Path) -> None:
    """kv_waste is a share of what requests own."""
    trace = output.with_name("out.jsonl.trace.jsonl.gz")
    write_long_trace(trace, steps=10)
    lines = [json.loads(line) | {"kv_waste": 0.5} for line in gzip.decompress(trace.read_bytes()).splitlines()]
    trace.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    columns = read_history(trace).columns
    assert (set(columns["owned"]), set(columns["empty"])) == ({0.5}, {0.25})
    history = reported_history({"series": {**SERIES, "cache_usage": [0.5], "kv_waste": [0.1]}, "generate_s": 1.0})
    assert history is not None
    assert history.columns["empty"] == [0.05]


SERIES = {key: [1.0] for key in ("at_s", "prefill_tokens", "decode_tokens", "running", "waiting", "preemptions")}


def test_sessions_of_a_resumed_job_follow_one_another(output: Path) -> None:
    trace = output.with_name("out.jsonl.trace.jsonl.gz")
    before = read_history(trace)
    whole = trace.read_bytes()
    trace.write_bytes(whole + whole)
    after = read_history(trace)
    assert after.end_s == pytest.approx(2 * before.end_s)
    assert after.sessions_at == [pytest.approx(before.end_s)]
    assert 'class="mark"' in render(read_content(output))


def test_a_merged_job_shows_what_its_parts_add_up_to(tmp_path: Path) -> None:
    write_input(tmp_path, *({"prompt": f"p{n}"} for n in range(24)))
    for index in range(2):
        assert run_job(tmp_path, "--shard", f"{index}/2", "-q").returncode == 0
    assert run_stub("merge", "out.jsonl", "-q", cwd=tmp_path).returncode == 0
    content = read_content(tmp_path / "out.jsonl")
    times = [json.loads(line)["ttft_s"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    bins = Counter(math.floor(math.log10(time) * BINS_PER_DECADE) for time in times)
    histogram = content.histograms[0]
    assert histogram.title == "time to first token"
    assert [bar.text.split(": ")[1] for bar in histogram.bars] == [f"{bins[place]} rows" for place in sorted(bins)]
    assert [name for name, _ in histogram.figures] == ["median", "P90", "P99", "longest"]
    assert "reports of the parts" in checked(render(content)).text


def test_shapes_are_where_their_values_are() -> None:
    (low, high) = areas([0.0, 5.0], [("a", [1.0, 2.0]), ("b", [1.0, 0.0])], end=10.0, top=4.0)
    assert (
        low.path == "M0.0,150.0 500.0,150.0 500.0,100.0 1000.0,100.0 L1000.0,200.0 500.0,200.0 500.0,200.0 0.0,200.0 Z"
    )
    assert high.path.startswith("M0.0,100.0 500.0,100.0 500.0,100.0 1000.0,100.0 L1000.0,100.0")
    bars = columns([1, 0, 4], ["x", "y", "z"])
    assert [(bar.y, bar.height, bar.text) for bar in bars] == [(150.0, 50.0, "x"), (0.0, 200.0, "z")]
    assert [nice_ceiling(value) for value in (0, 0.03, 1, 37, 100, 130)] == [1.0, 0.03, 1.0, 40.0, 100.0, 150.0]


def test_the_command_writes_the_page_beside_the_output(tmp_path: Path) -> None:
    write_input(tmp_path, *({"prompt": f"p{n}"} for n in range(30)), {"prompt": EVIL, "max_tokens": -1})
    assert run_job(tmp_path, "--trace", "-q").returncode == 1, "one row fails"
    done = run_stub("report", "out.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "cbatch: out.jsonl.report.html\n")
    page = checked((tmp_path / "out.jsonl.report.html").read_text())
    assert "bad_parameter" in page.text
    assert run_stub("report", "out.jsonl", "-o", "page.html", "-q", cwd=tmp_path).stderr == ""
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere.jsonl",), 1, "there is no report of nowhere.jsonl"),
        (("out.jsonl", "-o", "out.jsonl"), 2, "would be overwritten"),
        (("out.jsonl", "-o", "no/folder.html"), 2, "no does not exist"),
        ((".",), 2, "'.' names no file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    (tmp_path / "out.jsonl").write_text("")
    (tmp_path / "out.jsonl.report.json").write_text('{"rows": 0}')
    done = run_stub("report", *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("damage", [{"errors": "x"}, {"prompt_tokens": "many"}, {"settings": 5}, {"series": [1]}])
def test_a_damaged_report_is_told(tmp_path: Path, damage: dict[str, Any]) -> None:
    (tmp_path / "out.jsonl.report.json").write_text(json.dumps({"rows": 3, "rows_ok": 3} | damage))
    done = run_stub("report", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "out.jsonl.report.json is damaged: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_no_run_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no report"):
        write_page(tmp_path / "out.jsonl", html_path(tmp_path / "out.jsonl"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_a_browser_has_nothing_to_say_of_it(output: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(output, page)
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=400,800", "--dump-dom", page.as_uri()]
    environment: dict[str, Any] = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "Requests over time" in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
