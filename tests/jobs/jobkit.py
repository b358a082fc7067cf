"""What the tests of whole jobs share: inputs, the stub engine, and the outputs read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbatch.config import EngineConfig, JobConfig
from cbatch.jobs.run import JobSummary, run_job
from tests.stub_engine import StubEngine


class Bench:
    """A directory with a model and an input, and a job over them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "out.jsonl"
        self.engines: list[StubEngine] = []
        self.engine_options: dict[str, Any] = {}
        (path / "model").mkdir(exist_ok=True)
        (path / "model" / "config.json").write_text("{}")

    def write(self, rows: Iterable[Any], name: str = "in.jsonl") -> Path:
        """Write rows as JSON lines; a string is a line as it stands."""
        file = self.path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))
        return file

    def load(self, config: EngineConfig) -> StubEngine:
        engine = StubEngine(config, **self.engine_options)
        self.engines.append(engine)
        return engine

    def run(
        self, *, quiet: bool = True, model: str | None = None, max_model_len: int | None = None, **options: Any
    ) -> JobSummary:
        """Run the job over in.jsonl."""
        options = {"inputs": (str(self.path / "in.jsonl"),), "output": str(self.output)} | options
        config = EngineConfig(model=model or str(self.path / "model"), max_model_len=max_model_len)
        return run_job(JobConfig(**options), config, load_engine=self.load, quiet=quiet)

    def rows(self) -> list[dict[str, Any]]:
        """Read the output."""
        return read_rows(self.output)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.output.with_name(self.output.name + ".report.json").read_text())
        return report

    @property
    def num_prompts_run(self) -> int:
        """Prompts that engines completed, in all runs."""
        return sum(engine.num_started for engine in self.engines)


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def prompts(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows with different prompts."""
    return [{"id": number, "prompt": f"prompt {number}", **columns} for number in range(count)]


TIMES = ("scheduled_at", "queue_s", "prefill_s", "ttft_s", "itl_mean_s", "itl_p99_s", "e2e_s", "preemptions", "attempt")


def without_times(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the latency columns."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
