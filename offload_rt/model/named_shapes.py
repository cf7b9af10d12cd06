"""Shapes of well-known models by name, and of any model by a name, a folder or a hub ID."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from cpu_kv import ElementType
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO_PARTS, model_name
from offload_rt.model.hub import cached_config, check_exists
from offload_rt.model.layer_kinds import Recurrence
from offload_rt.model.quantization import Quantization, packed_mxfp4
from offload_rt.model.rope import Yarn
from offload_rt.model.shape import DUAL_CHUNK, ModelShape


def _read_shapes() -> dict[str, ModelShape]:
    tables = tomllib.loads(files("offload_rt.model").joinpath("named_shapes.toml").read_text("utf-8"))
    families = tables["families"]
    return {
        name: _shape(name, **families.get(fields.get("family"), {}) | fields)
        for name, fields in tables["models"].items()
    }


def _shape(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int, int],
    full_every: int | None = None,
    local: dict[str, Any] | None = None,
    value_heads: int | None = None,
    dual_chunk: bool = False,
    **fields: Any,
) -> ModelShape:
    """Returns the shape of a model in the data file, which explains its keys."""
    layers, hidden, _, _, kv_heads, head_dim, _, _ = sizes
    if local is not None:
        full = LayerKind(kv_heads, head_dim)
        local_kind = replace(full, **local)
        numbers = range(1, layers + 1)
        kinds = (full if full_every and number % full_every == 0 else local_kind for number in numbers)
        fields["kinds"] = LayerKinds(tuple(kinds))
    if value_heads is not None:
        fields["recurrence"] = _delta_rule(hidden, value_heads)
    if dual_chunk:
        fields["ignored"] = DUAL_CHUNK
    return ModelShape(name, *sizes, **fields)


def _delta_rule(hidden: int, value_heads: int) -> Recurrence:
    """Returns the sizes of the linear attention of a Qwen: 16 key heads, of 128 elements as all heads."""
    convolved, gates = (2 * 16 + value_heads) * 128, 2 * value_heads
    weights = (convolved + 2 * value_heads * 128 + gates) * hidden + 4 * convolved + gates + 128
    return Recurrence(weights, 4 * convolved, value_heads * 128**2, working_bytes=value_heads * 6600)


SHAPES = _read_shapes()
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

    published = (shape_name for shape_name in SHAPES if shape_name not in DEMO_PARTS)
    return next((shape_name for shape_name in published if plain(shape_name) == plain(name)), None)


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
    published = known_name(name)
    if name not in SHAPES and ("/" in name or Path(name).exists()):
        config = cached_config(name) if published is not None else None
        if published is None or config is not None:
            folder = source if config is None else config.parent
            check_exists(folder)
            from offload_rt.model.checkpoint_config import model_config  # with torch, which takes seconds
            from offload_rt.model.config_shapes import from_config

            return from_config(model_config(folder, rope), dtype, name, quantize)
    if published is None:
        raise UsageError(
            f"model {name}: there is no such folder, and no shape of that name; there are "
            f"{', '.join(SHAPES)}; or give a hub ID such as owner/{name}"
        )
    shape = SHAPES[published]
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
