"""Measurements: peers side by side in one run, every figure next to its ceiling. See `python -m bench`.

`__main__` lists the commands, each a module with `add_parser` and `run`. They share `inputs` (arguments,
models, texts, where results go), `machine` (what a figure was measured on, and its ceiling) and `report` (a
result's envelope, spreads over runs, tables, plots). `runner` times the `cases` with the `systems`, each in a
`worker`, with real weights or `random_models`; `rounds` looks into what our engine did meanwhile, and
`prediction_accuracy` holds the planner against it. The model card reads texts through `context`.
"""
