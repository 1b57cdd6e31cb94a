"""What stands around a training loop: checkpoints, several devices."""
