"""A context as long as Qwen2.5-7B-1M's on a CPU, with a tiny random model: `million_tokens.py 1048576`."""

import sys
from resource import RUSAGE_SELF, getrusage
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from offload_rt import LLM, SamplingParams

if len(sys.argv) < 2 or not sys.argv[1].isdecimal():
    sys.exit("usage: python examples/million_tokens.py TOKENS")
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=1_100_000,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config).float().eval()
prompt = torch.randint(256, (int(sys.argv[1]),)).tolist()
params = SamplingParams(max_tokens=32)

with LLM.from_models(model, config="retrieval", overrides={"speculation.step_down": False}) as llm:
    started = perf_counter()
    context = llm.read(prompt)
    seconds = perf_counter() - started
    result = context.generate(params=params)
    context.rewind(result.prompt_tokens)
    plain = context.generate(params=params, config="plain")

most = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
print(f"{len(prompt)} tokens read in {seconds:.0f} s; {most:.2f} GiB at most")
print(f"tokens equal to plain decoding: {result.tokens == plain.tokens}")
