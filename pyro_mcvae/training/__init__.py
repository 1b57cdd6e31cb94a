"""What stands around a training loop: checkpoints, several devices, captured steps."""
