"""How long the CPU threads of a forward pass spin while they wait: a variable that is read when torch is imported.

By default a thread of GNU OpenMP spins for milliseconds after every operation; where anything else wants the cores,
that starves the very thread it waits for (docs/measurements.md). Called by commands before they run a model.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"  # turns before a thread sleeps


def spinning_environment() -> dict[str, str]:
    """Give the variables to set where they are not; none where the user chose a policy."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPIN_COUNT}


def limit_spinning() -> None:
    """Set them in this process."""
    for name, value in spinning_environment().items():
        os.environ.setdefault(name, value)
