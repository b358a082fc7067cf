"""Reads a vLLM command line: what it sets of a scheduler, and which features it turns on. Called by `subjects`.

Only what matters here is read; the rest is named, so that nobody takes it for looked at.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbatch.diagnose.findings import Conflict
from cbatch.diagnose.vllm_table import VLLM_EXCLUSIONS, Version, VllmFeatures
from cbatch.errors import UsageError

SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
DRAFTLESS = ("ngram", "[ngram]", "eagle", "eagle3", "medusa", "mtp", "deepseek_mtp", "mlp_speculator", "suffix")
OPTIONS = {
    "page_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_batch_tokens": "--max-num-batched-tokens",
    "max_requests_per_batch": "--max-num-seqs",
    "memory": "raise --gpu-memory-utilization, or lower --max-model-len and the memory of activations",
    "offload": "",
    "chunked_prefill": "leave --no-enable-chunked-prefill out",
    "allow_block_sharing": "leave --no-enable-prefix-caching out",
    "speculation": """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""",
    "no_speculation": "leave --speculative-config out",
}
# Of a GPU with 70 GiB or more that is no A100; vllm/engine/arg_utils.py, get_batch_defaults.
DEFAULT_BATCH_TOKENS, DEFAULT_REQUESTS = 8_192, 1_024
UNITS = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1 << 20}


@dataclass(slots=True)
class VllmCommand:
    """What a command line says."""

    engine: dict[str, Any] = field(default_factory=dict)  # under the names of our settings
    features: VllmFeatures = field(default_factory=VllmFeatures)
    model: str | None = None
    gpu_memory_utilization: float | None = None
    scheduler_steps: int | None = None
    defaults: list[str] = field(default_factory=list)  # options that were not given
    ignored: list[str] = field(default_factory=list)

    def conflicts(self, version: Version | None) -> list[Conflict]:
        """List what excludes one another in it, as far as that is documented of a version."""
        return [
            Conflict(e.settings, "they exclude one another", e.advice, e.versions, f"vLLM, {e.page}")
            for e in VLLM_EXCLUSIONS
            if e.excludes(self.features) and e.holds_in(version)
        ]


def is_vllm_command(text: str) -> bool:
    """Whether a text looks like a command line of vLLM; rows of JSON never do, whatever they are about."""
    if text.lstrip().startswith(("{", "[")):
        return False
    words = text.replace("\\\n", " ").split()
    return any(word == "vllm" or word.endswith("/vllm") or word.startswith("vllm.entrypoints") for word in words[:12])


def parse_version(text: str) -> Version:
    """Read '0.10.1', 'v0.10.1.post1' or '0.10.1rc1', all three the same. Raises UsageError."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise UsageError(f"{text!r} is no version of vLLM", hint="0.10.1, say")
    return tuple(int(number or 0) for number in found.groups())


