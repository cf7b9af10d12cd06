"""Shapes of well-known models by name, and of any model by a name, a folder or a hub ID."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cpu_kv import ElementType
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO, DEMO_DRAFT, DEMO_PARTS, model_name
from offload_rt.model.hub import cached_config, check_exists
from offload_rt.model.layer_kinds import Recurrence
from offload_rt.model.quantization import Quantization, packed_mxfp4
from offload_rt.model.rope import Yarn
from offload_rt.model.shape import DUAL_CHUNK, ModelShape


def _qwen3(
    name: str, layers: int, hidden: int, mlp: int, heads: int, parameters: int, tied: bool = False
) -> ModelShape:
    shape = ModelShape(name, layers, hidden, mlp, heads, 8, 128, 151_936, parameters, tied)
    return replace(shape, max_positions=40_960, family="qwen3", rope_scaled=False)


def _qwen3_moe(name: str, positions: int) -> ModelShape:
    """Returns a shape with 128 experts, 8 of which each token goes through; a step is counted as all."""
    shape = ModelShape(name, 48, 2048, 6144, 32, 4, 128, 151_936, 30_532_122_624, max_positions=positions)
    return replace(
        shape,
        mlp_parameters=604_241_920,
        expert_parameters=603_979_776,
        family="qwen3_moe",
        rope_scaled=False,
    )


def _ministral3(
    name: str, layers: int, hidden: int, mlp: int, parameters: int, tied: bool = False
) -> ModelShape:
    shape = ModelShape(name, layers, hidden, mlp, 32, 8, 128, 131_072, parameters, tied)
    return replace(shape, max_positions=262_144, family="ministral3")


def _mixed(name: str, every: int, full: LayerKind, other: LayerKind, layers: int, *sizes: int) -> ModelShape:
    """Returns the shape of a model of which every n-th layer is full; none where it has fewer layers.

    Args:
        sizes: of its hidden states, its MLPs, its query heads, its vocabulary, and the number of parameters.
    """
    kinds = LayerKinds(tuple(other if (layer + 1) % every else full for layer in range(layers)))
    hidden, mlp, heads, vocabulary, parameters = sizes
    one = full if full.kv_heads else other
    return ModelShape(
        *(name, layers, hidden, mlp, heads, one.kv_heads, one.head_dim, vocabulary, parameters), kinds=kinds
    )


def _sliding(name: str, family: str, every: int, kv: tuple[int, int], window: int, *sizes: int) -> ModelShape:
    """Returns the shape of a model whose layers slide but for every n-th; `sizes` are those of `_mixed`."""
    sliding = LayerKind(*kv, window, rope="sliding_attention")
    return replace(_mixed(name, every, LayerKind(*kv), sliding, *sizes), family=family)


def _gemma3(name: str, kv: tuple[int, int], *sizes: int) -> ModelShape:
    return replace(_sliding(name, "gemma3_text", 6, kv, 1024, *sizes), tied=True)


def _olmo3(name: str, kv: tuple[int, int], *sizes: int) -> ModelShape:
    return replace(_sliding(name, "olmo3", 4, kv, 4096, *sizes), max_positions=65536)


def _qwen_next(
    name: str, family: str, kv_heads: int, values: int, *sizes: int, tied: bool = False
) -> ModelShape:
    """Returns the shape of a Qwen with linear attention of `values` heads in three of four layers."""
    shape = _mixed(name, 4, LayerKind(kv_heads, 256), LayerKind(mixer="linear_attn"), *sizes)
    convolved, gates = (2 * 16 + values) * 128, 2 * values
    weights = (convolved + 2 * values * 128 + gates) * shape.hidden + 4 * convolved + gates + 128
    state = Recurrence(weights, 4 * convolved, values * 128**2, working_bytes=values * 6600)
    shape = replace(shape, recurrence=state, max_positions=262_144, rope_scaled=False)
    return replace(shape, family=family, tied=tied)


def _embedded(name: str, layers: int, hidden: int, mlp: int, heads: int, parameters: int) -> ModelShape:
    shape = ModelShape(name, layers, hidden, mlp, heads, heads, 64, 4096, parameters, tied=True)
    return replace(shape, max_positions=262_144, family="llama", rope_scaled=False)


SHAPES = {
    shape.name: shape
    for shape in (
        # layers, hidden, intermediate, heads, key heads, head dim, vocabulary, parameters
        ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),  # 128K: with YaRN
        ModelShape("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 13_015_864_320),
        ModelShape("lwm-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),
        ModelShape("llama3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8_030_261_248),
        ModelShape("llama3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 70_553_706_496),
        ModelShape("llama3.3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 70_553_706_496),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 7_615_616_512),
        ModelShape(
            "qwen2.5-7b-1m",
            28,
            3584,
            18944,
            28,
            4,
            128,
            152064,
            7_615_616_512,
            max_positions=1_010_000,
            ignored=DUAL_CHUNK,
        ),
        ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, 14_770_033_664),
        _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, 596_049_920, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, 1_720_574_976, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 9728, 32, 4_022_468_096, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12288, 32, 8_190_735_360),
        _qwen3("qwen3-14b", 40, 5120, 17408, 40, 14_768_307_200),
        _qwen3("qwen3-32b", 64, 5120, 25600, 64, 32_762_123_264),
        _ministral3("ministral3-3b", 26, 3072, 9216, 3_429_006_336, tied=True),
        _ministral3("ministral3-8b", 34, 4096, 14336, 8_489_553_920),
        _ministral3("ministral3-14b", 40, 5120, 16384, 13_506_073_600),
        # Full layers' KV heads and head dim; layers, hidden, intermediate, heads, vocabulary, parameters.
        _gemma3("gemma3-4b", (4, 256), 34, 2560, 10240, 8, 262_208, 3_880_263_168),
        _gemma3("gemma3-12b", (8, 256), 48, 3840, 15360, 16, 262_208, 11_766_034_176),
        _gemma3("gemma3-27b", (16, 128), 62, 5376, 21504, 32, 262_208, 27_009_346_304),
        replace(
            _mixed(
                *("gemma4-31b", 6, LayerKind(4, 512), LayerKind(16, 256, 1024, rope="sliding_attention")),
                *(60, 5376, 21504, 32, 262_144, 30_697_345_280),
            ),
            tied=True,
            max_positions=262_144,
            family="gemma4_text",
        ),
        replace(
            _sliding("gpt-oss-20b", "gpt_oss", 2, (8, 64), 128, 24, 2880, 2880, 64, 201_088, 20_914_757_184),
            mlp_parameters=796_631_072,  # 32 experts
            expert_parameters=796_262_400,
        ),
        replace(
            _mixed(
                *("mistral-7b-v0.1", 33, LayerKind(), LayerKind(8, 128, 4096)),
                *(32, 4096, 14336, 32, 32000, 7_241_732_096),
            ),
            max_positions=32768,
            family="mistral",
        ),
        _olmo3("olmo3-7b", (32, 128), 32, 4096, 11008, 32, 100_278, 7_298_011_136),
        _olmo3("olmo3-32b", (8, 128), 64, 5120, 27648, 40, 100_278, 32_233_522_176),
        replace(
            _sliding(
                "command-r7b", "cohere2", 4, (8, 128), 4096, 32, 4096, 14336, 32, 256_000, 8_028_033_024
            ),
            tied=True,
            max_positions=132_096,
        ),
        _qwen_next(
            "qwen3.5-4b", "qwen3_5_text", 4, 32, 32, 2560, 9216, 16, 248_320, 4_205_751_296, tied=True
        ),
        _qwen_next("qwen3.5-9b", "qwen3_5_text", 4, 32, 32, 4096, 12288, 16, 248_320, 8_953_803_264),
        _qwen_next("qwen3.5-27b", "qwen3_5_text", 4, 48, 64, 5120, 17408, 24, 248_320, 26_895_998_464),
        replace(
            _qwen_next(
                "qwen3-next-80b-a3b", "qwen3_next", 2, 32, 48, 2048, 5120, 16, 151_936, 79_674_391_296
            ),
            mlp_parameters=1_614_809_088,  # 512 experts and a shared one
            expert_parameters=1_610_612_736,
        ),
        ModelShape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, 32_763_876_352),
        ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, 72_706_203_648),
        replace(_qwen3("qwen3-4b-2507", 36, 2560, 9728, 32, 4_022_468_096, tied=True), max_positions=262_144),
        _qwen3_moe("qwen3-30b-a3b", 40_960),
        _qwen3_moe("qwen3-30b-a3b-2507", 262_144),
        _qwen3_moe("qwen3-coder-30b-a3b", 262_144),
        ModelShape(
            "mistral-small-24b", 40, 5120, 32768, 32, 8, 128, 131_072, 23_572_403_200, max_positions=32768
        ),
        ModelShape("mistral-small3.2-24b", 40, 5120, 32768, 32, 8, 128, 131_072, 23_572_403_200),
        ModelShape("devstral-24b", 40, 5120, 32768, 32, 8, 128, 131_072, 23_572_403_200),
        ModelShape("mistral-nemo-12b", 40, 5120, 14336, 32, 8, 128, 131_072, 12_247_782_400),
        ModelShape("phi-4", 40, 5120, 17920, 40, 10, 128, 100_352, 14_659_507_200, max_positions=16384),
        ModelShape(
            "smollm3-3b", 36, 2048, 11008, 16, 4, 128, 128256, 3_075_098_624, tied=True, max_positions=65536
        ),
        ModelShape("llama3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 3_212_749_824, tied=True),
        # Drafts: they see only a window of the text, so their positions are no limit.
        ModelShape("jf68m", 2, 768, 3072, 12, 12, 64, 32000, 68_030_208, max_positions=2048),
        ModelShape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 64, 32000, 1_100_048_384, max_positions=2048),
        ModelShape("llama3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 1_235_814_400, tied=True),
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 494_032_768, tied=True),
        # The embedded pair.
        _embedded(DEMO, 4, 256, 768, 4, 4_458_752),
        _embedded(DEMO_DRAFT, 2, 128, 384, 2, 950_912),
    )
}
"""Models by name, with the sizes of their published configs, in bfloat16."""

PUBLISHED = {"gpt_oss": packed_mxfp4()}
"""Quantisations by family of models whose checkpoints are published quantised."""

_VARIANT = re.compile(r"meta|instruct|chat|base|hf|it|2501|2506|2512")
"""Parts of a checkpoint's name that say nothing of its shape."""


