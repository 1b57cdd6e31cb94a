"""Training loops: checkpoints, distributed minibatches, wake-sleep and Monte Carlo EM."""