def parse_command(text: str) -> VllmCommand:
    """Read a command line. Raises UsageError for a value that cannot be."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"the vllm command line cannot be read: {error}") from None
    given, positional = _options(words)
    command = VllmCommand(model=given.pop("model", None) or (positional[0] if positional else None))
    engine = command.engine
    engine["page_size"] = _take(given, "block-size", _count)
    engine["num_blocks"] = _take(given, "num-gpu-blocks-override", _count)
    engine["max_model_len"] = _take(given, "max-model-len", _length)
    tokens, requests = _take(given, "max-num-batched-tokens", _length), _take(given, "max-num-seqs", _count)
    engine["max_batch_tokens"] = tokens or max(DEFAULT_BATCH_TOKENS, requests or 0)
    engine["max_requests_per_batch"] = min(requests or DEFAULT_REQUESTS, engine["max_batch_tokens"])
    defaults = {
        "max-num-batched-tokens": (tokens, "max_batch_tokens"),
        "max-num-seqs": (requests, "max_requests_per_batch"),
    }
    command.defaults = [f"--{name} {engine[ours]}" for name, (value, ours) in defaults.items() if value is None]
    engine["allow_block_sharing"] = _flag(given, "enable-prefix-caching") is not False
    command.gpu_memory_utilization = _take(given, "gpu-memory-utilization", _share)
    command.scheduler_steps = _take(given, "num-scheduler-steps", _count)
    command.features = _features(given, engine, tokens, requests, command.scheduler_steps)
    command.ignored = sorted(f"--{name}" for name in given)
    return command


def _features(
    given: dict[str, Any], engine: dict[str, Any], tokens: int | None, requests: int | None, steps: int | None
) -> VllmFeatures:
    config = _speculative_config(given)
    method = str(config.get("method") or config.get("model") or "") if config is not None else ""
    by_draft = config is not None and config.get("method") in (None, "draft_model") and method not in DRAFTLESS
    return VllmFeatures(
        speculation=config is not None,
        draft_model=by_draft and "eagle" not in method.lower(),
        pipeline_parallel=(_take(given, "pipeline-parallel-size", _count) or 1) > 1,
        lora=_flag(given, "enable-lora") is True,
        pooling=given.pop("task", None) in ("embed", "embedding", "classify", "score", "reward")
        or given.pop("runner", None) == "pooling",
        chunked_prefill=_flag(given, "enable-chunked-prefill"),
        prompt_embeds=_flag(given, "enable-prompt-embeds") is True,
        multi_step=(steps or 1) > 1,
        async_scheduling=_flag(given, "async-scheduling") is True,
        cpu=given.pop("device", None) == "cpu",
        max_batch_tokens=tokens,
        max_requests=requests,
        max_model_len=engine["max_model_len"],
    )


def _speculative_config(given: dict[str, Any]) -> dict[str, Any] | None:
    """Read the speculation that is asked for, in vLLM's new spelling or the old one; None where there is none."""
    text, model = given.pop("speculative-config", None), given.pop("speculative-model", None)
    given.pop("num-speculative-tokens", None)
    if text is None:
        return {"model": model} if model is not None else None
    try:
        config = json.loads(text)
    except (TypeError, ValueError):
        raise UsageError(f"--speculative-config must be JSON: it is {text!r}") from None
    if not isinstance(config, dict):
        raise UsageError(f"--speculative-config must be a JSON object: it is {text!r}")
    return config


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Tell options, under their names without dashes, from what else stands behind `vllm serve` or the module."""
    start = next((i for i, w in enumerate(words) if w.endswith("vllm") or w.startswith("vllm.entrypoints")), -1)
    given: dict[str, Any] = {}
    positional: list[str] = []
    name: str | None = None
    for word in words[start + 1 :]:
        if word in SHORT or word.startswith("--"):
            spelled, has_value, value = word.partition("=")
            name = SHORT.get(spelled, spelled.removeprefix("--").replace("_", "-"))
            given[name] = value if has_value else True
            name = None if has_value else name
        elif name is not None:
            given[name], name = word, None
        elif word not in ("serve", "bench"):
            positional.append(word)
    return given, positional


def _flag(given: dict[str, Any], name: str) -> bool | None:
    """Tell whether an on/off option was given, and how."""
    on, off = given.pop(name, None), given.pop(f"no-{name}", None)
    if off is not None:
        return False
    return None if on is None else str(on).lower() not in ("false", "0")


def _take(given: dict[str, Any], name: str, convert: Callable[[str], Any]) -> Any:
    """Read an option's value; None where it was not given. `convert` raises ValueError with what it must be."""
    value = given.pop(name, None)
    if value is None:
        return None
    try:
        return convert("" if value is True else value)
    except ValueError as error:
        said = "missing" if value is True else repr(value)
        raise UsageError(f"--{name} must be {error}: it is {said}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number, 1 or more")
    return int(text)


def _length(text: str) -> int | None:
    """Read a number of tokens: 8192, 8k (thousands), 8K (of 1024); None where vLLM finds it out."""
    if text in ("auto", "-1"):
        return None
    number, unit = text.rstrip("kKmM"), text[-1:]
    try:
        length = int(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        length = 0
    if length < 1 or len(text) > len(number) + 1:
        raise ValueError("a whole number, 1 or more, with k, K, m or M behind it or without")
    return length


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError("a number above 0, and 1 at most")
    return share
