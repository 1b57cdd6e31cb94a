"""The one place that runs programs with leading dimensions, and the weights of such runs."""
