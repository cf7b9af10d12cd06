"""Incremental text against decoding everything at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from offload_rt import LLM
from offload_rt.errors import UsageError
from offload_rt.text.tokenize import TextStream, TokenTexts, common_beginning, encode

CORPUS = [
    "the cat and the hat",
    "naïve café über straße",
    "日本語の文字 中文",
    "emoji 🙂🙃 and 👩‍👩‍👧",
    "aaa aab aba baa",
]
ALPHABET = "ab cthe日本語🙂é\ufffd\n"
TEXTS = st.text(ALPHABET, max_size=40) | st.text(max_size=20)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's kind: a word carries its space in front, the first loses it; unknown characters in bytes."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "hat", "s", "▁a", "é"]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
PIECES = {piece: index for piece, index in BYTE_LEVEL.get_vocab().items() if piece != "</s>"}
LONGEST_PIECE = max(map(len, PIECES))


def byte_characters(text: str) -> str:
    """The text's UTF-8 bytes in the printable alphabet that byte-level tokens are written in."""
    return "".join(
        piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    )


def until_stop(text: str, stops: list[str]) -> str:
    """What a reader who sees one character after another writes before the first complete stop string."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return text


def streamed(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stops: list[str]) -> TextStream:
    """Pushes all tokens, checking that what is returned is what `text` holds."""
    stream = TextStream(tokenizer, stops)
    returned = ""
    for token in tokens:
        returned += stream.push(token)
        assert stream.text == returned
        if stream.stopped:
            break
    returned += stream.finish()
    assert stream.text == returned
    return stream


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokenisation_of_a_text_gives_the_text_up_to_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    characters, tokens = byte_characters(text), []
    while characters:
        sizes = [size for size in range(1, LONGEST_PIECE + 1) if characters[:size] in PIECES]
        size = data.draw(st.sampled_from(sizes))
        tokens.append(PIECES[characters[:size]])
        characters = characters[size:]
    stream = streamed(BYTE_LEVEL, tokens, stops)
    assert stream.text == until_stop(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)
    if stream.stopped_by is not None:
        assert stream.stopped_by in stops and text.startswith(stream.text + stream.stopped_by)


@given(tokens=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_tokens_that_are_no_text_at_all_give_what_decoding_everything_gives(
    tokens: list[int], stops: list[str]
) -> None:
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert streamed(BYTE_LEVEL, tokens, []).text == whole
    assert streamed(BYTE_LEVEL, tokens, stops).text == until_stop(whole, stops)


WORDS = st.sampled_from(["▁", "▁the", "▁cat", "hat", "s", "▁a", "é", "</s>"]).map(lambda piece: [piece])
CHARACTERS = st.sampled_from("日🙂ß").map(lambda char: [f"<0x{byte:02X}>" for byte in char.encode()])


@given(groups=st.lists(WORDS | CHARACTERS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_leading_spaces_and_byte_fallback(groups: list[list[str]]) -> None:
    tokens: Any = SENTENCEPIECE.convert_tokens_to_ids([piece for group in groups for piece in group])
    whole = SENTENCEPIECE.decode(tokens, skip_special_tokens=True)
    assert streamed(SENTENCEPIECE, tokens, []).text == whole


def llama_2_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their spaces, letters, and bytes; the first space of a text is dropped, as Llama 2 does."""
    letters = "aehlmosuCIM"
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Call", "▁me", "▁Ishmael"]
    model = models.BPE({piece: index for index, piece in enumerate([*pieces, *letters])}, [])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = SENTENCEPIECE.backend_tokenizer.decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


LLAMA_2 = llama_2_tokenizer()


def ids(*pieces: str) -> list[int]:
    vocabulary = LLAMA_2.get_vocab()
    return [vocabulary[piece] for piece in pieces]


@pytest.mark.parametrize(
    ("prompt", "tokens", "pieces"),
    [
        (["<s>", "▁Call", "▁me"], ["▁Ishmael"], [" Ishmael"]),
        (["▁Call", "<s>"], ["▁me", "▁me"], [" me", " me"]),
        (["<s>"], ["▁Call", "▁me"], ["Call", " me"]),
        ([], ["▁Call", "▁me"], ["Call", " me"]),
        (["▁Call", "▁"], ["m"], ["m"]),
        (["▁"], ["▁"], [" "]),
        (["▁Call", "<0xC3>"], ["<0xA9>", "▁me"], ["é", " me"]),
        (["▁Call", "<0xF0>", "<0x9F>"], ["<0x99>", "<0x82>"], ["", "🙂"]),
        (["▁Call", "<0xEF>", "<0xBF>", "<0xBD>"], ["m"], ["m"]),
        (["▁Call"], ["<0xC3>", "<0xA9>"], ["", "é"]),
    ],
)
def test_the_first_token_follows_the_prompt(prompt: list[str], tokens: list[str], pieces: list[str]) -> None:
    stream = TextStream(LLAMA_2, [], ids(*prompt))
    assert [stream.push(token) for token in ids(*tokens)] == pieces and stream.finish() == ""


@given(characters=st.lists(st.sampled_from("am ▁é日🙂"), max_size=20), cut=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_2], ids=["bytes", "llama2"])
def test_a_text_and_its_continuation_are_one_text(
    tokenizer: PreTrainedTokenizerFast, characters: list[str], cut: int
) -> None:
    """Wherever it is cut, within a character too, which the continuation then has as a whole."""
    vocabulary, tokens = tokenizer.get_vocab(), list[int]()
    for character in characters:
        if tokenizer is BYTE_LEVEL:
            tokens += [vocabulary[piece] for piece in byte_characters(character)]
        elif character in vocabulary:
            tokens.append(vocabulary[character])
        else:
            tokens += [vocabulary[f"<0x{byte:02X}>"] for byte in character.encode()]
    before, after = tokens[:cut], tokens[cut:]
    stream = TextStream(tokenizer, [], before)
    text = "".join(map(stream.push, after)) + stream.finish()
    whole = str(tokenizer.decode(tokens))
    read = [tokenizer.decode(before[: max(0, len(before) - end)]) for end in range(4)]
    assert whole.endswith(text)
    assert len(whole) - len(text) == max(common_beginning(one, whole) for one in read)


