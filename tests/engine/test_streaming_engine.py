"""The engine where KV crosses a link in every round: on a GPU, and over a paced link, which shows that these
tests are tests. Sizes are so small that nothing but what is asked for is resident."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED
from support.small_engine import (
    BY_GPUS,
    CONFIGS,
    CPU,
    CUDA,
    DEVICES,
    ON_CUDA,
    PAGE,
    PARAMS,
    PROMPT,
    again,
    small_llm,
)
from support.tiny_models import byte_ids
from torch import Tensor

from offload_rt import LLM, GenerationResult, SamplingParams
from offload_rt.caches.full import FullCache
from offload_rt.caches.refresh import RetrievalRefresh
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.selection import AttentionScores
from offload_rt.caches.sizes import Tiers
from offload_rt.config.files import config_names
from offload_rt.drafting.base import Round
from offload_rt.engine import batching as scheduler
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.cuda_graphs import PassGraphs
from offload_rt.system.device_copies import to_host

ROUNDS = "OFFLOAD_RT_TEST_ROUNDS"
SHARES = [Tiers(), Tiers(32), Tiers(0, 48), Tiers(32, 48), Tiers(64, 48)]
"""Of 149 tokens."""


def check_streamed(result: GenerationResult, shares: Tiers) -> None:
    """What is not placed elsewhere crossed a link in every round."""
    resident = shares.resident_tokens + sum(gpu.resident_tokens for gpu in shares.gpus)
    streamed = (len(PROMPT) - 1) // 16 * 16 - resident - shares.cpu_tokens
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    assert read >= result.rounds * streamed * 512, "bytes of a token in all layers"


CASES = [
    pytest.param(CPU, config, SHARES[3], "stream", False, id=f"{config}-paced") for config in CONFIGS
] + [
    pytest.param(CUDA, config, shares, refresh, graphs, marks=pytest.mark.gpu)
    for config in CONFIGS
    for shares in SHARES
    for refresh in ("stream", "store")
    for graphs in (False, True)
]


@pytest.mark.parametrize(("device", "config", "shares", "refresh", "graphs"), CASES)
def test_streamed_tokens_are_those_of_plain_decoding(
    device: torch.device,
    config: str,
    shares: Tiers,
    refresh: str,
    graphs: bool,
    plain_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not graphs:
        monkeypatch.setattr(PassGraphs, "LONGEST", 0)
    check_tokens(device, config, shares, refresh, plain_tokens)


@DEVICES
@pytest.mark.parametrize("config", ["triforce", "trees"])
@pytest.mark.parametrize(
    ("shares", "refresh"), [*((shares, "stream") for shares in BY_GPUS), (BY_GPUS[0], "store")]
)
def test_other_gpus_attend_their_share(
    device: torch.device, config: str, shares: Tiers, refresh: str, plain_tokens: list[int]
) -> None:
    check_tokens(device, config, shares, refresh, plain_tokens)


def check_tokens(
    device: torch.device, config: str, shares: Tiers, refresh: str, plain_tokens: list[int]
) -> None:
    """`plain_tokens`: in place, on the CPU."""
    with small_llm(device, config, shares, refresh_from=refresh) as llm:
        context = llm.read(PROMPT, PARAMS.max_tokens)
        result = again(context)
        check_streamed(result, shares)
        plain = again(context, config="plain")
        check_streamed(plain, shares)
        assert result.tokens == plain.tokens
        if device == CPU:
            assert plain.tokens == plain_tokens
        sampled = SamplingParams(temperature=0.7, seed=5, max_tokens=12)
        assert again(context, sampled).tokens == again(context, sampled).tokens
        batch = llm.generate([PROMPT, PROMPT[:90]], SamplingParams(max_tokens=12))
        assert batch[0].tokens == plain.tokens[:12]


@DEVICES
def test_resident_tokens_fill_the_memory_of_the_prefill(
    device: torch.device, plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is resident while the prompt is read, 64 of each layer are from there on."""
    loaded: list[tuple[int, int]] = []
    emptied: list[int] = []
    load = FullCache.load_resident
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(loaded)))

    def noted(full: FullCache) -> None:
        before = full.resident_bytes
        load(full)
        if full.resident_bytes != before:
            loaded.append((before, full.resident_bytes))

    monkeypatch.setattr(FullCache, "load_resident", noted)
    with small_llm(device, "retrieval", Tiers(64, 48)) as llm:
        context = llm.read(PROMPT)
        assert again(context).tokens == plain_tokens or device == CUDA
        assert again(context).tokens == again(context, config="plain").tokens
        assert len(llm.generate(PROMPT[:20], SamplingParams(max_tokens=3)).tokens) == 3
        assert loaded == [(0, 64 * 512), (0, 16 * 512)], "bytes of a token in all layers, of two sequences"
    assert (0 in emptied) == (device == CUDA), "what the prefill has cached is free by then"


