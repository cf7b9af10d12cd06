"""`python -m bench questions`: a second question about a document, and what its KV takes on disk."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import zstandard

from bench import arguments as args
from bench.results import Row
from bench.studies.continued import Continued
from bench.studies.study import Part, Study, timed
from cpu_kv.sizes import dtype_name
from offload_rt.api.context import Context
from offload_rt.api.llm import LLM
from offload_rt.sampling.params import SamplingParams

QUESTION = "\n\nWho is Ahab, and what does he want?\n\nAnswer:"
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
ZSTD_LEVEL = 1  # higher ones are slower than a disk, and save a hundredth more


@dataclass(frozen=True)
class Sizes:
    """Sizes of `questions`.

    Attributes:
        context: tokens of the longest document.
        divisors: documents are this long, divided by each of these.
        turns: times that each way is measured.
    """

    context: int = 131072
    divisors: tuple[int, ...] = (32, 4, 1)
    turns: int = 3
    positions: int = 0  # behind the context, see `Texts`


def first_token(study: Continued) -> Iterator[Row]:
    """Seconds to the first token of a second question about a document.

    Cold: the document and the question are read. In memory: the document is there. From disk: it is loaded
    by another `LLM`, with the file in the system's page cache, and with the file dropped from it, so that the
    disk is read. Tokens are compared. `save` and `load` are GB/s of the file, the latter from the page cache.
    """
    for length in (study.sizes.context // divisor for divisor in study.sizes.divisors):
        with tempfile.TemporaryDirectory(dir=study.arguments.folder) as folder:
            path = Path(folder) / "context.safetensors"
            rows = [_turn(study, length, path) for _ in range(study.sizes.turns)]
        row = {name: median(result[name] for result in rows) for name in rows[0]}
        row["tokens_equal"] = all(result["tokens_equal"] for result in rows)
        yield {"tokens": length} | row | {"cold_over_disk": row["cold"] / row["disk"]}


def _turn(study: Continued, length: int, path: Path) -> Row:
    document = study.tokens[:length]
    question = study.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    with _opened(study) as llm:
        cold, context = timed(lambda: llm.read([*document, *question]))
        answered, result = timed(lambda: context.generate((), FIRST))
        cold += answered
        context.close()
        context = llm.read(document)
        memory, warm = timed(lambda: context.generate(question, FIRST))
        context.rewind(length)
        saving, _ = timed(lambda: context.save(path))
    size = path.stat().st_size / 1e9
    with _opened(study) as llm:
        cached, context, again = _from_disk(llm, path, question)
        context.close()
        _drop_from_page_cache(path)
        disk, context, _ = _from_disk(llm, path, question)
        context.close()
        loading, context = timed(lambda: llm.load(path))
    equal = result.tokens == warm.tokens == again
    return {
        "cold": cold,
        "memory": memory,
        "page_cache": cached,
        "disk": disk,
        "tokens_equal": equal,
        "file_gb": size,
        "save": size / saving,
        "load": size / loading,
    }


def _from_disk(llm: LLM, path: Path, question: list[int]) -> tuple[float, Context, list[int]]:
    loading, context = timed(lambda: llm.load(path))
    answering, result = timed(lambda: context.generate(question, FIRST))
    return loading + answering, context, result.tokens


def _opened(study: Continued) -> closing[LLM]:
    config = "retrieval" if study.draft is None else "triforce"
    return closing(LLM.from_models(study.target, study.draft, study.tokenizer, config, study.keys()))


def _drop_from_page_cache(path: Path) -> None:
    """Asks the system to forget the file's pages, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sizes_on_disk(study: Continued) -> Iterator[Row]:
    """Bytes of KV per token on disk, as saved and compressed.

    Compressed by zstd as it is, and with the bytes of all values split by their place, which brings signs and
    exponents together. `bits` are those of a value. Rates are of one thread, GB/s of what is compressed.
    """
    length = min(study.sizes.context, 16384)
    with _opened(study) as llm, llm.read(study.tokens[:length]):
        (sequence,) = llm.engine.sequences
        kv = sequence.full.transfer.read(0, length - 1).cpu()
    for dtype in dict.fromkeys((kv.dtype, torch.bfloat16)):
        converted = kv.to(dtype)
        raw, width = converted.view(torch.uint8), dtype.itemsize
        split = raw.view(-1, width).T.contiguous()
        for name, data in (("as it is", None), ("zstd", raw), ("zstd, split bytes", split)):
            size, packing, unpacking = raw.numel(), None, None
            if data is not None:
                size, packing, unpacking = _compressed(data)
            values = raw.numel() // width
            yield {
                "dtype": dtype_name(dtype),
                "form": name,
                "bytes_per_token": size / (length - 1),
                "bits": 8 * size / values,
                "compress": packing,
                "decompress": unpacking,
            }


def _compressed(data: torch.Tensor) -> tuple[int, float, float]:
    """Returns the compressed size, and GB/s to compress and to restore; checks that nothing is lost."""
    raw = data.numpy().tobytes()
    packing, packed = timed(lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw))
    unpacking, restored = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    assert restored == raw
    return len(packed), len(raw) / 1e9 / packing, len(raw) / 1e9 / unpacking


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the study's own."""
    args.add_models(parser)
    args.add_numbers(
        parser,
        Sizes,
        ("context", int, 1024, "tokens of the longest document"),
        ("turns", int, 1, "times that each way is measured"),
    )
    folder = "where contexts are saved (default: that of temporary files)"
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=folder)


STUDY = Study(
    note="""Times in seconds, sizes in GB (1e9).""",
    sizes=Sizes(),
    quick={"context": 4096, "divisors": (1,), "turns": 1},
    minutes=(20, 1),
    opened=Continued.opened,
    parts={"first-token": Part(first_token), "sizes": Part(sizes_on_disk)},
    options=options,
)
