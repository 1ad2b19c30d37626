"""Checkpoints in the exact form that serving engines load."""