@DEVICES
@pytest.mark.parametrize("shares", [*SHARES[:4:3], BY_GPUS[0]])
def test_random_interrupts(device: torch.device, shares: Tiers) -> None:
    """Texts that end anywhere leave nothing behind that a later one could see."""
    rounds = int(os.environ.get(ROUNDS, 60 if device == CPU else 30 if EMULATED else 500))
    source = random.Random(7)
    prompts = [byte_ids(count, start=count) for count in (150, 97, 33)]
    with small_llm(device, "triforce", shares) as llm:
        contexts = [llm.read(prompt) for prompt in prompts]
        plain = [again(context, config="plain").tokens for context in contexts]
        done = 0
        while done < rounds:
            which = source.randrange(len(prompts))
            events, wanted = contexts[which].stream((), PARAMS), source.randrange(1, 12)
            for _ in zip(range(wanted), events, strict=False):
                pass
            events.close()
            result = events.result
            assert (
                result is not None
                and result.tokens == plain[which][: len(result.tokens)]
                and len(result.tokens) >= wanted
            )
            done += result.rounds
            if source.random() < 0.3:
                config = source.choice(CONFIGS)
                contexts[which].rewind(len(prompts[which]))
                assert again(contexts[which], SamplingParams(max_tokens=8), config).tokens == plain[which][:8]
            if source.random() < 0.3:
                contexts[which].close()
                contexts[which] = llm.read(prompts[which])
            contexts[which].rewind(len(prompts[which]))


@DEVICES
@pytest.mark.parametrize("shares", [*SHARES[::3], BY_GPUS[0]])
@pytest.mark.parametrize("refresh", ["stream", "store"])
def test_what_is_retrieved_is_the_sequences(device: torch.device, shares: Tiers, refresh: str) -> None:
    """Tokens would not tell: whatever a draft's cache holds, they are those of plain decoding."""
    with small_llm(device, "retrieval", shares, refresh_from=refresh) as llm:
        events = llm.stream(PROMPT, PARAMS)
        for _ in zip(range(24), events, strict=False):
            pass
        (sequence,) = llm.engine.sequences
        (cache,) = sequence.full.derived
        assert isinstance(cache, RetrievedCache)
        sequence.full.transfer.flush()
        kv = sequence.full.sequence
        for layer in range(kv.layout.layers):
            runs = kv.views(layer, 0, kv.length)
            for side, held in enumerate(cache.kv[layer]):
                text = torch.cat([pages.head_major()[side] for pages in runs], dim=1)
                own = held[:, : cache.entries].cpu()
                exact = torch.cdist(own, text, compute_mode="donot_use_mm_for_euclid_dist") < 1e-5
                assert bool(exact.any(-1).all())
                if side == 0:  # values of equal bytes are equal in the first layer
                    assert int(exact.any(1).sum(-1).min()) == cache.entries
        events.close()


