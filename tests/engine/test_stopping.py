"""Why and where a completion ends, against a search through the whole text after every token."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from cbatch.engine.stopping import MAX_PENDING_TOKENS, REPLACEMENT, Stop, StopCondition, StopStrings

Decode = Callable[[Sequence[int]], str]


class Vocabulary(Protocol):
    """A toy tokenizer."""

    @property
    def pieces(self) -> Sequence[object]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def byte_token(self, byte: int) -> int: ...


class ByteVocabulary:
    """Tokens are byte strings, as in GPT-2's family; a special one has no text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def byte_token(self, byte: int) -> int:
        return self.pieces.index(bytes([byte]))


class SentencePieceVocabulary:
    """Tokens are words, "▁" is a space, and the first one is dropped; bytes stand for what has no word.

    As the tokenizers library decodes Llama: special tokens are skipped, then a run of bytes that is no valid text
    becomes one replacement character per byte.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        text, run = "", b""
        for piece in [self.pieces[i] for i in ids if self.pieces[i] != "</s>"] + [""]:
            if byte := re.fullmatch("<0x(..)>", piece):
                run += bytes.fromhex(byte[1])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            run = b""
            text += piece.replace("▁", " ")
        return text.removeprefix(" ")

    def byte_token(self, byte: int) -> int:
        return self.pieces.index(f"<0x{byte:02X}>")


def first_stop(
    stop: tuple[str, ...], decode: Decode, ids: Sequence[int], min_tokens: int = 0, *, include: bool = False
) -> tuple[int, Stop] | None:
    """The number of tokens after which the text so far holds a stop string, and the first one that it holds.

    Those that end in the text of the first `min_tokens` tokens are none.
    """
    for count in range(min_tokens + 1, len(ids) + 1):
        settled = decode(ids[:count]).rstrip(REPLACEMENT)  # the rest may be a character in the making
        ignored = max(len(decode(ids[:end]).rstrip(REPLACEMENT)) for end in range(min_tokens + 1))
        places = [(at, s) for at in range(len(settled)) for s in stop if settled.startswith(s, at)]
        found = [(at, s) for at, s in places if at + len(s) > ignored]
        if found:
            at, s = min(found)
            return count, Stop("stop", stop_reason=s, text_length=at + len(s) if include else at)
    return None


def fed(
    stop: tuple[str, ...], decode: Decode, ids: Sequence[int], min_tokens: int = 0, *, include: bool = False
) -> tuple[int, Stop] | None:
    strings = StopStrings(stop, decode, include=include)
    for count, token in enumerate(ids, start=1):
        if (result := strings.feed(token, counts=count > min_tokens)) is not None:
            return count, result
    return None


# The first ten are whole text, drawn most.
BYTES = ByteVocabulary(
    [b"", b"a", b"b", b"ab", b"ba", b"abba", b" a", b" ", b"\n", "é".encode()]
    + [b"a\nb", b"\xe2\x82", b"\xaca", b"a\xf0\x9f"]
    + [bytes([byte]) for byte in "é€🙂".encode()]
)
WORDS = SentencePieceVocabulary(
    ["</s>", "▁", "▁a", "a", "b", "▁ab", "ba", "\n", "▁▁", "é"]
    + ["▁€"]
    + [f"<0x{byte:02X}>" for byte in "é€🙂".encode()]
)
ALPHABET = ["a", "b", " ", "\n", "é", "€", "🙂"]


def random_ids(rng: random.Random, vocabulary: Vocabulary) -> list[int]:
    """Whole pieces, characters spelled byte by byte, and now and then a byte that fits nothing."""
    ids: list[int] = []
    while len(ids) < 30:
        if rng.random() < 0.3:
            ids += [vocabulary.byte_token(byte) for byte in rng.choice("é€🙂").encode()]
        else:
            ids.append(rng.randrange(len(vocabulary.pieces) if rng.random() < 0.1 else 10))
    return ids


@pytest.mark.parametrize("vocabulary", [BYTES, WORDS], ids=["bytes", "sentencepiece"])
def test_a_stop_is_found_as_soon_and_where_the_whole_text_holds_it(vocabulary: Vocabulary) -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(800):
        ids = random_ids(rng, vocabulary)
        stop = tuple("".join(rng.choices(ALPHABET, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4)))
        expected = first_stop(stop, vocabulary.decode, ids)
        assert fed(stop, vocabulary.decode, ids) == expected, (stop, [vocabulary.pieces[i] for i in ids])
        hits += expected is not None
    assert 200 < hits < 700


@pytest.mark.parametrize("vocabulary", [BYTES, WORDS], ids=["bytes", "sentencepiece"])
def test_a_stop_counts_only_after_min_tokens_and_is_kept_where_asked(vocabulary: Vocabulary) -> None:
    rng = random.Random(6)
    later = 0
    for _ in range(500):
        ids = random_ids(rng, vocabulary)
        stop = tuple("".join(rng.choices(ALPHABET, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))
        min_tokens, include = rng.randrange(12), rng.random() < 0.5
        expected = first_stop(stop, vocabulary.decode, ids, min_tokens, include=include)
        assert fed(stop, vocabulary.decode, ids, min_tokens, include=include) == expected
        at_once = first_stop(stop, vocabulary.decode, ids, include=include)
        later += at_once is not None and at_once[0] <= min_tokens
    assert later > 100


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["JKLM"], ("KL",), (1, "KL", 1)),  # inside a token
        (["JKLM"], ("K",), (1, "K", 1)),
        (["\n", "a"], ("\n",), (1, "\n", 0)),  # at the very start
        (["a", "b", "c", "d"], ("bcd",), (4, "bcd", 1)),  # over several tokens
        (["aabaab", "aac"], ("abaabaac",), (2, "abaabaac", 1)),  # after a start that came to nothing
        (["xaby"], ("by", "ab"), (1, "ab", 1)),  # the earliest of several, whatever their order
        (["XYZ", "XY"], ("XYZXYZ",), None),  # a tail that never became one
    ],
)
def test_stop_strings(pieces: list[str], stop: tuple[str, ...], expected: tuple[int, str, int] | None) -> None:
    vocabulary = ByteVocabulary([piece.encode() for piece in pieces])
    found = fed(stop, vocabulary.decode, range(len(pieces)))
    assert found == (None if expected is None else (expected[0], Stop("stop", expected[1], expected[2])))


def test_a_stop_string_before_a_character_in_the_making_is_found_at_once() -> None:
    vocabulary = ByteVocabulary([b"END\xe2", b"\x82\xac"])
    assert fed(("END",), vocabulary.decode, [0, 1]) == (1, Stop("stop", "END", 0))


def test_the_space_of_a_word_after_special_tokens_is_not_lost() -> None:
    ids = [WORDS.pieces.index(piece) for piece in ("a", "</s>", "</s>", "▁ab")]
    assert WORDS.decode(ids) == "a ab"
    assert fed((" a",), WORDS.decode, ids) == (4, Stop("stop", " a", 1))


@pytest.mark.parametrize("repeated", [b"", b"word ", b"\xff", b"\xf0"])
def test_a_token_costs_a_few_tokens_of_decoding_however_long_the_text(repeated: bytes) -> None:
    vocabulary = ByteVocabulary([repeated, b"END"])
    num_decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return vocabulary.decode(ids)

    strings = StopStrings(("END",), decode)
    for _ in range(3_000):
        assert strings.feed(0) is None
    assert num_decoded < 3_000 * 3 * MAX_PENDING_TOKENS
    assert strings.feed(1) == Stop("stop", "END", len(vocabulary.decode([0] * 3_000)))


def test_every_eos_token_ends_a_completion_and_none_where_eos_is_ignored() -> None:
    condition = StopCondition(frozenset({1, 7}), strings=None)
    assert condition.check(5, num_generated=1, max_tokens=3) is None
    assert condition.check(7, num_generated=2, max_tokens=3) == Stop("stop", num_text_tokens=1)
    assert condition.check(1, num_generated=3, max_tokens=3) == Stop("stop", num_text_tokens=2)
    ignoring = StopCondition(frozenset(), strings=None)
    assert [ignoring.check(token, n, 3) for n, token in enumerate([1, 7, 1], start=1)] == [None, None, Stop("length")]


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_the_limit_is_the_number_of_tokens(max_tokens: int) -> None:
    condition = StopCondition(frozenset(), StopStrings(("zzz",), lambda ids: "z" * (len(ids) % 2)))
    results = [condition.check(3, n, max_tokens) for n in range(1, max_tokens + 1)]
    assert results == [None] * (max_tokens - 1) + [Stop("length")]


def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop() -> None:
    vocabulary = ByteVocabulary([b"E", b"ND"])
    condition = StopCondition(frozenset(), StopStrings(("END",), vocabulary.decode))
    assert condition.check(0, 1, max_tokens=2) is None
    assert condition.check(1, 2, max_tokens=2) == Stop("stop", "END", 0)


# Stop tokens


@pytest.mark.parametrize(
    ("include", "token", "stop"),
    [
        (False, 5, Stop("stop", 5, num_text_tokens=2)),
        (True, 5, Stop("stop", 5)),
        (False, 6, Stop("stop", "<|end|>", num_text_tokens=2)),
        (True, 6, Stop("stop", "<|end|>", num_text_tokens=2, text_suffix="<|end|>")),
        (True, 1, Stop("stop", num_text_tokens=2)),
    ],
)
def test_a_stop_token_is_named_and_its_text_is_left_out_unless_asked_for(include: bool, token: int, stop: Stop) -> None:
    condition = StopCondition(frozenset({1}), None, stop_tokens={5: 5, 6: "<|end|>"}, include=include)
    assert condition.check(4, 1, max_tokens=9) is None
    assert condition.check(token, 3, max_tokens=3) == stop
    assert condition.ending_token_ids == {1, 5, 6}


def test_a_stop_token_that_is_an_eos_is_named_since_it_was_asked_for() -> None:
    condition = StopCondition(frozenset({1}), None, stop_tokens={1: 1})
    assert condition.check(1, 2, max_tokens=9) == Stop("stop", 1, num_text_tokens=1)
