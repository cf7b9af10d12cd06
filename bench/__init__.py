"""Measurements: peers side by side in one run, every figure next to its ceiling. See `python -m bench`."""