@pytest.mark.parametrize("shares", [SHARES[3], *BY_GPUS])
def test_the_same_is_retrieved_wherever_tokens_are_attended(
    shares: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are taken from all places, and what they attended to is counted where it belongs.

    Later passes differ: whose share of another place was whose is not known (`summed_mass`).
    """
    used, use = list[RetrievalRefresh](), RetrievedCache._use

    def noted(cache: RetrievedCache, one: RetrievalRefresh) -> None:
        used.append(one)
        use(cache, one)

    monkeypatch.setattr(RetrievedCache, "_use", noted)
    ends = [shares.resident_tokens, shares.cpu_tokens]
    ends += [card.tokens for card in shares.gpus]
    ends = [min(144, sum(ends[: at + 1])) for at in range(len(ends))]

    def retrieved(shares: Tiers) -> tuple[list[Tensor], Tensor]:
        with small_llm(CPU, "retrieval", shares, ahead=0, refresh_from="stream") as llm:
            text = llm.read(PROMPT)
            text.generate((), SamplingParams(max_tokens=1))
            (cache,) = llm.engine.sequences[0]._caches
            assert isinstance(cache, RetrievedCache) and isinstance(cache.selection, AttentionScores)
            chunks = [end // cache.selection.mass_chunk for end in ends]
            counted = cache.selection.values.tensor_split(chunks, dim=2)
            first = [part.sum(-1) for part in counted], cache.kv[:, :, :, : cache.entries].clone()
            used.clear()
            text.rewind(len(PROMPT))
            again(text)
            assert len(used) > 10, "all their entries have passed by"
            return first

    found, expected = retrieved(shares), retrieved(SHARES[0])
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("tool", "environment"),
    [
        # Memory that is used after it is given back is another's at once, or nobody's.
        ((), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        (("compute-sanitizer", "--error-exitcode", "9"), {ROUNDS: "20"}),
    ],
    ids=["no caching", "sanitizer"],
)
def test_random_interrupts_under_tools(tool: tuple[str, ...], environment: dict[str, str]) -> None:
    if tool and shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} here")
    chosen = ["-q", __file__, "-k", "test_random_interrupts and cuda"]
    ended = subprocess.run(
        [*tool, sys.executable, "-m", "pytest", *chosen],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@ON_CUDA
@pytest.mark.parametrize("config", ["retrieval", "triforce", "trees"])
def test_captures_while_a_pass_streams(
    device: torch.device, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassGraphs, "prepare", lambda *arguments: None)
    with small_llm(device, config) as llm:
        context = llm.read(PROMPT)
        assert again(context).tokens == again(context, config="plain").tokens


@ON_CUDA
@pytest.mark.parametrize("shares", [*SHARES, BY_GPUS[0]])
def test_no_layer_of_a_pass_waits_for_the_device(
    device: torch.device, shares: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself refuses what waits: with the CPU's share, and with a refresh from the stream."""
    attend = FullCache.attend

    def watched(cache: FullCache, *arguments: Any) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return attend(cache, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with small_llm(device, "retrieval", shares, ahead=0, refresh_from="stream") as llm:
        context = llm.read(PROMPT)
        expected = again(context).tokens
        monkeypatch.setattr(FullCache, "attend", watched)
        assert again(context).tokens == expected


@ON_CUDA
@pytest.mark.parametrize("config", config_names())
def test_every_configuration_writes_what_plain_decoding_does(device: torch.device, config: str) -> None:
    """The demo pair, whose parts (a draft model, a head) all configurations find."""
    overrides = {"store.page": PAGE, "retrieval.budget": 128, "retrieval.recent": 32}
    params = SamplingParams(max_tokens=12)
    with LLM(device=device.type, dtype="float32", config=config, overrides=overrides) as llm:
        context = llm.read(byte_ids(400))
        assert again(context, params).tokens == again(context, params, "plain").tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@ON_CUDA
@pytest.mark.parametrize("config", CONFIGS)
def test_a_round_waits_only_where_it_reads(
    device: torch.device, config: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself refuses what waits, but for `to_host` and for events."""

    def reading(*tensors: Tensor) -> list[Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_host(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def watched(engine: Engine, sequences: Sequence[TokenSequence]) -> list[Round | Exception]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(engine, sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    params, step = SamplingParams(temperature=temperature, seed=3, max_tokens=16), Engine.step
    with small_llm(device, config, Tiers(32, 48), refresh_from="stream") as llm:
        context = llm.read(PROMPT)
        expected = again(context, params).tokens
        monkeypatch.setattr(scheduler, "to_host", reading)
        monkeypatch.setattr(Engine, "step", watched)
        assert again(context, params).tokens == expected


@ON_CUDA
def test_page_locked_memory_is_asked_for_before_the_rounds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes back and forth in a round has buffers that are kept."""
    asked: list[torch.Size] = []
    empty = torch.empty

    def noted(*arguments: Any, **named: Any) -> Tensor:
        made = empty(*arguments, **named)
        if named.get("pin_memory"):
            asked.append(made.shape)
        return made

    with small_llm(device, "retrieval", cpu_tokens=48, refresh_from="stream") as llm:
        context = llm.read(PROMPT)
        again(context)
        monkeypatch.setattr(torch, "empty", noted)
        again(context, SamplingParams(max_tokens=60))
        assert len(asked) <= 8, "once a sequence and size, not once a layer"
