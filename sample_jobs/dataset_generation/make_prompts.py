"""Write prompts.jsonl: one row for every topic in every style, each with a seed of its own.

python sample_jobs/dataset_generation/make_prompts.py
"""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "Write {style} about {topic}. Write only the question."
TOPICS = (
    "watering house plants",
    "changing a bicycle tyre",
    "the phases of the moon",
    "saving for a holiday",
    "learning to swim as an adult",
    "keeping bees",
    "reading a train timetable",
    "baking bread",
)
STYLES = ("a short question", "a question that a child would ask", "a question whose answer is a number")
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 48}


def rows() -> list[dict[str, object]]:
    """Return the rows; those of their columns that are named like sampling parameters are ones."""
    made: list[dict[str, object]] = []
    for topic in TOPICS:
        for style in STYLES:
            messages = [{"role": "user", "content": TEMPLATE.format(topic=topic, style=style)}]
            made.append({"topic": topic, "style": style, "messages": messages, "seed": len(made), **SAMPLING})
    return made


if __name__ == "__main__":
    lines = (json.dumps(row) + "\n" for row in rows())
    Path(__file__).with_name("prompts.jsonl").write_text("".join(lines), encoding="utf-8")
