"""What objectives are compared with: wake-sleep and Monte Carlo EM."""
