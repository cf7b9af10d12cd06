"""Every Triton kernel is compiled, without a GPU, for the GPUs that the project supports.

Engines run on the emulated CUDA device, with the heads and head dimensions of real models. Each launch is
recorded and computed by the plain form of the operator instead. Then each recorded variant of a kernel is
compiled to machine code: Triton brings ptxas, which reports spills and registers.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulated import cuda as emulated_cuda
from emulated.gpu import EMULATED
from support.plain_operators import as_of_kernels
from support.small_engine import CUDA, engine_overrides, place
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to

import cpu_kv
import offload_rt
from cpu_kv import CudaLink, KVLayout
from cpu_kv.packed import PackedShape, PageCodec
from offload_rt import LLM, SamplingParams
from offload_rt.attention import backends, cuda_backends, page_codec
from offload_rt.attention.mass import Sample
from offload_rt.caches.sizes import Tiers
from offload_rt.engine import engine
from offload_rt.kernels import operators
from offload_rt.kernels.planes import WeightPlanes
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.kernels.sizes import GROUP, PASS_ROWS
from offload_rt.machine import inventory

triton = pytest.importorskip("triton", reason="needs the compiler of Triton, which is not installed")
if not EMULATED:
    pytest.skip("records the launches of an emulated CUDA device (EMULATED_CUDA)", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from offload_rt.kernels import triton_operators, triton_packing, triton_planes  # noqa: E402

pytestmark = pytest.mark.gpu

TARGETS = [86, 89, 90, 120]
"""RTX 3060 to 3090, RTX 4060 to 4090, H100 and H200, RTX 5060 to 5090."""
TAKE_TURNS = (86, 89)
"""They have the same instructions for matrix products: each variant is compiled for one of them."""
MOST_SHARED = 99 * 1024
"""Bytes of shared memory that one block can have on a desktop's GPU."""
MOST_SPILLED = 32
"""Bytes that a kernel may spill: ptxas does so by itself where more blocks then run at a time."""
MOST_VARIANTS = 21
"""Of one engine, or of the check; each takes up to a second to compile when a machine runs it first."""
PAGE = 64  # as many keys as one program takes the attention mass of


class Shape(NamedTuple):
    """What kernels see of a model, and the bits of its retrieved entries."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    bits: int


SHAPES = {
    "llama2-7b": Shape(32, 32, 128, torch.bfloat16, 8),
    "llama3.1-8b": Shape(32, 8, 128, torch.bfloat16, 4),
    "demo in float16": Shape(4, 4, 64, torch.float16, 8),
}
WIDE = Shape(16, 2, 256, torch.bfloat16, 8)
"""As of Qwen3.5 and Gemma 3, whose heads are the widest."""


class Variant(NamedTuple):
    """A kernel as Triton compiles it for some of its launches."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def __str__(self) -> str:
        constants = (f"{self.kernel.arg_names[place]}={value}" for (place,), value in self.constants.items())
        return f"{self.kernel.__name__}[{', '.join(constants)}] of {', '.join(self.signature.values())}"

    def constant(self, name: str) -> Any:
        return self.constants[(self.kernel.arg_names.index(name),)]


