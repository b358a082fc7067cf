"""Show the results of a sample job in the terminal: `python sample_jobs/show.py OUT.jsonl COLUMN...`"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROWS_SHOWN = 12


def main(output: Path, columns: list[str]) -> None:
    """Print the first rows, the columns asked for beside the completion, then where everything is."""
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    report = json.loads(output.with_name(output.name + ".report.json").read_text(encoding="utf-8"))
    table = Table(*columns, "completion", title=f"{output}: {min(ROWS_SHOWN, len(rows))} of {len(rows)} rows")
    for row in rows[:ROWS_SHOWN]:
        table.add_row(*(escape(str(row[column])) for column in columns), escape((row["completion"] or "").strip()))
    console = Console()
    console.print(table)
    cached, prompt = report["cached_tokens"], report["prompt_tokens"]
    console.print(f"{cached} of {prompt} prompt tokens were shared with an earlier row and not computed again.")
    console.print(f"Every row with its latency columns: {output}")
    console.print(f"What the run did and how fast:      {output}.report.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
