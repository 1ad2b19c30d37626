"""How a drafter learns: one trainer for every kind, one short script a kind."""
