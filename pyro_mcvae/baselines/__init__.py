"""What objectives are compared with, and the control variates of score functions."""
