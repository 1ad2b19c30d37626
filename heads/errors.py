"""The one exception for what the user gave wrong."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was given, what was expected, what to do: shown as one message, exit status 2."""


def unknown_name(what: str, given: str, available: Iterable[str]) -> UserError:
    """An error for an unknown `given` that names the nearest of `available`."""
    names = sorted(available)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {what} {given!r}: {hint}available are {', '.join(names)}")