def test_texts_of_single_tokens_have_their_spaces() -> None:
    texts = TokenTexts(LLAMA_2)
    pieces = ["▁Ishmael", "m", "▁", "<0xC3>", "<s>"]
    assert [texts[token] for token in ids(*pieces)] == [" Ishmael", "m", " ", "\ufffd", "<s>"]
    assert TokenTexts(BYTE_LEVEL)[BYTE_LEVEL.get_vocab()["Ġ"]] == " "
    assert TokenTexts(SENTENCEPIECE)[SENTENCEPIECE.get_vocab()["▁cat"]] == " cat"


def test_no_half_character_is_returned() -> None:
    stream = TextStream(BYTE_LEVEL, [])
    pieces = [stream.push(PIECES[char]) for char in byte_characters("é🙂")]
    assert pieces == ["", "é", "", "", "", "🙂"]


@pytest.mark.parametrize("stray", range(12))
def test_a_character_after_many_stray_bytes_is_whole(stray: int) -> None:
    last_byte = byte_characters("é")[1]
    tokens = [PIECES[char] for char in last_byte * stray + byte_characters("🙂")]
    assert streamed(BYTE_LEVEL, tokens, []).text == "\ufffd" * stray + "🙂"


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTE_LEVEL, ["abc"])
    assert [stream.push(PIECES[char]) for char in "xabab"] == ["x", "", "", "ab", ""]
    assert stream.push(PIECES["c"]) == ""
    assert stream.stopped and stream.text == "xab"
    assert stream.push(PIECES["d"]) == stream.finish() == ""


def test_held_text_comes_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, ["abc"])
    assert [stream.push(PIECES[char]) for char in "ab"] == ["", ""]
    assert stream.finish() == "ab"
    assert not stream.stopped


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    assert streamed(BYTE_LEVEL, [PIECES[char] for char in "xabc"], ["c", "abc"]).text == "x"


def test_the_stop_string_that_is_complete_first_counts_however_the_text_is_cut() -> None:
    assert streamed(BYTE_LEVEL, [PIECES[char] for char in "abcd"], ["abcd", "bc"]).text == "a"


@pytest.mark.parametrize("adds_one", [True, False])
def test_a_rendered_chat_template_has_one_beginning_of_text(adds_one: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "hi": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_one:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="?")
    assert encode(fast, "<s>hi hi") == [0, 1, 1]
    assert encode(fast, "hi hi") == [0, 1, 1][not adds_one :]
    assert encode(fast, "<s><s>hi") == [0, 0, 1]  # one of its own stays
    assert encode(fast, "<s>hi", special=False) == [0, 1]
    assert encode(fast, "<s>hi hi", last=2) == [0, 1]


def test_a_beginning_of_several_tokens_is_not_doubled() -> None:
    """`[gMASK]<sop>` of ChatGLM; and an end-of-text token behind the text stays."""
    names = ["[gMASK]", "<sop>", "hi", "a", "?", "</s>"]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A </s>", special_tokens=[("[gMASK]", 0), ("<sop>", 1), ("</s>", 5)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    assert encode(fast, "hi") == encode(fast, "[gMASK]<sop>hi") == [0, 1, 2, 5]
    assert encode(fast, "[gMASK]hi") == [0, 1, 0, 2, 5]
    assert encode(fast, "hi hi hi", last=4) == [0, 1, 2, 5]
    assert encode(fast, "hi hi hi", last=2) == [2, 5]


@pytest.mark.parametrize(
    "token", [PIECES["a"], PIECES[byte_characters("é")[0]], 0], ids=["text", "byte", "special"]
)
def test_only_a_short_window_is_decoded(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = BYTE_LEVEL.decode, list[int]()

    def noted(ids: list[int], **options: Any) -> Any:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(BYTE_LEVEL, "decode", noted)
    stream = TextStream(BYTE_LEVEL, [])
    for _ in range(200):
        stream.push(token)
    assert max(decoded) <= 16


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, [])
    assert stream.push(3) == stream.finish() == stream.text == ""


def test_without_a_tokenizer_nothing_can_stop() -> None:
    with pytest.raises(UsageError, match="stop string"):
        TextStream(None, ["x"])


def test_a_model_goes_on_from_its_prompt() -> None:
    """Alone, in a batch and in a context."""
    prompt, target = ids("<s>", "▁Call", "▁me"), tiny_target("llama-gqa", vocabulary=len(LLAMA_2))
    with torch.no_grad():  # every token is one of two
        for token, sign in zip(ids("▁Ishmael", "▁me"), (1, -1), strict=True):
            target.lm_head.weight[token] = sign * 99.0
    with LLM.from_models(target, None, LLAMA_2, "plain") as llm:
        result = llm.generate(prompt, max_tokens=12)
        context = llm.read(prompt[:2])
        others = [*llm.generate([prompt] * 2, max_tokens=12), context.generate(prompt[2:], max_tokens=12)]
    whole, read = (
        LLAMA_2.decode(some, skip_special_tokens=True) for some in (prompt + result.tokens, prompt)
    )
    alone = LLAMA_2.decode(result.tokens, skip_special_tokens=True)
    assert result.text == whole[len(read) :] and {one.text for one in others} == {result.text}
    assert result.text == f" {alone}", "the case is one in which the space may be lost"
