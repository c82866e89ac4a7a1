"""What surrounds a training run: checkpoints, progress, logs, pictures."""
