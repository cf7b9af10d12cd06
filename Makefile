# Everything runs in .venv, which the first target that needs it sets up. An environment that exists is used
# as it is, and nothing is installed, with `make gpu BIN=/path/to/env/bin INSTALLED=`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
PEERS := .venv-peers
# Those that need nothing beyond what `install` brings.
CUDA_PEERS := transformers:dynamic,transformers:static,transformers:offloaded,zero_style:rebuilt,ours:plain,ours:retrieval,ours:triforce
SHAPES := llama2-7b llama3.1-8b qwen2.5-7b
# They need no package beyond torch, transformers, Triton, pytest, pytest-xdist, hypothesis and platformdirs.
GPU_TESTS := tests/cpu_kv $(patsubst %,tests/%.py,api/test_context api/test_prefix api/test_saved_context \
  attention/test_attention caches/test_caches caches/test_resident drafting/test_penalties engine/test_host \
  engine/test_local_layers engine/test_packed_engine engine/test_streaming_engine model/test_graphs \
  model/test_remote_mlp model/test_two_devices)
# Each run of the tests has several processes, which import the same files: they are compiled once.
export PYTHONDONTWRITEBYTECODE :=
RANDOM_ON_CUDA := --device cuda --acceptance 0.8,0.92,0.97 --model random

.PHONY: install demo test lint bench bench-peers gpu gpu-quick gpu-7b clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offload-rt needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	@echo 'downloads and installs the dependencies into .venv: 2.3 GB with torch for CPUs, 5.6 GB with CUDA'
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[bench,test]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/offload-rt demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal
	EMULATED_CUDA=late $(BIN)/python -m pytest -n auto --dist worksteal -m gpu
	EMULATED_CUDA=random $(BIN)/python -m pytest -m gpu tests/cpu_kv & beside=$$!; \
	EMULATED_CUDA=late EMULATED_GPUS=1 $(BIN)/python -m pytest -m gpu tests/engine/test_packed_engine.py -k triforce \
	  || { wait $$beside; false; } && wait $$beside

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m bench speedup

bench-peers: $(PEERS)/installed

$(PEERS)/installed: bench/peers-requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt numpy setuptools torch transformers
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS)/bin/python -m pip install --quiet --no-build-isolation \
	  -c constraints.txt -r bench/peers-requirements.txt
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON" $(PEERS)/bin/python -m pip install --quiet --no-deps \
	  llama-cpp-python==0.3.36
	touch $@

# What matters first, in seven minutes and without a download: kernels and pages, the link, equal tokens, the
# engine, then the tests that need a GPU, each named as it ends.
gpu-quick: $(INSTALLED)
	@failed=; for piece in \
	    'bench gpu --quick --out bench/results/gpu-quick.jsonl' \
	    'pytest -v -m gpu -n 8 --tb=short $(GPU_TESTS)'; \
	do \
	    echo "python -m $$piece"; $(BIN)/python -m $$piece || failed="$$failed; $$piece"; \
	done; \
	[ -z "$$failed" ] || { echo "make gpu-quick: failed$$failed" >&2; exit 1; }

# Llama-2-7B with 127K tokens, where the plan for a card of 24 GB is tightest.
gpu-7b: $(INSTALLED)
	$(BIN)/python -m bench gpu --quick --only largest --out bench/results/gpu-7b.jsonl

# Every piece runs, whatever fails before it.
gpu: $(INSTALLED)
	@$(BIN)/python -c 'import sys; from offload_rt.machine.cuda import no_cuda_device; sys.exit(no_cuda_device())'
	@failed=; for piece in \
	    'bench gpu --out bench/results/gpu-checks.jsonl' \
	    'pytest -m gpu' \
	    'offload_rt doctor --refresh --json bench/results/doctor-gpu.json' \
	    $(foreach shape,$(SHAPES), \
	    'bench offload $(RANDOM_ON_CUDA):$(shape) --out bench/results/offload-$(shape)-gpu.jsonl' \
	    'bench prediction-accuracy bench/results/offload-$(shape)-gpu.jsonl') \
	    'bench questions --device cuda --out bench/results/questions-gpu.jsonl' \
	    'bench peers --device cuda --systems $(CUDA_PEERS) --contexts 4096,32768 --out bench/results/peers-gpu.jsonl'; \
	do \
	    echo "python -m $$piece"; $(BIN)/python -m $$piece || failed="$$failed; $$piece"; \
	done; \
	[ -z "$$failed" ] || { echo "make gpu: failed$$failed" >&2; exit 1; }

clean:
	rm -rf .venv $(PEERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
