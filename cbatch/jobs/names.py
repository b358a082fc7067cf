"""Which parameter a column's name means, if any: exact, or so nearly that it must be a slip.

Called by `params` once for every distinct column name. The rule errs on the side of plain data for short words
(`top`, `seeds`, `choices` are columns) and of parameters for long ones (`temprature` is a slip).
"""

from __future__ import annotations

# Other tools' words for ours. A row that has one means it, and would be run with another value than it asks for.
OTHER_SPELLINGS = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "random_seed": "seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "response_format": "json_schema",
}
MIN_LENGTH_ONE_SLIP = 8  # shorter names are too close to ordinary words
MIN_LENGTH_TWO_SLIPS = 11


def find_meant(column: str, names: tuple[str, ...]) -> str | None:
    """Return the parameter that a column is or nearly is; None for plain data."""
    if column in names:
        return column
    squeezed = _squeeze(column)
    words = [name for name in names if len(name) > 1]
    for name in (*words, *OTHER_SPELLINGS):
        if squeezed == _squeeze(name):
            return OTHER_SPELLINGS.get(name, name)
    lower = column.lower()
    for name in words:
        allowed = (len(name) >= MIN_LENGTH_ONE_SLIP) + (len(name) >= MIN_LENGTH_TWO_SLIPS)
        if lower[:1] == name[0] and abs(len(lower) - len(name)) <= allowed and slips(lower, name) <= allowed:
            return name
    return None


def _squeeze(name: str) -> str:
    """Drop case and separators: 'max-tokens', 'maxTokens' and 'Max Tokens' are one word."""
    return "".join(char for char in name.lower() if char.isalnum())


def slips(left: str, right: str) -> int:
    """Count the letters added, left out, replaced or swapped with their neighbour."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
