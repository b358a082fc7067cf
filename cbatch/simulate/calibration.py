"""Where a simulation's constants come from: a run's trace, a file that was kept of one, or a preset.

A file is JSON: the constants of the cost model, the engine that they were measured with, and what they come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from cbatch.errors import InputError, UsageError
from cbatch.io.atomic import write_json
from cbatch.simulate.cost import CostModel
from cbatch.simulate.fit import fit_cost
from cbatch.simulate.presets import PRESETS
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.tracefile import TracedSession

KIND = "cbatch calibration"
HINT = "`cbatch simulate --fit OUT --save-calibration FILE` writes one"

Table = TypeVar("Table", CostModel, SimulatedEngine)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What steps cost, and the engine in which they did."""

    cost: CostModel
    engine: SimulatedEngine
    source: str  # in words

    def save(self, path: Path) -> None:
        """Write a file that `load_calibration` reads. Raises OutputError."""
        table = {"kind": KIND, "source": self.source, "cost": asdict(self.cost), "engine": asdict(self.engine)}
        write_json(path, table)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file. Raises InputError where there is none, UsageError for what is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=HINT) from error
    except ValueError as error:
        raise UsageError(f"{path} is no calibration: it is not JSON", hint=HINT) from error
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise UsageError(f"{path} is no calibration", hint=HINT)
    cost, engine = _build(CostModel, table.get("cost"), path), _build(SimulatedEngine, table.get("engine"), path)
    return Calibration(cost, engine, str(table.get("source", path)))


def fit_calibration(sessions: Sequence[TracedSession], output: str) -> Calibration:
    """Fit to the steps of all sessions of a run; the engine is the last one's. Raises InputError."""
    fit, last = fit_cost(sessions), sessions[-1]
    words = [output, fit.describe()]
    words += [f"in {len(sessions)} sessions, of which the last one's engine is simulated"] if len(sessions) > 1 else []
    words += ["its drafts left out"] if last.settings.get("speculation") else []
    return Calibration(fit.cost, last.engine(), ", ".join(words))


def preset_calibration(name: str) -> Calibration:
    """Take a preset. Raises UsageError for a name that is none."""
    preset = PRESETS.get(name)
    if preset is None:
        raise UsageError(f"there is no preset {name}", hint=f"there are {', '.join(PRESETS)}")
    return Calibration(preset.cost, preset.engine, f"the preset {name}")


def _build(kind: type[Table], values: Any, path: Path) -> Table:
    """Build a table of the file, its numbers checked."""
    if not isinstance(values, dict):
        raise UsageError(f"{path} is no calibration: it has no table of {kind.__name__}", hint=HINT)
    known = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    for name, value in known.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (kind is CostModel and not is_number) or (is_number and not 0 <= value < math.inf):
            raise UsageError(f"{name} in {path} must be a number that is not negative: it is {value!r}", hint=HINT)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in known]
    if missing:
        raise UsageError(f"{path} lacks {', '.join(missing)}", hint=HINT)
    if isinstance(windows := known.get("layer_windows"), list):
        known["layer_windows"] = tuple(windows)
    return kind(**known)
