"""What may stop a run, and never changes a number."""
