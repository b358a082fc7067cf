"""Who a row is: a hash of its rendered prompt, its parameters and the model's identity, plus its occurrence.

Called by the feeder. The key needs no id from the user, and depends neither on the shard nor on the row's place: equal
rows are told apart by how many came before them in the whole input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from cbatch.errors import RowError
from cbatch.jobs.rendering import Rendered

KEY_BYTES = 16
SEED_BYTES = 8
SOURCE_BYTES = 8
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_FIELD_SEPARATOR = b"\x00"


def base_key(rendered: Rendered, given: Mapping[str, object], identity: bytes) -> bytes:
    """Hash prompt, given parameters and `identity` (model, and the job's own defaults). RowError as `canonical`."""
    parameters = _ENCODER.encode(given).encode()
    return _hash(b"row", identity, parameters, rendered.canonical())


def failed_key(error: RowError, columns: Mapping[str, object], identity: bytes) -> bytes:
    """Hash a row that has no prompt, by what is wrong with it."""
    text = json.dumps([error.code, error.message, columns], default=repr).encode()
    return _hash(b"failed", identity, text)


def row_key(base: bytes, occurrence: int) -> bytes:
    """Return the key of a row with `occurrence` equal ones before it; the first one's is the base itself."""
    return base if occurrence == 0 else _hash(b"again", base, occurrence.to_bytes(8, "little"))


def row_source(index: int, columns: Mapping[str, object]) -> bytes:
    """Hash a row's place and columns: what its output shows of the input, which the key leaves out."""
    text = json.dumps([index, columns], default=repr).encode()
    return hashlib.blake2b(text, digest_size=SOURCE_BYTES).digest()


def row_seed(job_seed: int, key: bytes) -> int:
    """Hash the job's seed and the row's key to a seed from 0 to 2^63 - 1, the same on every machine."""
    digest = hashlib.blake2b(_FIELD_SEPARATOR.join((b"seed", str(job_seed).encode(), key)), digest_size=SEED_BYTES)
    return int.from_bytes(digest.digest(), "little") >> 1


def hash_text(text: str) -> bytes:
    """Hash any text, half characters included."""
    return _hash(text.encode("utf-8", "surrogatepass"))


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(_FIELD_SEPARATOR.join(parts), digest_size=KEY_BYTES).digest()


def job_identity(model: bytes, generation_config: str, job_seed: int) -> bytes:
    """Hash what all rows of a job have in common and their answers depend on."""
    return _hash(b"job", model, generation_config.encode(), str(job_seed).encode())
