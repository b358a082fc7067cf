"""What the tests of whole searches share: an input, stub engines, and what was written read back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from cbatch.config import EngineConfig, JobConfig, TuneConfig
from cbatch.tune.run import TuneSummary, run_tune
from tests.tune.stub_engines import StubEngines


def rows(count: int = 24, **columns: Any) -> list[dict[str, Any]]:
    """Rows with prompts of several lengths."""
    return [{"prompt": f"prompt {i} " + "word " * (i % 5), **columns} for i in range(count)]


class Case:
    """A folder with a model and an input, and searches over them."""

    def __init__(self, path: Path, *given: Any) -> None:
        self.path = path
        self.output = path / "tuned.toml"
        self.journal = path / "tuned.toml.journal.jsonl"
        self.sources: list[StubEngines] = []
        self.options: dict[str, Any] = {}  # of the stub engines
        (path / "model").mkdir()
        (path / "model" / "config.json").write_text("{}")
        self.write(given or rows())

    def write(self, given: Any) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in given]
        (self.path / "in.jsonl").write_text("".join(line + "\n" for line in lines))

    def load(self, config: EngineConfig) -> StubEngines:
        self.sources.append(StubEngines(config, **self.options))
        return self.sources[-1]

    def run(
        self, *, trials: int | None = 4, budget: str | None = None, search: tuple[str, ...] = (), **options: Any
    ) -> TuneSummary:
        """Search; `options` are settings of `run`, as if given on the command line."""
        names = {name: options.pop(name) for name in list(options) if hasattr(EngineConfig(model=""), name)}
        engine = EngineConfig(model=str(self.path / "model"), **names)
        own = {name: options.pop(name) for name in ("output", "quiet") if name in options}
        job = JobConfig(inputs=(str(self.path / "in.jsonl"),), output="", **options)
        tune = TuneConfig(output=own.get("output", str(self.output)), trials=trials, budget=budget, search=search)
        given = {"model": engine.model, **names, **job.sampling}
        return run_tune(job, engine, tune, given, load=self.load, quiet=own.get("quiet", True))

    @property
    def num_built(self) -> int:
        """Engines that were built, in all searches."""
        return sum(len(source.engines) for source in self.sources)

    def tuned(self) -> dict[str, Any]:
        return tomllib.loads(self.output.read_text(encoding="utf-8"))

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The journal's lines of a kind."""
        found = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [line for line in found if kind in line]
