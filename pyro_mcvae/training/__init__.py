"""Tools for training loops: checkpoints, distributed minibatches."""
