"""Run a model and a guide, and describe their sites."""