def known_name(name: str) -> str | None:
    """Returns the name in `SHAPES` of a checkpoint such as Llama-3.1-8B-Instruct, or None.

    A hub ID is known by what follows its owner; a folder is not.
    """
    if name in SHAPES:
        return name
    if Path(name).exists() or name.count("/") > 1 or name.startswith((".", "~", "/")):
        return None
    name = name.rpartition("/")[2]

    def plain(name: str) -> str:
        parts = re.split(r"[-_ ]", name.lower())
        return "".join(part for part in parts if not _VARIANT.fullmatch(part))

    published = (known for known in SHAPES if known not in DEMO_PARTS)
    return next((known for known in published if plain(known) == plain(name)), None)


def find_shape(
    source: str | Path,
    dtype: ElementType | None,
    rope: Yarn | None = None,
    quantize: str = NO_QUANTIZATION,
) -> ModelShape:
    """Returns the shape of a model by a name from `SHAPES`, or from a folder or a hub ID.

    Reads no weights. A checkpoint's name, with or without its owner, such as Llama-3.1-8B-Instruct, is a name
    too: the hub is not asked for it, and its config is read only if the hub's cache holds it.

    Args:
        dtype: of weights and KV; None: the checkpoint's own.
        rope: scaling of its rotary frequencies beyond what its config says.
        quantize: nf4 or int8: its weights are quantised as they load.

    Raises:
        UsageError: no such name or folder, or a model that the runtime does not support.
    """
    name = model_name(source)
    known = known_name(name)
    if name not in SHAPES and ("/" in name or Path(name).exists()):
        config = cached_config(name) if known is not None else None
        if known is None or config is not None:
            folder = source if config is None else config.parent
            check_exists(folder)
            from offload_rt.model.checkpoint_config import model_config  # with torch, which takes seconds
            from offload_rt.model.config_shapes import from_config

            return from_config(model_config(folder, rope), dtype, name, quantize)
    if known is None:
        raise UsageError(
            f"model {name}: there is no such folder, and no shape of that name; there are "
            f"{', '.join(SHAPES)}; or give a hub ID such as owner/{name}"
        )
    shape = SHAPES[known]
    if rope is not None:
        if shape.rope_scaled:
            wrong = f"its positions are scaled already, to {shape.max_positions}; leave --rope out"
            raise UsageError(f"model {name}: {wrong}")
        positions = rope.stretched(shape.family, shape.max_positions)
        shape = replace(shape, max_positions=positions, rope_scaled=True)
    if shape.family in PUBLISHED:
        shape = shape.with_weights(PUBLISHED[shape.family])
    if quantize != NO_QUANTIZATION:
        if shape.quantization is not None:
            already = f"its weights are quantized already ({shape.quantization.name}); leave --quantize out"
            raise UsageError(f"model {name}: {already}")
        shape = shape.with_weights(Quantization.named(quantize))
    return replace(shape, dtype=dtype or shape.dtype)
