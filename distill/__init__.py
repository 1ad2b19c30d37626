"""What a drafter learns from: prompts, the target's own responses, losses."""
