"""How far a copy of earlier text can be trusted: by the length of the match, as seen so far."""

from dataclasses import dataclass, field

PRIOR_TRIALS = 8.0
"""How many trials the expected rate of a match length stands for."""


@dataclass
class MatchRates:
    """How often a token was one of those that had followed the longest match, by match length.

    `expected` is what holds before anything was seen; it then counts as PRIOR_TRIALS trials.
    """

    trials: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)

    def add(self, match: int, hit: bool) -> None:
        """Count one committed token."""
        bucket = self.bucket(match)
        self.trials[bucket] = self.trials.get(bucket, 0) + 1
        self.hits[bucket] = self.hits.get(bucket, 0) + hit

    def rate(self, match: int) -> float:
        """The rate of matches of this length so far."""
        bucket = self.bucket(match)
        hits = self.hits.get(bucket, 0) + PRIOR_TRIALS * self.expected(match)
        return hits / (self.trials.get(bucket, 0) + PRIOR_TRIALS)

    @staticmethod
    def bucket(match: int) -> int:
        """1, 2, 3, 4, 5-8, 9-16, .. are counted together (by the last of them)."""
        return match if match <= 4 else 1 << (match - 1).bit_length()

    @staticmethod
    def expected(match: int) -> float:
        """What a match of this length was seen to be worth on average."""
        return match**2 / (match**2 + 6)
