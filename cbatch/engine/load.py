"""Loads an engine for a process that does nothing else with torch. Importing this imports neither torch nor the engine.

Called by a job once a row needs its engine; a test puts an engine without a model in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.models.source import resolve_source

if TYPE_CHECKING:
    from cbatch.config import EngineConfig
    from cbatch.engine.engine import Engine


def load_engine(config: EngineConfig) -> Engine:
    """Load the engine of a configuration, and the model with it. Raises CbatchError; UsageError before torch's import.

    A model's own code may want what is left out of transformers, which is imported whole for it.
    """
    # a name that is wrong is refused before torch is imported, which takes seconds
    resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    if not config.trust_remote_code:
        from cbatch.models.lean_import import import_modeling

        import_modeling()  # before any of our own modules imports it whole
    from cbatch.engine.engine import Engine

    return Engine.load(config)
