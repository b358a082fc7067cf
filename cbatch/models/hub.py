"""Loads something with transformers quietly, and turns its failures into ours.

Called by inspect, load and tokenizer around every `from_pretrained`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub.utils
import transformers.utils

from cbatch.errors import CbatchError, DoesNotFitError, UnsupportedModelError, UsageError
from cbatch.models.source import ModelSource

logger = logging.getLogger(__name__)

HINTS = {"the tokenizer": "--tokenizer names another one"}


def quiet_libraries() -> None:
    """Keep progress bars and advice of transformers and the hub client off the terminal, for the whole process.

    What matters among it (weights missing from a checkpoint, generation settings not taken) is said by our own code.
    A verbosity that the user set in the environment stays.
    """
    hub: Any = huggingface_hub.utils
    library: Any = transformers.utils.logging
    hub.disable_progress_bars()
    library.disable_progress_bar()
    if "HF_HUB_VERBOSITY" not in os.environ:
        hub.logging.set_verbosity_error()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        library.set_verbosity_error()


@contextmanager
def loading(what: str, source: ModelSource) -> Iterator[None]:
    """Raise a UsageError, with the way out, for whatever fails inside: the libraries raise nearly anything."""
    quiet_libraries()
    try:
        yield
    except CbatchError:
        raise
    except MemoryError as error:
        raise DoesNotFitError(f"not enough memory for {what} of '{source.name}'") from error
    except Exception as error:
        logger.debug("loading failed", exc_info=error)
        raise _translate(what, source, error) from error


def _translate(what: str, source: ModelSource, error: Exception) -> UsageError:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return UsageError(
            f"'{source.name}' needs code of its own to be run", hint="read that code, then give --trust-remote-code"
        )
    if "does not recognize this architecture" in text:
        return UnsupportedModelError(
            f"the installed transformers does not know the architecture of '{source.name}'",
            hint="pip install --upgrade transformers",
        )
    if source.folder is None and isinstance(error, OSError):
        return UsageError(
            f"there is no folder '{source.name}', and as a hub repository it cannot be read: {_shorten(text)}",
            hint="check the name, --revision, the network, and HF_TOKEN for a gated repository",
        )
    if "out of memory" in text.lower():
        return DoesNotFitError(f"not enough memory for {what} of '{source.name}'", hint="try a smaller --dtype")
    if "ignore_mismatched_sizes" in text:
        return UsageError(
            f"the weights of '{source.name}' have other sizes than its config says",
            hint="the folder mixes files of two models, or its config was edited",
        )
    return UsageError(
        f"cannot load {what} of '{source.name}': {type(error).__name__}: {_shorten(text)}", hint=HINTS.get(what)
    )


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
