"""A step that was launched, until its results are read: what the device chose becomes tokens, failures and scores.

Made by the model runner, collected by the engine, which by then may have launched the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.engine.batch import StepInputs
from cbatch.engine.speculation import Results, accept
from cbatch.engine.step import StepPlan
from cbatch.engine.transfers import Fetched
from cbatch.errors import RowError


class LaunchedStep:
    """A step of the model's, on its way through the device. Keeps what the device reads until it is done."""

    def __init__(self, plan: StepPlan, inputs: StepInputs, fetched: Fetched, dtype: torch.dtype) -> None:
        """`fetched` gives the R chosen tokens, whether their logits [of `dtype`] are finite, and scores if asked."""
        self._items = [item for item in plan.items if item.num_results]
        self._inputs = inputs
        self._fetched = fetched
        self._dtype = dtype

    def collect(self) -> list[Results]:
        """Wait for the device. Adds to the records of log-probabilities, which outputs take what counts of."""
        tokens, is_finite, *scores = self._fetched()
        of_rows = self._with_failures(tokens, is_finite)
        rows = self._inputs.result_rows
        results = [accept(i.drafts, of_rows[r.start : r.stop]) for i, r in zip(self._items, rows, strict=True)]
        if self._inputs.scoring is not None:
            taken = zip(rows, results, strict=True)
            self._inputs.scoring.book(scores, {row for of_item, found in taken for row in of_item[: len(found)]})
        for i, item in enumerate(self._items):
            record = item.request.logprobs
            if record is not None and not record.is_finite:
                results[i] = [_not_finite(self._dtype)]
        return results

    def _with_failures(self, tokens: Tensor, is_finite: Tensor) -> list[int | RowError]:
        """Put failures in the place of tokens [R] that nothing could choose by their logits."""
        results: list[int | RowError] = tokens.tolist()
        for row, error in self._inputs.sampling.errors().items():
            results[row] = error
        for row, finite in enumerate(is_finite.tolist()):
            if not finite:
                results[row] = _not_finite(self._dtype)
        return results


def _not_finite(dtype: torch.dtype) -> RowError:
    name = str(dtype).removeprefix("torch.")
    way_out = "the weights are damaged, or not of this model" if dtype == torch.float32 else "try --dtype float32"
    return RowError("non_finite_logits", f"the model's logits are not finite in {name}: {way_out}")
