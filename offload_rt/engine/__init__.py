"""The engine: sequences, the decode step, the speculation controller, and prefill."""
