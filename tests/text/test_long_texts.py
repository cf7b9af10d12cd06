"""Tokens of a text in pieces are those of the whole text, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import real_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from offload_rt.text import pieces, tokenize
from offload_rt.text.chat import ChatTemplate
from offload_rt.text.pieces import can_be_cut, longest_token
from offload_rt.text.tokenize import encode, encoded, joined

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    *real_text().split()[:200],
    "def f(x):\n    return x",
    "naïve",
    "鯨の背",
    "🐋",
    "don't",
    "12345",
    "a\n",
]
TEXTS += [" ", "   ", "\n\n", "\t", " \n ", "<mask>", "<|end|>", ".", "–", "e", "the whale"]
texts = st.lists(st.sampled_from(TEXTS), max_size=300).map(" ".join) | st.text(
    st.sampled_from("ab \né.1鯨"), max_size=400
)


def trained(model: models.Model, trainer: trainers.Trainer, **parts: object) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([*real_text()[:60_000].splitlines(), "naïve 鯨の背"], trainer)
    return tokenizer


def bpe(**parts: object) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(models.BPE(), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet), **parts)


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return bpe(pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]), decoder=decoders.ByteLevel())


def gpt2() -> Tokenizer:
    return bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True), decoder=decoders.ByteLevel())


def sentencepiece(*steps: normalizers.Normalizer) -> Tokenizer:
    """Merges over a whole text, as those of Llama 2 and Gemma: there is no pre-tokenizer."""
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer(vocab_size=700, special_tokens=special),
        normalizer=normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def superwords() -> Tokenizer:
    """Its tokens span words, so that it cannot be cut."""
    return bpe(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
    )


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"])
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "qwen": qwen,
    "gpt2": gpt2,
    "gemma": sentencepiece,
    "llama2": lambda: sentencepiece(normalizers.Prepend("▁")),
    "superwords": superwords,
    "unigram": unigram,
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|end|>")])
    ends = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for m in messages %}<|end|>{{ m.content }}{% endfor %}"
    return tokenizer


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, tokenize):
        monkeypatch.setattr(module, "PIECE", 40)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_pieces_are_those_of_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        for special in (True, False):
            whole = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert encode(tokenizer, text, special=special) == whole

    for module in (pieces, tokenize):
        monkeypatch.setattr(module, "PIECE", 40)
    check()


@pytest.mark.parametrize("kind", ["qwen", "gpt2", "gemma", "llama2", "unigram"])
def test_prose_comes_in_pieces(kind: str, short_pieces: None) -> None:
    parts = list(encoded(tokenizer_of(kind), real_text()[:4000]))
    assert len(parts) > 50


def test_a_vocabulary_with_tokens_of_several_words_is_not_cut(short_pieces: None) -> None:
    tokenizer = tokenizer_of("superwords")
    assert not can_be_cut(tokenizer)
    text = real_text()[:4000]
    assert max(map(len, encoded(tokenizer, text))) > 0.9 * len(encode(tokenizer, text))


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_a_chat_comes_in_pieces_with_its_control_tokens_as_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(tokenizer_of(kind), "tiny")
    chat = [{"role": "user", "content": f"{real_text()[:500]} <|end|> {real_text()[:500]}"}]
    whole = template.encode(chat)
    for module in (pieces, tokenize):
        monkeypatch.setattr(module, "PIECE", 40)
    assert joined(template.encoded(chat)) == whole


def test_a_refused_text_is_not_read_to_its_end(short_pieces: None) -> None:
    tokenizer = tokenizer_of("qwen")
    word = 100_000 * "x"
    assert 2 * 50 < len(joined(encoded(tokenizer, word, most=50))) < 1000
    assert joined(encoded(tokenizer, word, most=len(word))) == encode(tokenizer, word)


def test_the_longest_token_bounds_a_text() -> None:
    assert longest_token(tokenizer_of("unigram")) is None  # an unknown token may be any text
    for kind in ("qwen", "gemma"):
        tokenizer = tokenizer_of(kind)
        longest = longest_token(tokenizer)
        assert longest is not None
        text = real_text()[:3000]
        assert len(text) <= longest * len(encode(tokenizer, text))
