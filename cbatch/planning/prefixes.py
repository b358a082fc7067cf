"""How much of what prompts begin with was in an earlier one: the most that sharing prefixes could ever save.

A radix tree over token ids, the tokens of an edge kept as bytes, so that most comparisons are the interpreter's own.
Its memory is bounded: once it is used up prompts are looked up but no longer remembered. Called by `job_plan`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_BYTES = 256 << 20
NODE_BYTES = 400  # of a node beside its tokens: the object, its table, the bytes' header
TOKEN = "i"
SIZE = array(TOKEN).itemsize


@dataclass(slots=True)
class _Node:
    edge: bytes  # the tokens that lead here
    children: dict[bytes, _Node] = field(default_factory=dict)  # by their edge's first token


class PrefixTree:
    """Remembers prompts and tells how much of a new one an earlier one began with."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._root = _Node(b"")
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.num_remembered = 0  # prompts

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= self._max_bytes

    def add(self, token_ids: Sequence[int]) -> int:
        """Count the tokens that a prompt and some earlier one both begin with; remember it while there is room."""
        prompt = array(TOKEN, token_ids).tobytes()
        remembers = not self.is_full
        self.num_remembered += remembers
        node, at = self._root, 0
        while at < len(prompt):
            child = node.children.get(prompt[at : at + SIZE])
            if child is None:
                if remembers:
                    self._attach(node, prompt[at:])
                break
            common = _common(child.edge, prompt, at)
            at += common
            if common < len(child.edge):
                if remembers:
                    middle = self._split(node, child, common)
                    if at < len(prompt):
                        self._attach(middle, prompt[at:])
                break
            node = child
        return at // SIZE

    def _attach(self, node: _Node, tokens: bytes) -> None:
        node.children[tokens[:SIZE]] = _Node(tokens)
        self._num_bytes += len(tokens) + NODE_BYTES

    def _split(self, parent: _Node, child: _Node, length: int) -> _Node:
        """Put a node on the edge to `child`, after `length` bytes of it, and give it."""
        middle = _Node(child.edge[:length])
        parent.children[middle.edge[:SIZE]] = middle
        child.edge = child.edge[length:]
        middle.children[child.edge[:SIZE]] = child
        self._num_bytes += NODE_BYTES
        return middle


def _common(edge: bytes, prompt: bytes, at: int) -> int:
    """Count the bytes, whole tokens, of `edge` that `prompt` continues with from `at` on."""
    if prompt.startswith(edge, at):
        return len(edge)
    length = min(len(edge), len(prompt) - at)
    left = np.frombuffer(edge, dtype=np.int32, count=length // SIZE)
    right = np.frombuffer(prompt, dtype=np.int32, count=length // SIZE, offset=at)
    different = left != right
    return (int(different.argmax()) if different.any() else length // SIZE) * SIZE
