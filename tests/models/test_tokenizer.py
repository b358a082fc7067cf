"""Encoding and decoding: BOS once, no EOS behind a prompt, templates as transformers applies them, text untouched."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from cbatch.errors import RowError, UsageError
from cbatch.models.source import ModelSource
from cbatch.models.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE, build_tiny_tokenizer

USER = [{"role": "user", "content": "the sand"}]
CODE = "if a >= 3 , print ( 'k' ) ; d : [ 1 ] !"
CLOCK = datetime(2030, 1, 2, 3, 4, 5)


def tiny(**changes: Any) -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer(**changes), VOCAB_SIZE)


@pytest.mark.parametrize("text", ["", "hello", "two  spaces and\nlines", "Naïve café costs 7 €, 漢字 and 👍🏽", "\0"])
def test_text_is_encoded_as_transformers_does_and_comes_back(text: str) -> None:
    reference = build_tiny_tokenizer()
    assert tiny().encode(text) == reference(text)["input_ids"]
    assert tiny().decode(tiny().encode(text)) == text


def test_a_batch_is_encoded_as_its_texts_are() -> None:
    texts = ["the", "", "<s>and", "a much longer one than the others"]
    assert tiny().encode_many(texts) == [tiny().encode(text) for text in texts]


def test_a_text_that_begins_with_bos_gets_it_once() -> None:
    assert tiny().encode("<s>the") == tiny().encode("the")
    assert tiny().encode("the").count(BOS_ID) == 1


def test_special_tokens_inside_a_text_are_kept() -> None:
    ids = tiny().encode("<s>a</s>b<s>")
    assert (ids.count(BOS_ID), ids.count(EOS_ID)) == (2, 1)


def test_without_a_bos_of_its_own_a_tokenizer_gets_none() -> None:
    tokenizer = tiny(add_bos_token=False)
    assert BOS_ID not in tokenizer.encode("the")
    assert tokenizer.encode("<s>the").count(BOS_ID) == 1
    assert tokenizer.encode("") == []


def test_an_eos_that_the_tokenizer_appends_is_taken_away_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = tiny(add_bos_token=True, add_eos_token=True)
    assert "appends EOS" in caplog.text
    assert tokenizer.encode("the") == tiny().encode("the")
    assert tokenizer.encode("the</s>") == tiny().encode("the</s>")
    assert tokenizer.encode("")[-1:] == [BOS_ID]
    assert tokenizer.encode_chat(USER) == tiny().encode_chat(USER)


def test_a_slow_tokenizer_keeps_the_same_rules() -> None:
    tokenizer = Tokenizer(ByT5Tokenizer(extra_ids=0))
    ids = tokenizer.encode("a b !")
    assert len(ids) == len("a b !")
    assert tokenizer.decode([*ids, 10**6]) == "a b !"


def test_a_chat_is_what_the_template_renders_with_one_bos() -> None:
    reference = build_tiny_tokenizer()
    expected = reference.apply_chat_template(USER, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tiny().encode_chat(USER) == expected
    assert expected.count(BOS_ID) == 1


def test_template_arguments_and_tools_reach_the_template() -> None:
    template = "{{ messages[0]['content'] }}{{ mood }}{{ tools[0]['function']['name'] }}{{ add_generation_prompt }}"
    tokenizer = tiny(chat_template=template)
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    ids = tokenizer.encode_chat(USER, tools=[tool], chat_template_kwargs={"mood": "calm"})
    assert tokenizer.decode(ids) == "the sandcalmlookTrue"
    closed = tokenizer.encode_chat(
        USER, tools=[tool], chat_template_kwargs={"mood": "", "add_generation_prompt": False}
    )
    assert tokenizer.decode(closed).endswith("lookFalse")


def test_the_assistants_last_message_is_continued_where_asked() -> None:
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    ids = tiny().encode_chat(messages, chat_template_kwargs={"continue_final_message": True})
    assert tiny().decode(ids).endswith("assistant\nOnce")


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", USER, "roles must alternate"),
        (None, [{"role": "wizard", "content": "hi"}], "unknown role wizard"),
        (None, [], "empty"),
        (None, [{"content": "no role"}], "role"),
        ("{{ messages[0]['content'] + 1 }}", USER, "str"),
        ("{% for x in messages %}{{ x.nothing.there }}{% endfor %}", USER, "nothing"),
        ("{{ messages", USER, ""),
    ],
)
def test_a_template_that_raises_is_the_rows_error(template: str | None, messages: list[Any], said: str) -> None:
    tokenizer = tiny() if template is None else tiny(chat_template=template)
    with pytest.raises(RowError) as raised:
        tokenizer.encode_chat(messages)
    assert raised.value.code == "template_error"
    assert said in raised.value.message


def test_an_error_that_repeats_the_whole_chat_is_cut() -> None:
    tokenizer = tiny(chat_template="{{ messages[0].content }}{{ messages[1].content.split('.')[0] }}")
    messages = [{"role": "user", "content": "long " * 1000}, {"role": "assistant", "content": "One. Two"}]
    with pytest.raises(RowError, match="does not appear") as raised:
        tokenizer.encode_chat(messages, chat_template_kwargs={"continue_final_message": True})
    assert len(raised.value.message) < 400


def test_template_arguments_cannot_change_how_it_is_applied() -> None:
    with pytest.raises(RowError, match="cannot set chat_template, tokenize"):
        tiny().encode_chat(USER, chat_template_kwargs={"tokenize": True, "chat_template": "x"})


def test_lone_surrogates_are_the_rows_error_wherever_they_stand() -> None:
    for encode in (
        lambda: tiny().encode("ok \ud83d"),
        lambda: tiny().encode_chat([{"role": "user", "content": "\udc4d"}]),
    ):
        with pytest.raises(RowError, match="lone surrogate") as raised:
            encode()
        assert raised.value.code == "bad_text"


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y %H:%M:%S') }}",
        '{% macro date() %}{{ strftime_now( "%d %b %Y %H:%M:%S" ) }}{% endmacro %}{{ date() }}',
        "{% if strftime_now is defined %}{% set now = strftime_now('%d %b %Y %H:%M:%S') %}{{ now }}{% endif %}",
    ],
)
def test_a_template_prints_the_time_that_it_is_given(template: str) -> None:
    tokenizer = tiny(chat_template=template)
    assert tokenizer.decode(tokenizer.encode_chat(USER, now=CLOCK)) == "02 Jan 2030 03:04:05"


def test_a_templates_clock_stands_still_where_nobody_sets_it() -> None:
    tokenizer = tiny(chat_template="{{ strftime_now('%H:%M:%S.%f') }}")
    assert len({tuple(tokenizer.encode_chat(USER)) for _ in range(20)}) == 1


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools() -> None:
    templates = {"default": "plain {{ strftime_now('%Y') }}", "tool_use": "tools {{ strftime_now('%Y') }}"}
    tokenizer = tiny(chat_template=templates)
    assert tokenizer.decode(tokenizer.encode_chat(USER, now=CLOCK)) == "plain 2030"
    assert tokenizer.decode(tokenizer.encode_chat(USER, tools=[{"name": "f"}], now=CLOCK)) == "tools 2030"


def test_decoding_skips_special_tokens_and_ids_beyond_the_vocabulary() -> None:
    ids = tiny().encode("the sand")
    assert tiny().decode([BOS_ID, *ids, VOCAB_SIZE - 1, EOS_ID, 10**9]) == "the sand"
    assert tiny().decode([VOCAB_SIZE - 1]) == ""
    assert tiny().decode([]) == ""


def test_spaces_are_never_tidied() -> None:
    tokenizer = tiny(clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode(CODE)) == CODE


def test_a_template_is_known_to_be_there_or_not() -> None:
    assert tiny().has_chat_template
    assert not tiny(chat_template=None).has_chat_template


def test_the_vocabulary_is_the_models_where_it_is_known() -> None:
    assert tiny().vocab_size == VOCAB_SIZE
    assert Tokenizer(build_tiny_tokenizer()).vocab_size == len(build_tiny_tokenizer())


def test_tokens_that_the_model_does_not_have_are_the_rows_error() -> None:
    small = Tokenizer(build_tiny_tokenizer(), vocab_size=280)
    assert small.encode("a") == tiny().encode("a")
    for encode in (lambda: small.encode("user"), lambda: small.encode_chat(USER)):
        with pytest.raises(RowError, match="vocabulary is 0 to 279") as raised:
            encode()
        assert raised.value.code == "unknown_token"


def test_truncation_saved_with_a_tokenizer_does_not_cut_prompts() -> None:
    wrapped = build_tiny_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(4)
    wrapped.backend_tokenizer.enable_padding(length=600)
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.encode("z" * 700) == tiny().encode("z" * 700)
    assert tokenizer.encode("z") == tiny().encode("z")


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = tiny()
    texts = [f"the {i} and {i * i}" for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == texts


def test_a_saved_tokenizer_loads_as_it_was(tiny_llama: Path) -> None:
    loaded = load_tokenizer(ModelSource(str(tiny_llama)), VOCAB_SIZE)
    assert loaded.encode("the sand") == AutoTokenizer.from_pretrained(tiny_llama)("the sand")["input_ids"]
    assert loaded.encode_chat(USER) == tiny().encode_chat(USER)
    assert loaded.eos_token_id == EOS_ID


def test_a_folder_without_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the tokenizer.*\(--tokenizer names another one\)"):
        load_tokenizer(ModelSource(str(tmp_path)))


def test_a_token_has_its_own_text_whatever_it_is() -> None:
    tokenizer = Tokenizer(build_tiny_tokenizer(), 300)
    special = tokenizer.special_token_id("<|im_end|>")
    assert special is not None
    assert tokenizer.special_token_id("the") is None
    assert tokenizer.token_text(special) == "<|im_end|>"
    (e_acute, *_) = tokenizer.encode("é")[1:]
    assert tokenizer.token_text(e_acute) == "\ufffd"
    assert tokenizer.token_text(tokenizer.encode("\n")[1]) == "\n"
    assert tokenizer.token_text(299) == ""
    assert [tokenizer.token_text(token) for token in tokenizer.encode("the end")[1:]] == ["the", " ", "en", "d"]


def test_a_token_keeps_the_space_that_decoders_drop_at_the_start_of_a_text() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<0x20>", "<0xE2>", "▁the", "the", "a", "▁"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)  # as Llama 2's
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))
    assert tokenizer.decode([5, 5]) == "the the"
    assert [tokenizer.token_text(token) for token in range(1, 9)] == [
        "<s>", "</s>", " ", "\ufffd", " the", "the", "a", " ",
    ]  # fmt: skip
