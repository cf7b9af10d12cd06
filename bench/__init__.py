"""Measurements: peers side by side in one run, every figure next to its ceiling. See `python -m bench`.

`__main__` lists the commands: modules with `add_parser` and `run`, and `studies`, which are declared by their
sizes and their parts. They share `inputs` (arguments, models, texts, where results go), `machine` (what a
figure was measured on, and its ceiling) and `report` (a result's envelope, spreads over runs, tables, plots).

`side_by_side` measures the `cases`: `runner` times the `systems` in turn, each in a `worker`, with real
weights or `random_models`. Ours go on from a `recorded_text`; `rounds` looks into what the engine did
meanwhile, and `prediction_accuracy` holds the planner against it. The model card and `paper` read `texts`.
"""
