"""Log probabilities of prompts over HTTP: `echo`, `prompt_logprobs`, and lm-evaluation-harness' requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from support.serving import NAME, Served, chat_tokenizer, serving
from support.tiny_models import real_text

from offload_rt import TokenEvent
from offload_rt.engine.results import PromptScore
from offload_rt.server.protocols.completion_answers import CompletionReply

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT = real_text()[:300].encode("ascii", "replace").decode()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(config="lookup", layers=1) as one:
        yield one


def posted(served: Served, path: str, **body: Any) -> dict[str, Any]:
    status, text, _ = served.call(path, {"temperature": 0} | body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_a_prompt_is_echoed_with_the_log_probabilities_of_its_tokens(served: Served) -> None:
    score = served.llm.score(TEXT, top=1)
    for prompt in (TEXT, list(TEXT.encode())):
        answer = posted(served, COMPLETION, prompt=prompt, echo=True, logprobs=1, max_tokens=3)
        (choice,) = answer["choices"]
        assert choice["text"].startswith(TEXT) and answer["usage"]["completion_tokens"] == 3
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert found["text_offset"] == list(range(len(TEXT) + 3))
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][: len(TEXT)] == pytest.approx(score.logprobs)
        assert all(1 <= len(top) <= 2 for top in found["top_logprobs"][1:])
    plain = posted(served, COMPLETION, prompt=TEXT, max_tokens=3, logprobs=1)["choices"][0]
    assert choice["text"] == TEXT + plain["text"]
    assert found["token_logprobs"][len(TEXT) :] == pytest.approx(plain["logprobs"]["token_logprobs"])
    unscored = posted(served, COMPLETION, prompt=TEXT, echo=True, max_tokens=3)["choices"][0]
    assert unscored["text"] == choice["text"] and unscored["logprobs"] is None


def test_a_prompt_is_scored_without_an_answer(served: Served) -> None:
    answer = posted(served, COMPLETION, prompt=TEXT, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(TEXT) and answer["usage"]["completion_tokens"] == 0
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])  # the token itself


def test_a_streamed_echo_is_the_whole_one(served: Served) -> None:
    client: Any = served.client()
    options = {"model": NAME, "prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert tokens == whole.logprobs.tokens
    assert [at for one in chunks for at in one.logprobs.text_offset] == whole.logprobs.text_offset


def test_log_probabilities_of_a_prompt_as_vllm_writes_them(served: Served) -> None:
    score = served.llm.score(TEXT, top=2)
    answer = posted(served, COMPLETION, prompt=TEXT, prompt_logprobs=2, max_tokens=1)
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(TEXT)
    for token, logprob, entries in zip(score.tokens[1:], score.logprobs[1:], found[1:], strict=True):
        assert 2 <= len(entries) <= 3
        entry = entries[str(token)]
        assert entry["logprob"] == pytest.approx(logprob) and entry["decoded_token"] == chr(token)
        assert entry["rank"] is None or entries[str(token)]["rank"] in (1, 2)
        assert len(entries) == (2 if entry["rank"] else 3)
    messages = [{"role": "user", "content": "Who?"}]
    chat = posted(served, CHAT, messages=messages, prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_special_tokens_have_their_names_where_the_text_has_them() -> None:
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = [end, *b"ab"]
    score = PromptScore(tokens, [None, -1.0, -2.0], [None, True, True], [(), ((97, -1.0),), ((98, -2.0),)])
    for echo, name in (("ab", ""), ("<|im_end|>ab", "<|im_end|>")):
        reply = CompletionReply("id", NAME, 0, tokenizer, 1, echo=echo)
        chunks = reply.scored(score) + reply.token(TokenEvent(end, "", False, -0.5, ((end, -0.5),)))
        first, last = (chunk["choices"][0] for chunk in chunks)
        assert first["text"] == echo and first["logprobs"]["tokens"] == [name, "a", "b"]
        assert first["logprobs"]["text_offset"] == [0, len(name), len(name) + 1]
        assert last["logprobs"]["tokens"] == [""] and last["logprobs"]["text_offset"] == [len(echo)]
        assert last["logprobs"]["top_logprobs"] == [{"<|im_end|>": -0.5}]


def test_a_scored_prompt_is_cached_for_the_next_one(served: Served) -> None:
    prompt = TEXT[::-1]
    for _ in range(2):  # nothing is known of the likelihood of cached tokens
        scored = posted(served, COMPLETION, prompt=prompt, prompt_logprobs=0, max_tokens=1)
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = posted(served, COMPLETION, prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 1


def test_the_likelihoods_that_lm_evaluation_harness_reads(served: Served) -> None:
    """Its requests (`local-completions`), and how it reads the answers, are those of lm_eval/models."""
    contexts, continuations = [TEXT[:100], TEXT[100:150]], [" whale", " the sea"]
    prompts = [list((one + other).encode()) for one, other in zip(contexts, continuations, strict=True)]
    lengths = [len(context) for context in contexts]
    body = {"prompt": prompts, "model": NAME, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = posted(served, COMPLETION, **body)
    read = []
    for choice, length in zip(sorted(answer["choices"], key=itemgetter("index")), lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        read.append(
            (sum(logprobs), all(one == max(best.values()) for one, best in zip(logprobs, top, strict=True)))
        )
    for prompt, length, (total, greedy) in zip(prompts, lengths, read, strict=True):
        score = served.llm.score(prompt, start=length)
        assert total == pytest.approx(sum(one for one in score.logprobs if one is not None))
        assert greedy == all(score.greedy[length:])
