"""Drafters at work: the target, verification, the speculative loop, reports and exports."""
