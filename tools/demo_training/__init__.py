"""Trainers of the demo pair (`python -m tools.demo_training.train`) and of draft heads (`….train_head`)."""
