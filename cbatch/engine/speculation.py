"""Prompt-lookup speculation: what a request said before where it said the same guesses what it says next.

A guess, the drafts, is computed as further query tokens of the step, and every token is then chosen as ever: by its own
logits, parameters and random number. A draft that is what is chosen in its place brings the next token along, for free;
at the first one that is not, the rest is thrown away. So the tokens are those of a run without drafts, sampled ones
too. Called by the scheduler, which decides when, and by the runner. After A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cbatch.errors import RowError

Results = list[int | RowError]  # tokens of one request, one after another; a failure ends them

LEAST_MATCH = 2  # tokens that must have come before as they come now
MAX_DRAFTS = 8
MAX_CANDIDATES = 8  # earlier places that are compared
MAX_READ = 512  # tokens that one look-up takes in: a long prompt is taken in over several steps, and holds none up
_TOKEN_BITS = 32


class PromptLookup:
    """Finds drafts for one request; every token is looked at once, and a look-up costs the same however many came."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # two tokens → where the second of them was last, but for the text's end
        self._before = array("q")  # by place: where the same two tokens were before that, -1 for nowhere

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Guess up to `most` tokens behind `token_ids`, of which there is one at least and which only ever grow.

        The guess follows the longest match, and is no longer than that: a text that begins to repeat itself is trusted
        as far as it has. There is none until the whole text was taken in.
        """
        end = len(token_ids)
        num_read = len(self._before)
        for place in range(num_read, min(end - 1, num_read + MAX_READ)):
            pair = _pair(token_ids, place)
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place
        if len(self._before) < end - 1:
            return ()
        place, length = self._longest_match(token_ids)
        drafts: list[int] = []
        for source in range(place + 1, place + 1 + min(length, most)):
            drafts.append(token_ids[source] if source < end else drafts[source - end])
        return tuple(drafts)

    def _longest_match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Find where what stands at the end stood before, and how many tokens are the same; 0 for nowhere."""
        last = len(token_ids) - 1
        place = self._last.get(_pair(token_ids, last), -1)
        best, longest = 0, 0
        for _ in range(MAX_CANDIDATES):
            if place < 0 or longest == MAX_DRAFTS:
                break
            length = LEAST_MATCH
            while length < MAX_DRAFTS and length <= place and token_ids[place - length] == token_ids[last - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best, longest


def _pair(token_ids: Sequence[int], place: int) -> int:
    """Make one number of the token at a place and the one before it; a text's first token has none before."""
    return (token_ids[place - 1] + 1 if place > 0 else 0) << _TOKEN_BITS | token_ids[place]


def accept(drafts: Sequence[int], results: Sequence[int | RowError]) -> Results:
    """Give the results that count: each but the first one lies behind a draft that must be what is chosen there."""
    taken = [results[0]]
    for draft, result in zip(drafts, results[1:], strict=True):
        if taken[-1] != draft:
            break
        taken.append(result)
    return taken
