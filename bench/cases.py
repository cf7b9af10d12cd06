"""The declared cases: what runs side by side, where the command line does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass

OURS = ("plain", "retrieval", "triforce", "lookup", "streaming", "naive")
TRANSFORMERS = ("dynamic", "static", "lookup", "assisted")


@dataclass(frozen=True)
class Case:
    """Systems that continue the same prompts.

    Attributes:
        name: of the command.
        about: what it compares, in a line.
        systems: `adapter:system`; the first one is the reference.
        contexts, quick_contexts: prompt lengths in tokens.
        new_tokens: decoded a run.
        turns: interleaved runs of every system, after one that is not timed.
        link_gb_s: of an emulated link that KV lies behind; 0: none.
    """

    name: str
    about: str
    systems: tuple[str, ...]
    contexts: tuple[int, ...]
    quick_contexts: tuple[int, ...]
    new_tokens: int = 64
    turns: int = 3
    link_gb_s: float = 0.0


CASES = (
    Case(
        "peers",
        "ours beside transformers, DeepSpeed-ZeRO-Inference, llama.cpp, OpenVINO",
        (
            *(f"transformers:{name}" for name in TRANSFORMERS),
            "deepspeed:resident",
            "deepspeed:offloaded",
            "zero_style:rebuilt",
            "llamacpp:f32",
            "llamacpp:f16",
            "llamacpp:f16-flash",
            "openvino:f32",
            "openvino:default",
            *(f"ours:{name}" for name in OURS[:4]),
        ),
        (4096, 32_768, 131_072),
        (4096,),
    ),
    Case(
        "speedup",
        "every configuration of ours beside transformers, by context",
        (*(f"transformers:{name}" for name in TRANSFORMERS), *(f"ours:{name}" for name in OURS)),
        (4096, 8192, 16_384, 32_768, 65_536, 131_072),
        (4096, 8192),
    ),
    Case(
        "link",
        "ours over an emulated link, beside layer prefetch and attention on the CPU",
        ("layer_prefetch:rebuilt", "zero_style:rebuilt", *(f"ours:{name}" for name in OURS[:3])),
        (8192, 32_768),
        (4096,),
        link_gb_s=4.0,
    ),
)
