"""Texts and bytes of single tokens join to what the tokenizer decodes of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import real_text
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

from offload_rt.text.tokenize import TokenTexts, decode

CODE = "def f(x):\n    if x:\n\t\treturn 'naïve 日本 🙂'\n        pass\n\n\n"
CORPUS = [CODE, real_text()[:20000]]
FRAGMENTS = [
    "    ",
    " ",
    "\n",
    "\t",
    "def",
    " the",
    "x",
    "(",
    "é",
    "日",
    "本",
    "🙂",
    "👩\u200d👧",
    "\u00a0",
    "<s>",
    "▁",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join) | st.text(max_size=20)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: any byte is a character of the vocabulary; an added token is written as it is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.add_tokens(["  日"])
    return fast


def sentencepiece(strips: bool) -> PreTrainedTokenizerFast:
    """Llama 2's kind, which drops the first space of a text, or Gemma's; unknown characters in bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [text.replace("本", "").replace("🙂", "") for text in CORPUS],
        BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"]),
    )
    pieces = ["<unk>", "<s>", *BYTES, *sorted(set(trained.get_vocab()) - {"<unk>", "<s>"})]
    merges = [
        (left, right)
        for size in range(2, 12)
        for piece in pieces[258:]
        if len(piece) == size
        for left, right in [(piece[:-1], piece[-1])]
        if left in pieces and right in pieces
    ]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replaced = [normalizers.Prepend("▁")] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*replaced, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def unigram() -> PreTrainedTokenizerFast:
    """T5's kind: pieces with their spaces, of which a text's first one is dropped; others are unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind: words, between which the decoder writes spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(CORPUS, WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def ids_of(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[piece] for piece in pieces]


BYTE_LEVEL = byte_level()
TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "llama": sentencepiece(strips=True),
    "gemma": sentencepiece(strips=False),
    "unigram": unigram(),
    "word piece": word_piece(),
}
TEXTS_OF = {name: TokenTexts(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_texts_of_tokens_join_to_the_text(name: str, text: str) -> None:
    tokenizer, texts = TOKENIZERS[name], TEXTS_OF[name]
    tokens = tokenizer(text)["input_ids"]
    whole = decode(tokenizer, tokens)
    split = texts.split(tokens)
    assert len(split) == len(tokens) and "".join(split) == whole
    plain = [token for token in tokens if token not in tokenizer.all_special_ids]
    joined = b"".join(map(texts.bytes, plain)).decode(errors="replace")
    assert joined == whole or (name not in ("byte level", "gemma") and joined == f" {whole}")


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40))
def test_bytes_of_any_tokens_join_to_what_is_decoded(tokens: list[int]) -> None:
    """Also where they are no text: half characters, and bytes that begin none."""
    texts = TEXTS_OF["byte level"]
    joined = b"".join(map(texts.bytes, tokens)).decode(errors="replace")
    assert joined == decode(BYTE_LEVEL, tokens, special=True)
    assert "".join(texts.split(tokens)) == decode(BYTE_LEVEL, tokens)


def test_code_keeps_its_indentation() -> None:
    for name in ("byte level", "llama", "gemma"):
        tokenizer, texts = TOKENIZERS[name], TEXTS_OF[name]
        tokens = tokenizer(CODE, add_special_tokens=False)["input_ids"]
        assert "".join(texts.split(tokens)) == CODE
        assert "".join(texts[token] for token in tokens).count("    ") == 3


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
def test_parts_of_a_character_have_their_own_bytes(name: str) -> None:
    tokenizer, texts = TOKENIZERS[name], TEXTS_OF[name]
    tokens = tokenizer("x🙂", add_special_tokens=False)["input_ids"][-4:]
    assert [texts.bytes(token) for token in tokens] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert [texts[token] for token in tokens] == 4 * ["\ufffd"]
    assert texts.split(tokens) == ["", "", "", "🙂"]
    assert texts.names(tokens) == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82"]
    assert texts.split(tokens[:3]) == ["", "", decode(tokenizer, tokens[:3])[:1]]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_different_tokens_have_different_names(name: str) -> None:
    tokenizer, texts = TOKENIZERS[name], TEXTS_OF[name]
    count = len(tokenizer)
    names = texts.names([*range(count), count + 7])
    assert len(set(names)) == count + 1 and names[-1] == f"token_id:{count + 7}"
    for token, text in enumerate(names[:count]):
        assert text in (texts[token], f"token_id:{token}") or text.startswith("bytes:")


def test_of_equal_texts_the_first_keeps_its_name() -> None:
    """The byte of a letter and the letter are different tokens of one text."""
    tokenizer, texts = TOKENIZERS["llama"], TEXTS_OF["llama"]
    letter, byte = ids_of(tokenizer, "x", "<0x78>")
    assert texts[letter] == texts[byte] == "x"
    assert texts.names([letter, byte]) == ["x", f"token_id:{byte}"]
    assert texts.names([byte, letter]) == ["x", f"token_id:{letter}"]


def test_the_first_word_of_a_text_loses_its_space() -> None:
    tokenizer, texts = TOKENIZERS["llama"], TEXTS_OF["llama"]
    (the,) = ids_of(tokenizer, "▁the")
    assert texts[the] == " the" and texts.bytes(the) == b" the"
    assert texts.split([the, the]) == ["the", " the"]
    assert texts.split([tokenizer.bos_token_id, the, the]) == ["", "the", " the"]


def test_special_tokens_have_their_names() -> None:
    for name, tokenizer in TOKENIZERS.items():
        assert TEXTS_OF[name][tokenizer.bos_token_id] == "<s>"
        assert TEXTS_OF[name].split([tokenizer.bos_token_id]) == [""]


def test_a_vocabulary_without_the_letter_a() -> None:
    """Another word then says what a token adds within a text."""
    pieces = ["<unk>", "▁b", "▁", "b"]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [texts[token] for token in (1, 2, 3)] == [" b", " ", "b"]
