"""The figures of a real run against its own rows: every count and every time can be computed again from the output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cbatch.config import EngineConfig, JobConfig
from cbatch.jobs.run import run_job
from tests.tiny_models import build_tiny


def test_every_figure_of_the_report_follows_from_the_columns(tmp_path: Path) -> None:
    """One long row, many of one token, some that fail, some found in the cache, some moved out on the way."""
    rows: list[dict[str, object]] = [{"prompt_token_ids": list(range(5, 100)), "max_tokens": 60}]
    rows += [{"prompt_token_ids": [*range(5, 30), 30 + i], "max_tokens": 1} for i in range(60)]
    rows += [{"prompt_token_ids": [40 + i] * 20, "max_tokens": 12} for i in range(12)]
    rows += [{"prompt_token_ids": [5], "max_tokens": -1}] * 6
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = JobConfig(
        inputs=(str(tmp_path / "in.jsonl"),), output=str(tmp_path / "out.jsonl"), sampling={"ignore_eos": True}
    )
    folder = build_tiny("llama", tmp_path / "model")
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=48, max_requests_per_batch=16, safety_margin=0.0)
    report = run_job(job, config, quiet=True).report
    done = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ok = [row for row in done if row["error"] is None]

    assert (report["rows"], report["rows_ok"], report["rows_error"]) == (79, 73, 6)
    assert report["preemptions"] == sum(row["preemptions"] or 0 for row in done) > 0
    assert [row["completion_tokens"] for row in ok] == [60, *[1] * 60, *[12] * 12]
    assert report["output_tokens"] == sum(row["completion_tokens"] for row in ok)
    assert report["output_tokens_per_s"] == pytest.approx(report["output_tokens"] / report["generate_s"])
    assert report["cached_tokens"] == sum(row["cached_tokens"] for row in ok) > 0
    assert report["load_s"] + report["generate_s"] <= report["wall_s"]
    for name in ("queue_s", "ttft_s", "e2e_s"):
        values = [row[name] for row in ok]
        assert report["latency"][name]["count"] == len(ok)
        assert report["latency"][name]["p99"] == pytest.approx(np.percentile(values, 99), rel=1e-5)
    for row in ok:
        assert row["queue_s"] >= 0
        assert row["prefill_s"] > 0
        assert row["ttft_s"] == pytest.approx(row["queue_s"] + row["prefill_s"])
        between = (row["itl_mean_s"] or 0.0) * (row["completion_tokens"] - 1)
        assert row["e2e_s"] == pytest.approx(row["ttft_s"] + between, abs=1e-4)
        assert (row["itl_mean_s"] is None) == (row["completion_tokens"] == 1)


def test_the_peak_of_memory_is_this_programs_and_not_that_of_whoever_started_it() -> None:
    held = np.ones(400 << 20, dtype=np.uint8)  # resident here
    code = "from cbatch.jobs.report import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 4 << 20 < int(done.stdout) < held.nbytes
