"""How much of a job's prompts stands at the start of an earlier one: an estimate from the rows, without a tokenizer.

A prompt is cut into pieces, and each piece is known by all that comes before it, as the cache's blocks are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from cbatch.errors import CbatchError
from cbatch.io.sources import open_source

MAX_ROWS = 2_000
PIECE_TOKENS = 16
PIECE_CHARACTERS = 64  # about as much


def shared_share(inputs: Sequence[str]) -> float:
    """Return the share of the prompts' length, 0 to 1; 0 where the input is not there any more or cannot be read."""
    seen: set[bytes] = set()
    total = shared = 0
    try:
        for row in islice(open_source(list(inputs)), MAX_ROWS):
            pieces, size = _pieces(row.columns)
            digest, is_known = b"", True
            for piece in pieces:
                digest = blake2b(digest + piece, digest_size=16).digest()
                is_known = is_known and digest in seen
                shared += is_known
                seen.add(digest)
            total += size
    except CbatchError:
        return 0.0
    return shared / total if total else 0.0


def _pieces(columns: dict[str, Any]) -> tuple[list[bytes], int]:
    """Cut a row's prompt into whole pieces; give them and how many there are, the last torn one counted."""
    token_ids = columns.get("prompt_token_ids")
    if isinstance(token_ids, list):
        parts = [json.dumps(token_ids[i : i + PIECE_TOKENS]) for i in range(0, len(token_ids), PIECE_TOKENS)]
        whole = len(token_ids) // PIECE_TOKENS
    else:
        prompt = columns.get("messages") or columns.get("prompt") or columns.get("body") or ""
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        parts = [text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS)]
        whole = len(text) // PIECE_CHARACTERS
    return [part.encode("utf-8", "surrogatepass") for part in parts[:whole]], len(parts)
