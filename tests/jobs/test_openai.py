"""Spec I2: OpenAI Batch files are recognised and answered in their format, failures in a file of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.summary import show_summary
from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt
from cbatch.engine.samples import sample_seed
from cbatch.errors import InputError, RowError, UsageError
from cbatch.jobs.journal import Entry, Head
from cbatch.jobs.openai import FIELDS, BatchRequests, to_response
from cbatch.jobs.params import ParamReader
from tests.conftest import ROOT
from tests.jobs.jobkit import Bench, read_rows
from tests.stub_engine import StubTokenizer, expected_text


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def chat(custom_id: Any, content: str = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "some-model", "messages": messages, **body},
    }


def text(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "some-model", "prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def errors(bench: Bench) -> list[dict[str, Any]]:
    return read_rows(bench.path / "out.jsonl.errors.jsonl")


def answer(content: str, **sampling: Any) -> str:
    ids = StubTokenizer().encode(f"user: {content}\nassistant: ")
    return expected_text(Prompt(0, ids, SamplingParams(**sampling)))


def test_every_request_is_answered_under_its_id(bench: Bench) -> None:
    bench.write([chat(f"request-{n}", f"question {n}") for n in range(30)])
    summary = bench.run()
    rows = bench.rows()
    assert (summary.exit_code, summary.rows_ok) == (0, 30)
    assert [row["custom_id"] for row in rows] == [f"request-{n}" for n in range(30)]
    contents = [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows]
    assert contents == [answer(f"question {n}") for n in range(30)]
    assert not (bench.path / "out.jsonl.errors.jsonl").exists()


def test_responses_are_what_the_public_client_expects(bench: Bench) -> None:
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    bench.write(
        [chat("a", max_tokens=3), text("b", "once", max_tokens=20, stop=["e"]), chat("c", seed=1, temperature=1)]
    )
    bench.run()
    for row, kind in zip(bench.rows(), (ChatCompletion, Completion, ChatCompletion), strict=True):
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert row["id"].startswith("batch_req_")
        assert row["error"] is None
        assert (row["response"]["status_code"], set(row["response"])) == (200, {"status_code", "request_id", "body"})
        body = kind.model_validate(row["response"]["body"], strict=True)
        assert body.model == "some-model"
        assert body.usage is not None
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
        assert body.choices[0].finish_reason in ("stop", "length")
        assert body.created > 1_600_000_000
    assert bench.rows()[0]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("wanted", "ours"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
            {"json_schema": '{"type": "object"}'},
        ),
    ],
)
def test_a_response_format_is_a_structure(wanted: dict[str, Any], ours: dict[str, Any]) -> None:
    given, _ = BatchRequests(ParamReader({})).interpret(chat("a", response_format=wanted))
    assert given == ours


@pytest.mark.parametrize(
    "wanted", [{}, {"type": "grammar"}, {"type": "json_schema"}, "json", {"type": "json_schema", "json_schema": {}}]
)
def test_a_response_format_that_is_none_is_an_error(wanted: Any) -> None:
    with pytest.raises(RowError, match=r"body\.response_format must be"):
        BatchRequests(ParamReader({})).interpret(chat("a", response_format=wanted))


def test_where_no_tool_is_to_be_called_the_prompt_names_none() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    renderings = [
        BatchRequests(ParamReader({})).interpret(chat("a", **body))[1]
        for body in ({}, {"tool_choice": "none"}, {"tool_choice": "none", "tools": tools})
    ]
    assert renderings[0] == renderings[1] == renderings[2]
    assert BatchRequests(ParamReader({})).interpret(chat("a", tools=tools, tool_choice="auto"))[1].tools == tools
    with pytest.raises(RowError, match=r"body\.tool_choice is not supported"):
        BatchRequests(ParamReader({})).interpret(chat("a", tools=tools, tool_choice="required"))


def test_of_tokens_with_one_text_the_likeliest_is_named() -> None:
    entries = [("\ufffd", -0.1), ("a", -1.0), ("\ufffd", -7.0)]
    top = [[{"token": token, "token_id": i, "logprob": logprob} for i, (token, logprob) in enumerate(entries)]]
    result: dict[str, Any] = {
        "completion": "x",
        "finish_reason": "length",
        "scheduled_at": "2030-01-01T00:00:00Z",
        "tokens": ["a"],
    }
    result |= {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "token_logprobs": [-1.0]}
    head = Head(b"k", b"s", ok=True, attempt=1, session=0)
    line, _ = to_response(Entry(head, text("a", "once"), result | {"top_logprobs": top}))
    scores = line["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(tokens.items()) for tokens in scores] == [[("\ufffd", -0.1), ("a", -1.0)]]


def test_every_sample_is_a_choice(bench: Bench) -> None:
    pytest.importorskip("openai")
    from openai.types.chat import ChatCompletion

    bench.write([chat("a", n=3, temperature=1, seed=5, logprobs=True), text("b", "once", n=2, temperature=1)])
    bench.run()
    chats, texts = (row["response"]["body"] for row in bench.rows())
    choices = ChatCompletion.model_validate(chats, strict=True).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [choice.message.content for choice in choices] == [
        answer("hi", temperature=1.0, seed=sample_seed(5, sample)) for sample in range(3)
    ]
    assert all(choice.logprobs is not None for choice in choices)
    assert len({choice["text"] for choice in texts["choices"]}) == 2
    assert chats["usage"]["completion_tokens"] == 3 * 8


def test_log_probabilities_are_answered_as_the_public_client_expects(bench: Bench) -> None:
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    bench.write(
        [
            chat("both", logprobs=True, top_logprobs=2, max_tokens=4),
            chat("own", logprobs=True, max_tokens=4),
            chat("none", logprobs=False, top_logprobs=0),
            text("text", "once", logprobs=2, max_tokens=4),
            text("prompt", "once", prompt_logprobs=0, max_tokens=0),
            chat("torn", top_logprobs=2),
        ]
    )
    bench.run()
    bodies = {row["custom_id"]: row["response"]["body"] for row in bench.rows()}
    for name, count in (("both", 2), ("own", 0)):
        scores = ChatCompletion.model_validate(bodies[name], strict=True).choices[0].logprobs
        assert scores is not None
        assert scores.content is not None
        assert "".join(token.token for token in scores.content) == bodies[name]["choices"][0]["message"]["content"]
        assert [(token.logprob, len(token.top_logprobs)) for token in scores.content] == [(-0.5, count)] * 4
        assert all(bytes(token.bytes or []).decode() == token.token for token in scores.content)
    assert bodies["none"]["choices"][0]["logprobs"] is None
    logprobs = Completion.model_validate(bodies["text"], strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * 4
    assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 4
    assert bodies["prompt"]["choices"][0]["text"] == ""
    assert bodies["prompt"]["prompt_token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert "needs logprobs to be true" in errors(bench)[0]["error"]["message"]


def test_requests_are_what_the_public_client_sends(bench: Bench) -> None:
    """Every field of the public parameters is either run, without effect, or refused: none is ignored."""
    pytest.importorskip("openai")
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    values: dict[str, Any] = {
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 1,
        "stop": ["x"],
        "tools": [],
        "stream": False,
        "user": "u",
        "metadata": {},
        "store": False,
    }
    for name in CompletionCreateParamsNonStreaming.__annotations__:
        if name in ("messages", "model"):
            continue
        value = values.get(name, ["unheard of"])
        bench.write([chat("a", **{name: value})])
        bench.run(restart=True)
        if name in values:
            assert bench.rows()[0]["error"] is None, name
        elif name not in ("service_tier", "safety_identifier", "prompt_cache_key"):
            assert bench.rows() == [], name
            assert errors(bench)[0]["error"]["code"] in ("invalid_request", "bad_parameter"), name


@pytest.mark.parametrize(
    ("prompt", "same_as"),
    [
        ("once", "once"),
        (["once"], "once"),
        ([1, 113, 112, 101, 103], "once"),
        ([[1, 113, 112, 101, 103]], "once"),
    ],
)
def test_text_completions_take_text_and_ids(bench: Bench, prompt: Any, same_as: str) -> None:
    bench.write([text("a", prompt)])
    bench.run()
    expected = expected_text(Prompt(0, StubTokenizer().encode(same_as), SamplingParams()))
    assert bench.rows()[0]["response"]["body"]["choices"][0]["text"] == expected


BAD = [
    chat("", "empty id"),
    chat(7, "a number for an id"),
    {**chat("method"), "method": "GET"},
    {**chat("url"), "url": "/v1/embeddings"},
    {**chat("body"), "body": []},
    {**chat("no messages"), "body": {"model": "m"}},
    chat("n", n=0),
    chat("stream", stream=True),
    chat("unknown", flux_capacitor=1),
    chat("range", temperature=-1),
    chat("near", temprature=1),
    text("several", ["one", "two"]),
    text("several of ids", [[1], [2]]),
    text("no ids", [[]]),
    chat("two limits", max_tokens=5, max_completion_tokens=9),
    chat("two schemas", response_format={"type": "json_object"}, json_object=False),
    '{"custom_id": "torn", "method"',
]


def test_bad_requests_go_to_the_error_file_and_cost_no_other(bench: Bench) -> None:
    lines: list[Any] = []
    for number, bad in enumerate(BAD):
        lines += [chat(f"good-{number}", f"{number}"), bad]
    bench.write(lines)
    summary = bench.run()
    assert (summary.exit_code, summary.rows_error) == (1, len(BAD))
    assert [row["custom_id"] for row in bench.rows()] == [f"good-{number}" for number in range(len(BAD))]
    failures = errors(bench)
    assert len(failures) == len(BAD)
    assert [row["custom_id"] for row in failures] == [
        bad["custom_id"] if isinstance(bad, dict) else None for bad in BAD
    ]
    for row in failures:
        assert row["response"] is None
        assert set(row["error"]) == {"code", "message"}
    assert bench.report()["errors"]["invalid_request"] >= 6
    assert bench.report()["errors_file"] == "out.jsonl.errors.jsonl"
    with pytest.raises(UsageError, match="would be overwritten"):
        bench.run(inputs=(str(bench.path / "out.jsonl.errors.jsonl"),))


def test_where_the_failed_requests_are_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write([chat("a"), chat("b", n=0)])
    show_summary(bench.run(), quiet=True)
    assert f"1 of 2 rows failed, see {bench.path / 'out.jsonl.errors.jsonl'}; the first: " in capsys.readouterr().err
    bench.write([chat("a")])
    show_summary(bench.run(), quiet=True)
    assert bench.report()["errors_file"] is None


def test_answers_come_under_the_ids_that_the_requests_have_now(bench: Bench) -> None:
    bench.write([chat("a"), chat("b")])
    bench.run()
    bench.write([chat("c"), chat("a")])
    assert bench.run().rows_replayed == 2
    assert [row["custom_id"] for row in bench.rows()] == ["c", "a"]


def test_an_error_file_of_an_earlier_run_does_not_stay(bench: Bench) -> None:
    bench.write([chat("a", "never fits")])
    bench.write([chat("a"), chat("b", n=0)])
    bench.run()
    assert len(errors(bench)) == 1
    bench.write([chat("a"), chat("b")])
    bench.run()
    assert not (bench.path / "out.jsonl.errors.jsonl").exists()


def test_a_lost_error_file_is_put_together_again(bench: Bench) -> None:
    bench.write([chat("a"), chat("b", temperature=-1)])
    bench.run()
    failures = errors(bench)
    (bench.path / "out.jsonl.errors.jsonl").unlink()
    assert bench.run().status == "done"
    assert errors(bench) == failures
    assert bench.num_prompts_run == 1
    assert bench.run().status == "unchanged"


def test_duplicate_ids_are_reported_together_before_anything_runs(bench: Bench) -> None:
    rows = [chat(f"r{n}") for n in range(1000)]
    for number in (500, 700, 999):
        rows[number] = chat("r3")
    bench.write([*rows, chat("r8")])
    with pytest.raises(InputError) as caught:
        bench.run()
    message = str(caught.value)
    assert message.startswith("4 requests have a custom_id that another has: ")
    assert "'r3' in requests 4 and 501" in message
    assert "'r8' in requests 9 and 1001" in message
    assert bench.engines == []
    assert not bench.output.exists()


def test_a_batch_file_on_standard_input_is_refused(bench: Bench) -> None:
    """Its ids could not be compared before anything runs."""
    command = [sys.executable, "-m", "tests.stub_engine", "run", "-", "-o", str(bench.output)]
    command += ["--model", str(bench.path / "model")]
    done = subprocess.run(command, input=json.dumps(chat("a")) + "\n", capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "write it to a file first" in done.stderr
    assert not bench.output.exists()


def test_a_batch_file_cannot_be_answered_in_parquet(bench: Bench) -> None:
    bench.write([chat("a")])
    with pytest.raises(UsageError, match="JSON lines"):
        bench.run(output=str(bench.path / "out.parquet"))
    assert bench.num_prompts_run == 0


def test_an_id_column_alone_makes_no_batch_file(bench: Bench) -> None:
    bench.write([{"custom_id": "a", "prompt": "p"}, {"custom_id": "a", "prompt": "q"}])
    bench.run()
    assert [row["custom_id"] for row in bench.rows()] == ["a", "a"]
    assert "completion" in bench.rows()[0]


@pytest.mark.parametrize(
    "wrong", [*({name: ...} for name in FIELDS), {"body": "text"}, {"body": None}, {"custom_id": 5}]
)
def test_a_first_request_with_a_mistake_costs_no_other(bench: Bench, wrong: dict[str, Any]) -> None:
    first = {name: value for name, value in (chat("bad") | wrong).items() if value is not ...}
    bench.write([first, *[chat(f"r{n}") for n in range(3)]])
    assert bench.run().rows_ok == 3
    assert [row["custom_id"] for row in bench.rows()] == ["r0", "r1", "r2"]
    (error,) = errors(bench)
    assert (error["custom_id"], error["error"]["code"]) == (first.get("custom_id"), "invalid_request")


def test_rows_with_a_prompt_are_no_requests_whatever_else_they_have(bench: Bench) -> None:
    page = {"custom_id": "a", "method": "GET", "url": "https://there", "body": "<p>", "prompt": "p"}
    bench.write([page])
    assert bench.run().rows_ok == 1
    assert bench.rows()[0]["body"] == "<p>"


def test_a_batch_resumes_like_any_job(bench: Bench) -> None:
    bench.write([chat(f"r{n}", f"{n}") for n in range(20)])
    bench.run()
    assert bench.run().status == "unchanged"
    bench.write([chat(f"r{n}", f"{n}") for n in range(25)])
    assert bench.run().rows_replayed == 20
    assert bench.num_prompts_run == 25


def test_defaults_of_the_command_line_count_under_the_body(bench: Bench) -> None:
    bench.write([chat("a"), chat("b", max_tokens=2)])
    bench.run(sampling={"max_tokens": 4}, system_prompt="be brief")
    used = [row["response"]["body"]["usage"]["completion_tokens"] for row in bench.rows()]
    assert used == [4, 2]
    journal = (bench.path / "out.jsonl.journal.jsonl").read_text(encoding="utf-8")
    prompt_tokens = json.loads(journal.splitlines()[1])["result"]["prompt_tokens"]
    assert prompt_tokens == len(StubTokenizer().encode("system: be brief\nuser: hi\nassistant: "))
