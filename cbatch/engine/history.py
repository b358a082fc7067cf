"""Which tokens a request has had, as penalties count them. Kept on the request, brought up to date by the sampler.

A token of the output stays one when a soft reset has it computed again: what counts is where the prompt ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenHistory:
    """The distinct tokens of a request, and how often each of them was generated."""

    def __init__(self, prompt_ids: Sequence[int], *, counts_prompt: bool) -> None:
        """`counts_prompt` says whether tokens of the prompt are listed, none of them generated."""
        self.token_ids = array("q")
        self.num_generated = array("q")  # of each of `token_ids`
        self._place: dict[int, int] = {}
        self._num_seen = len(prompt_ids)
        for token_id in prompt_ids if counts_prompt else ():
            self._place_of(token_id)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count what was generated since; `token_ids` are the request's, the prompt's included."""
        for i in range(self._num_seen, len(token_ids)):
            self.num_generated[self._place_of(token_ids[i])] += 1
        self._num_seen = len(token_ids)

    def behind(self, drafts: Sequence[int]) -> tuple[array[int], array[int]]:
        """Give the distinct tokens and how often each was generated, were `drafts` generated, too."""
        if not drafts:
            return self.token_ids, self.num_generated
        token_ids, counts, new = self.token_ids[:], self.num_generated[:], dict[int, int]()
        for token_id in drafts:
            place = self._place.get(token_id, new.get(token_id))
            if place is None:
                place = new[token_id] = len(token_ids)
                token_ids.append(token_id)
                counts.append(0)
            counts[place] += 1
        return token_ids, counts

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.num_generated.append(0)
        return place