class Launches:
    """Takes Triton's place: records what is launched, and compiles and launches nothing.

    Attributes:
        count: number of launches.
        variants: of one run, by kernel and by Triton's key for it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.variants: dict[tuple[str, str], Variant] = {}

    def hook(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        self.count += 1
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages")}
        (attributes,) = compile["configs"]
        self.variants[fn.name, str(key)] = Variant(
            fn.jit_function, compile["signature"], compile["constants"], attributes, options
        )
        return True

    def beside(self, launch: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that launches kernels and returns what their plain form computes."""

        def both(*arguments: Any) -> Any:
            before = self.count
            launch(*arguments)
            assert self.count > before, f"{launch.__name__} falls back to its plain form"
            return plain(*arguments)

        return both

    # What Triton asks a driver for.

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", TARGETS[0], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Run = dict[tuple[str, str], Variant]


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Variants by run: of an engine for each shape, and of the check that comes before the first use."""
    launches, codec = Launches(), PageCodec()
    plain_of_pages: dict[str, Callable[..., Any]] = {
        "encode": codec.encode,
        "decode": codec.decode,
        "take": codec.take,
    }
    found: dict[str, Run] = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("offload_rt", "IMPL") as library,
    ):
        patch.setattr(emulated_cuda, "_KNOWN", {})
        driver.set_active(launches)
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", launches.hook)
        for module in (cuda_backends, engine, inventory, page_codec):
            patch.setattr(module, "use_triton", lambda *given: None)
        patch.setattr(cuda_backends, "queries_are_alike", lambda *given: True)
        for name in operators.NAMES:
            plain = as_of_kernels(getattr(operators, name))
            both = launches.beside(getattr(triton_operators, name), plain)
            patch.setattr(triton_operators, name, both)
            library.impl(name, both, "CPU")  # with which the emulated device computes
            library.impl(name, plain, "Meta")  # of which it learns the form of results
        for name in ("encode", "decode", "take"):
            both = launches.beside(getattr(triton_packing, name), plain_of_pages[name])
            patch.setattr(triton_packing, name, both)
        try:
            launches.variants = found["check"] = {}
            triton_operators.check(backends.TorchCpuBackend().parts, device="cpu")
            for name, shape in SHAPES.items():
                launches.variants = found[name] = {}
                generate(shape)
                launch_what_is_rare(shape)
            launches.variants = found["wide heads"] = {}
            launch_what_is_rare(WIDE)
            launches.variants = found["weights in planes"] = {}
            multiply_planes()
            launches.variants = found["without attention mass"] = {}
            for shape in (*SHAPES.values(), WIDE):
                attend_packed_pages(shape)
        finally:
            driver.set_active(None)  # which Triton looks for when it is next asked
    return found


def generate(shape: Shape) -> None:
    """Runs an engine whose KV is in all tiers, and whose retrieved entries are quantised."""
    sizes: dict[str, Any] = {
        "layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    target = to(tiny_target(**sizes), shape.dtype)
    page_bytes = PAGE * 2 * shape.kv_heads * shape.head_dim * 2
    overrides = engine_overrides() | {
        "store.page": PAGE,
        "store.slab_tokens": 4 * PAGE,
        "store.segment_bytes": 2 * page_bytes,
        "retrieval.bits": shape.bits,
        "retrieval.budget": 128,
        "speculation.gamma2": 10,  # queries of a key head in tiles of 16, 32 and 64
    }
    draft = noisy_copy(target)
    given = to(target, CUDA), to(draft, CUDA)
    with LLM.from_models(*given, config="triforce", overrides=overrides, link=CudaLink(CUDA)) as llm:
        place(llm, Tiers(PAGE, PAGE))
        llm.generate(byte_ids(6 * PAGE), SamplingParams(max_tokens=4))


def launch_what_is_rare(shape: Shape) -> None:
    """Launches what engines need where a graph cannot be recorded, or where a mass has no reference yet."""
    heads, kv_heads, dim, dtype, bits = shape
    group, sample, scale = heads // kv_heads, Sample.of(11), dim**-0.5
    queries = torch.zeros(kv_heads, group * sample.period, dim, dtype=dtype)
    memory = QuantizedKV.empty(KVLayout(1, kv_heads, dim, dtype), 2 * GROUP, bits, torch.device("cpu"))
    triton_operators.attend_quantized(queries, *memory.layer(0), None, scale)
    keys = torch.zeros(2, 2, kv_heads, PAGE, dim, dtype=dtype)[:, 0]
    mass = torch.zeros(kv_heads, group * sample.count, 2 * PAGE // 8)
    lse = torch.zeros(kv_heads, group * sample.period)
    triton_operators.chunk_mass_(mass, queries, keys, lse, scale, sample.period, sample.step)
    paths = torch.zeros(sample.period, 3, dtype=torch.int32)  # of a tree
    tail = keys[0], keys[0], PAGE, sample.period, 5, paths, paths[:, 0].contiguous()
    triton_operators.attend_tail(queries, *tail, scale)


def attend_packed_pages(shape: Shape) -> None:
    """Attends to packed pages without attention mass, in tiles of 16 queries, and of 32 to 128."""
    heads, kv_heads, dim, *_ = shape
    packed = torch.zeros(2, PackedShape(kv_heads, PAGE, dim).nbytes, dtype=torch.uint8)
    for rows in (1, heads // kv_heads * 17):
        queries = torch.zeros(kv_heads, rows, dim, dtype=torch.bfloat16)  # as packed pages are
        triton_operators.attend_packed(queries, packed, PAGE, dim**-0.5, None, None, 1, 1)


def multiply_planes() -> None:
    """Multiplies some rows, and more than one program can have, with weights in two planes, as layers do."""
    weights = WeightPlanes.split(torch.ones(64, 128, dtype=torch.bfloat16))
    assert weights is not None
    bias = torch.zeros(64, dtype=torch.bfloat16)
    for rows, draft in product((1, 17, PASS_ROWS, 2 * PASS_ROWS), (False, True)):
        inputs = torch.zeros(rows, 128, dtype=torch.bfloat16)
        triton_planes.plane_product(inputs, weights.parts, None, draft)
    for rows in (1, PASS_ROWS):
        triton_planes.plane_product(inputs[:rows], weights.parts, bias, False)


def project_kernels() -> dict[str, Any]:
    """Returns all Triton functions of the packages by name."""
    found: dict[str, Any] = {}
    for package in (offload_rt, cpu_kv):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            path = Path(*package.__path__, *module.name.split(".")[1:]).with_suffix(".py")
            if path.exists() and "@triton.jit" in path.read_text(encoding="utf-8"):
                for name, value in vars(import_module(module.name)).items():
                    if isinstance(value, triton.JITFunction):
                        found[name] = value
    return found


def sums(compiled: Any) -> set[str]:
    """Returns the layouts in which attention multiplies tiles on tensor cores, and sums rows of a tile."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    rows = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)', text, re.DOTALL)
    assert rows, text
    return {layouts[name] for name in rows} | {one for one in layouts.values() if "nvidia_mma" in one}


