"""Environment of all tests, which of them run on an emulated GPU, and fixtures of several folders."""

from __future__ import annotations

import gc
import os
import signal
from itertools import groupby
from typing import TYPE_CHECKING, Any

# Before transformers is imported: no test may use the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OFFLOAD_RT_CONFIG"] = "/no/such/folder/settings.toml"  # nor a developer's own settings
# Before torch is imported: tiny models compute faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from offload_rt.system.openmp import has_nvidia_driver

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytest.register_assert_rewrite("support")

EMULATED_CUDA = "EMULATED_CUDA" in os.environ
# Before anything imports Triton: where there is no GPU, its interpreter runs the kernels.
if not EMULATED_CUDA and not has_nvidia_driver():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Emulates a GPU before tests are imported, but not in the process that only distributes them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of what a script starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if EMULATED_CUDA and not distributes:
        from emulated import cuda

        cuda.install(os.environ["EMULATED_CUDA"])

        from offload_rt.machine import measuring
        from offload_rt.model.cuda_graphs import CudaCapture

        # One finds what depends on the pass before it; a second is for CUDA's libraries.
        CudaCapture.WARM_UP = 1
        # Plans ask for the rates of a machine that has not been measured yet, which takes minutes in the
        # sizes for a real GPU.
        measuring.GPU_PRODUCT, measuring.GPU_QUANTIZED = (256, 256), (256, 1)
        measuring.MEMORY_BYTES = measuring.ATTENTION_BYTES = measuring.COPY_BYTES = 2**24
        measuring.LAYERS = measuring.REPEATS = 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch  # not in the process that only distributes tests

    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def _test(item: Any) -> tuple[str, bool]:
    return item.originalname, item.get_closest_marker("gpu") is not None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Selects some cases of slow tests on an emulated GPU; `EMULATED_CUDA_EVERY=1` runs all."""
    if EMULATED_CUDA:
        every = int(os.environ.get("EMULATED_CUDA_EVERY", "30"))
        slow = [
            item
            for item in items
            if item.path.stem
            in ("test_context", "test_graphs", "test_prefix", "test_saved_context", "test_streaming_engine")
        ]
        left_out = set(slow)
        for _, cases in groupby(sorted(slow, key=_test), key=_test):
            left_out -= {*list(cases)[::every]}  # the first of each test at least
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Exempts what was imported from garbage collection: some 400,000 objects."""
    gc.collect()
    gc.freeze()


# Imports are lazy: the process that only distributes tests needs no torch.


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """The target model of the small engine; folders and files may have their own."""
    from support.tiny_models import tiny_target

    return tiny_target("llama-gqa")


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    """A model that often agrees with `target`."""
    from support.tiny_models import noisy_copy

    return noisy_copy(target)


@pytest.fixture(scope="module")
def plain_tokens(target: PreTrainedModel) -> list[int]:
    """What follows `PROMPT` by `PARAMS`, decoded plainly and in place."""
    from support.small_engine import PARAMS, PROMPT, SIZES

    from offload_rt import LLM

    with LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        return llm.generate(PROMPT, PARAMS).tokens
