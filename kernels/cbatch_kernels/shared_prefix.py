"""Which of a step's single-token rows begin with the same pages, so that these are attended to once for all of them.

    tables         int32 [R, width], host: the rows' pages, as in `PagedMetadata`
    context_lens   int32 [R], host

`find_groups` is called once a step by the engine's batch builder, for layers that attend to the whole context; what it
finds travels in `PagedMetadata` to `triton_attention`. A group's prefix is whole pages. Where prefixes are nested, as
those of a job with several samples a prompt, the groups are taken that save most.

Which groups are worth it is reasoned, not measured. A prefix pass of its own saves reading the prefix's keys and values
again for every row but one, and costs the launch of two small kernels and partial results of a few KiB a row. With 8 KV
heads of 128 in 16 bits a token of a layer is 4 KiB; two launches within a graph take about as long as reading 10 to 20
MB at 3 TB/s. So a group needs LEAST_SAVED tokens that are not read again, 16 MiB there, and as many rows as fill the
16 rows of the smallest product with groups of 4 query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbatch_kernels.upload import to_device

LEAST_ROWS = 4
LEAST_SAVED = 4096  # tokens
DEPTH_BITS = 3  # leading bits of a number of pages by which depths are told apart

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows that begin with the same pages."""

    rows: Integers
    num_pages: int


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The groups of R rows on the device: as many as R rows could have, the last of them empty.

    A row is in one group at most. Sizes follow from R alone, so that a captured step reads any step's groups.
    """

    cu_members: Tensor  # int32 [R // LEAST_ROWS + 1]
    members: Tensor  # int32 [R]: group g has the rows members[cu_members[g] : cu_members[g + 1]]
    group_lens: Tensor  # int32 [R // LEAST_ROWS]: tokens of a group's prefix
    row_lens: Tensor  # int32 [R]: tokens of a row's prefix, 0 where it is in no group

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> SharedPrefixes:
        """Give room for the groups of so many rows; there are none yet."""
        return _split(torch.zeros(_packed_size(num_rows), dtype=torch.int32, device=device), num_rows)

    @classmethod
    def build(cls, groups: list[PrefixGroup], num_rows: int, page_size: int, device: torch.device) -> SharedPrefixes:
        """Lay the groups of `find_groups` out, in one transfer."""
        host = np.zeros(_packed_size(num_rows), dtype=np.int32)
        views = _split(torch.from_numpy(host), num_rows)
        cu_members, members, group_lens, row_lens = (
            view.numpy() for view in (views.cu_members, views.members, views.group_lens, views.row_lens)
        )
        ends = np.cumsum([len(group.rows) for group in groups])
        cu_members[1 : len(groups) + 1] = ends
        cu_members[len(groups) + 1 :] = ends[-1]
        members[: ends[-1]] = np.concatenate([group.rows for group in groups])
        group_lens[: len(groups)] = [group.num_pages * page_size for group in groups]
        row_lens[members[: ends[-1]]] = np.repeat(group_lens[: len(groups)], [len(group.rows) for group in groups])
        return _split(to_device(host, device), num_rows)

    @property
    def num_rows(self) -> int:
        return len(self.row_lens)

    @property
    def max_groups(self) -> int:
        return len(self.group_lens)

    def first_rows(self, num_rows: int) -> SharedPrefixes:
        """Give views of what fewer rows have."""
        num_groups = num_rows // LEAST_ROWS
        return SharedPrefixes(
            self.cu_members[: num_groups + 1],
            self.members[:num_rows],
            self.group_lens[:num_groups],
            self.row_lens[:num_rows],
        )

    def copy_(self, other: SharedPrefixes) -> None:
        """Take over the groups of no more rows than these, in place; rows behind them are in none."""
        num_rows, num_groups = other.num_rows, other.max_groups
        self.cu_members[: num_groups + 1].copy_(other.cu_members)
        self.cu_members[num_groups + 1 :].copy_(other.cu_members[-1:].expand(self.max_groups - num_groups))
        self.members[:num_rows].copy_(other.members)
        self.group_lens[:num_groups].copy_(other.group_lens)
        self.row_lens[:num_rows].copy_(other.row_lens)
        self.row_lens[num_rows:].zero_()


def _packed_size(num_rows: int) -> int:
    return 2 * (num_rows + num_rows // LEAST_ROWS) + 1


def _split(packed: Tensor, num_rows: int) -> SharedPrefixes:
    num_groups = num_rows // LEAST_ROWS
    return SharedPrefixes(*torch.split(packed, [num_groups + 1, num_rows, num_groups, num_rows]))


def find_groups(
    tables: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32], page_size: int
) -> list[PrefixGroup]:
    """Find the groups of rows that are worth a prefix pass; none in common."""
    num_rows = len(tables)
    if num_rows < LEAST_ROWS:
        return []
    order = np.argsort(tables[:, 0], kind="stable")
    if not (tables[order[1:], 0] == tables[order[:-1], 0]).any():
        return []
    order = _order_by_prefix(tables)
    num_pages = context_lens[order].astype(np.int64) // page_size
    common = np.minimum(_common_pages(tables[order]), np.minimum(num_pages[1:], num_pages[:-1]))
    least = -(-LEAST_SAVED // (page_size * (num_rows - 1)))  # the fewest pages that any group could save it with
    common[common < least] = 0
    spans = [span for first, stop in _runs(common > 0) for span in _divide(common, first, stop, page_size)]
    return [PrefixGroup(order[first : stop + 1], int(common[first:stop].min())) for first, stop in spans]


def _order_by_prefix(tables: npt.NDArray[np.int32]) -> Integers:
    """Order rows such that those that begin alike are neighbours; who shares a page shares all before it.

    Pages are looked at further and further apart, so that few columns are sorted by.
    """
    columns, column = [], 0
    while column < tables.shape[1]:
        columns.append(tables[:, column])
        column = 2 * column + 1
    return np.lexsort(columns[::-1])


def _common_pages(tables: npt.NDArray[np.int32]) -> Integers:
    """Count the leading pages that every row has in common with the next: [R - 1]."""
    equal = tables[1:] == tables[:-1]
    counts: Integers = np.where(equal.all(axis=1), tables.shape[1], equal.argmin(axis=1))
    return counts


def _divide(common: Integers, first: int, stop: int, page_size: int) -> list[tuple[int, int]]:
    """Choose the spans of `common` between `first` and `stop` whose rows make the groups that save most.

    Rows of a span share its smallest number of pages. Either all are one group, or the spans between its smallest
    numbers are divided each by itself; few leading bits count, so that this does not go deep.
    """
    depths = common[first:stop]
    deepest = np.maximum(0, np.frexp(depths)[1] - DEPTH_BITS)
    rough = depths >> deepest << deepest
    is_deeper = rough > rough.min()
    parts = [
        span
        for begin, end in (_runs(is_deeper) if is_deeper.any() else [])
        for span in _divide(common, first + begin, first + end, page_size)
    ]
    whole = _saved(common, first, stop)
    if sum(_saved(common, *span) for span in parts) > whole:
        return parts
    is_worth_it = stop - first + 1 >= LEAST_ROWS and whole * page_size >= LEAST_SAVED
    return [(first, stop)] if is_worth_it else []


def _saved(common: Integers, first: int, stop: int) -> int:
    """Count the pages that a group need not read again."""
    return int(common[first:stop].min()) * (stop - first)


def _runs(is_in: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Give first and stop of every run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_in, [False])).astype(np.int8)))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]