def test_every_kernel_is_launched(runs: dict[str, Run]) -> None:
    """A new kernel must be launched by one of the runs above, else nothing compiles it before a GPU does."""
    every = project_kernels()
    called = {name for kernel in every.values() for name in kernel.fn.__code__.co_names}
    launched = {name for run in runs.values() for name, _ in run}
    assert launched == every.keys() - called
    assert len(launched) >= 8


def test_a_run_compiles_few_variants(runs: dict[str, Run]) -> None:
    """Triton compiles a kernel anew for each type, constant and argument that is 1 or divisible by 16."""
    for name, run in runs.items():
        assert len(run) <= MOST_VARIANTS, (name, *map(str, run.values()))


@pytest.mark.parametrize("capability", TARGETS)
def test_no_variant_spills(
    runs: dict[str, Run],
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Nor does one need more shared memory than a block can have.

    All kernels for attention to heads of one kind sum in the same layouts, so in the same order.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled in this very run
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    failures, orders = [], dict[tuple[str, int], set[str]]()
    variants = [*{key: one for run in runs.values() for key, one in run.items()}.values()]
    for number, variant in enumerate(variants):
        if capability in TAKE_TURNS and TAKE_TURNS[number % 2] != capability:
            continue
        kernel, signature, constants, attributes, options = variant
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        if kernel.__name__ in ("_attend_pages", "_attend_tail"):
            order = orders.setdefault((signature["asking"], variant.constant("HALF")), sums(compiled))
            assert sums(compiled) == order, f"{variant} sums in another order"
        log = capfd.readouterr().out
        spills = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
        )
        assert spills and f"sm_{capability}" in log, f"ptxas reported nothing: {log}"
        shared = compiled.metadata.shared
        if any(int(number) > MOST_SPILLED for one in spills for number in one) or shared > MOST_SHARED:
            failures.append(f"{variant}: {spills} bytes of stack, {shared} of shared memory")
    assert not failures, "\n".join(failures)
