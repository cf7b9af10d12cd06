"""Benchmarks: `python -m bench COMMAND` runs from a checkout and writes into `bench/results`.

A study (`studies`) measures tables one after the other; a side-by-side case (`cases`, `side_by_side`) times
systems on the same prompts, each behind an adapter of `systems` in a process of its own (`runner`, `worker`).
Both write their results through `results`: JSON lines, a page of tables and a summary.
"""

COMMANDS = {
    "peers": ("side_by_side", "offload-rt beside transformers, DeepSpeed, llama.cpp and OpenVINO"),
    "speedup": ("side_by_side", "every configuration of offload-rt beside transformers, by context length"),
    "batch": ("side_by_side", "several sequences at a time, by batch size"),
    "link": ("side_by_side", "offload-rt over an emulated link, beside layer prefetch and CPU attention"),
    "offload": ("side_by_side", "the engine over a link, against its lower bounds and plain decoding"),
    "prediction-accuracy": ("prediction_accuracy", "the planner's predictions beside a result of `offload`"),
    "paper": ("studies.paper", "the tables and figures of the papers"),
    "model-card": (
        "studies.model_card",
        "loss along a long prompt, needle score, acceptance of small caches",
    ),
    "questions": ("studies.questions", "a second question about a document: in memory, from disk, and cold"),
    "soak": ("soak", "a server for half an hour, whose clients disconnect at random: wrong answers, memory"),
    "pieces": ("studies.pieces", "a prefill in pieces beside the whole prompt at once"),
    "tokens": ("studies.equal_tokens", "greedy tokens beside those of transformers on real text"),
    "rollback": ("studies.rollback", "ways to return recurrent states to the accepted tokens"),
    "pages": ("studies.pages", "packed pages: bits a value, rates of packing, and passes over a link"),
    "planes": ("studies.planes", "weights in two planes: time of layers, and memory"),
    "search-skips": ("search_skips", "finds the layers to skip while drafting (Draft & Verify)"),
    "gpu": ("gpu", "checks that need a CUDA device"),
}
"""Modules of this package, and what each command measures. A module, or its `STUDY`, has `add_arguments` and
`run`."""
