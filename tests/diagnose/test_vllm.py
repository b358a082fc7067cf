"""vLLM command lines: what is read of them, what its documentation says excludes what, and what holds them back."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.config import DiagnoseConfig
from cbatch.diagnose import situation as situation_module
from cbatch.diagnose.diagnosis import diagnose_vllm
from cbatch.diagnose.vllm import is_vllm_command, parse_command, parse_version
from cbatch.errors import UsageError

NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""
DRAFT = """--speculative-config '{"model": "small/model", "num_speculative_tokens": 4}'"""
EAGLE = """--speculative_config '{"model": "yuhuili/EAGLE-LLaMA3", "method": "eagle"}'"""


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("vllm serve org/model", True),
        ("CUDA_VISIBLE_DEVICES=0 /opt/venv/bin/vllm serve org/model", True),
        ("python -m vllm.entrypoints.openai.api_server --model m", True),
        ("#!/bin/sh\nexec vllm \\\n serve m", True),
        ("out.jsonl", False),
        ("job.toml", False),
        ('{"prompt": "vllmish"}', False),
        ('{"prompt": "what does vllm serve do?"}', False),
    ],
)
def test_a_command_line_is_told_from_a_file(text: str, is_one: bool) -> None:
    assert is_vllm_command(text) is is_one


def test_what_matters_is_read_and_the_rest_is_named() -> None:
    command = parse_command(
        "HF_TOKEN=x vllm serve org/model --max-num-seqs=64 --max_num_batched_tokens 4k --block-size 32 \\\n"
        "  -tp 2 --no-enable-prefix-caching --gpu-memory-utilization 0.8 --max-model-len 16K --port 8000 # mine"
    )
    assert command.model == "org/model"
    assert command.engine["max_requests_per_batch"] == 64
    assert command.engine["max_batch_tokens"] == 4000
    assert (command.engine["page_size"], command.engine["max_model_len"]) == (32, 16384)
    assert command.engine["allow_block_sharing"] is False
    assert command.gpu_memory_utilization == 0.8
    assert command.ignored == ["--port", "--tensor-parallel-size"]
    assert parse_command("python -m vllm.entrypoints.openai.api_server --model m").model == "m"
    assert parse_command("vllm serve m").engine["max_requests_per_batch"] == 1024


# The command line, what excludes one another, and the versions of which that is said.
DOCUMENTED = [
    (f"-pp 2 {NGRAM}", "--speculative-config with --pipeline-parallel-size", "up to 0.15.0"),
    (DRAFT, "--speculative-config with a draft model", "up to 0.10.0"),
    ("--speculative-model small/model", "--speculative-config with a draft model", "up to 0.10.0"),
    (f"--enable-lora {NGRAM}", "--speculative-config with --enable-lora", ""),
    (f"--enable-prompt-embeds {NGRAM}", "--speculative-config with --enable-prompt-embeds", ""),
    (f"--device cpu {NGRAM}", "--speculative-config on a CPU", ""),
    (f"--task embed {NGRAM}", "--speculative-config with a pooling model", ""),
    ("--num-scheduler-steps 8 --enable-chunked-prefill", "--num-scheduler-steps with chunked prefill", ""),
    ("--num-scheduler-steps 8 --enable-lora", "--num-scheduler-steps with --enable-lora", ""),
    ("--async-scheduling -pp 2", "--async-scheduling with --pipeline-parallel-size", "up to 0.14.0"),
    (f"--async-scheduling {NGRAM}", "--async-scheduling with --speculative-config", "up to 0.13.0"),
    ("--max-num-batched-tokens 64 --max-num-seqs 128", "--max-num-batched-tokens below --max-num-seqs", ""),
    (
        "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192",
        "--no-enable-chunked-prefill with --max-num-batched-tokens below --max-model-len",
        "",
    ),
]


@pytest.mark.parametrize(("options", "settings", "versions"), DOCUMENTED)
def test_what_is_documented_to_exclude_one_another_is_named(options: str, settings: str, versions: str) -> None:
    conflicts = parse_command(f"vllm serve m {options}").conflicts(None)
    assert [(conflict.settings, conflict.versions) for conflict in conflicts] == [(settings, versions)]
    assert conflicts[0].source.startswith("vLLM, ")
    assert conflicts[0].advice


@pytest.mark.parametrize(
    "options",
    ["", NGRAM, EAGLE, "-pp 2", "-tp 8 --enable-lora", "--num-scheduler-steps 1 --enable-lora", "--async-scheduling"],
)
def test_what_goes_together_is_left_alone(options: str) -> None:
    assert parse_command(f"vllm serve m {options}").conflicts(None) == []


@pytest.mark.parametrize(
    ("options", "version", "count"),
    [
        (f"-pp 2 {NGRAM}", "0.15.0", 1),
        (f"-pp 2 {NGRAM}", "0.9.2", 1),
        (f"-pp 2 {NGRAM}", "v0.15.1", 0),
        (f"-pp 2 {NGRAM}", "0.16.0", 0),
        (DRAFT, "0.10.0", 1),
        (DRAFT, "0.10.1.post1", 0),
        (DRAFT, "0.10.1rc1", 0),
        (DRAFT, "0.10", 1),
        (f"--enable-lora {NGRAM}", "0.99.0", 1),
    ],
)
def test_a_newer_version_takes_what_an_older_one_refused(options: str, version: str, count: int) -> None:
    assert len(parse_command(f"vllm serve m {options}").conflicts(parse_version(version))) == count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m --max-num-seqs many", "--max-num-seqs must be a whole number, 1 or more: it is 'many'"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs must be a whole number, 1 or more: it is missing"),
        ("vllm serve m --max-num-seqs 0", "--max-num-seqs must be a whole number, 1 or more: it is '0'"),
        ("vllm serve m --max-num-seqs -3", "--max-num-seqs must be a whole number, 1 or more: it is '-3'"),
        ("vllm serve m --max-num-batched-tokens 0", "--max-num-batched-tokens must be a whole number, 1 or more"),
        ("vllm serve m --max-model-len inf", "--max-model-len must be a whole number, 1 or more"),
        ("vllm serve m --max-model-len 0.5", "--max-model-len must be a whole number, 1 or more"),
        ("vllm serve m --max-model-len 1kk", "--max-model-len must be a whole number, 1 or more"),
        ("vllm serve m --block-size 0", "--block-size must be a whole number, 1 or more"),
        ("vllm serve m --num-gpu-blocks-override 0", "--num-gpu-blocks-override must be a whole number, 1 or more"),
        ("vllm serve m --num-scheduler-steps 0", "--num-scheduler-steps must be a whole number, 1 or more"),
        ("vllm serve m -pp 0", "--pipeline-parallel-size must be a whole number, 1 or more"),
        ("vllm serve m --gpu-memory-utilization nan", "--gpu-memory-utilization must be a number above 0"),
        ("vllm serve m --speculative-config {broken", "must be JSON"),
        ("vllm serve m --speculative-config 3", "must be a JSON object"),
        ("vllm serve 'm", "cannot be read"),
    ],
)
def test_a_mistake_in_it_is_said(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_command(text)


@pytest.mark.parametrize("text", ["new", "1", "0.x", ""])
def test_what_is_no_version_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="no version of vLLM"):
        parse_version(text)


@pytest.mark.parametrize(
    ("options", "cause", "advice"),
    [
        ("--max-num-seqs 8", "request limit", "--max-num-seqs"),
        ("--max-num-seqs 64 --max-num-batched-tokens 64", "token budget", "--max-num-batched-tokens"),
        ("--num-gpu-blocks-override 1000 --max-num-seqs 128", "memory", "--gpu-memory-utilization"),
        ("--block-size 4096 --num-gpu-blocks-override 40 --max-num-seqs 128", "paging", "--block-size 16"),
    ],
)
def test_a_default_that_holds_it_back_is_named_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, options: str, cause: str, advice: str
) -> None:
    monkeypatch.setattr(situation_module, "MAX_TOKENS", 8_000)
    diagnosis = diagnose_vllm(f"vllm serve m {options}", DiagnoseConfig())
    first: Any = diagnosis.findings[0]
    assert (first.cause, advice in first.advice) == (cause, True)
    assert first.gain > 0.03
    assert any("preset h100-70b-fp8" in note for note in diagnosis.notes)


def test_prompts_in_one_piece_and_steps_by_the_dozen_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(situation_module, "MAX_TOKENS", 8_000)
    text = "vllm serve m --max-num-seqs 32 --no-enable-chunked-prefill --max-num-batched-tokens 8192"
    findings = {finding.cause: finding for finding in diagnose_vllm(text, DiagnoseConfig()).findings}
    assert (findings["chunked prefill"].itl_factor or 0) > 1.5
    assert "--no-enable-chunked-prefill" in findings["chunked prefill"].advice
    text = "vllm serve m --max-num-seqs 16 --num-scheduler-steps 12"
    causes = [finding.cause for finding in diagnose_vllm(text, DiagnoseConfig()).findings]
    assert "continuous batching" in causes
