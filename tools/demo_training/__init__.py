"""Trains the demo pair and its draft head: `python -m tools.demo_training.train`, `….train_head`."""
