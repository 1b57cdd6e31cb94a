"""Control variates of score functions, which Rao-Blackwellized gradients subtract from costs."""
