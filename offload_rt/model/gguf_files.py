"""GGUF files: what their weights would take, as they are refused.

transformers keeps the blocks of a GGUF file packed only with a kernel that it downloads, for some devices and
architectures. Without it all weights are expanded when they are read.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NoReturn

from offload_rt.errors import UsageError
from offload_rt.system.hardware import GIB

_EXPANDED = 2  # bytes of a weight in bfloat16


def refuse_gguf(name: str, *files: Path) -> NoReturn:
    """Refuses the GGUF files of a model.

    Raises:
        UsageError: says how many GiB they would be expanded to, and what to give instead.
    """
    from transformers.integrations.gguf.reader import GgufHeader

    try:
        tensors = [tensor for file in files for tensor in GgufHeader.from_file(str(file)).tensors]
        sizes = sum(info.nbytes for info in tensors), _EXPANDED * sum(prod(info.shape) for info in tensors)
        stored, expanded = (f"{size / GIB:.1f} GiB of " for size in sizes)
    except Exception:  # a torn file, or a format that the reader does not know: it is refused in any case
        stored, expanded = "", ""
    raise UsageError(
        f"model {name}: GGUF is not supported: its {stored}weights would be expanded to {expanded}bfloat16;"
        " give the folder or hub ID of the checkpoint that it was made from, with --quantize nf4"
    )
