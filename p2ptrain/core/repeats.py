"""Say a thing once per minute and source, with a count of what was left out."""

from collections.abc import Hashable

from p2ptrain.ids import Seconds

PERIOD_S: Seconds = 60.0
MOST_KEYS = 256
"""Things that are remembered as said; beyond, the one that was said first is forgotten."""


class Repeats:
    """What was said when, and how often it was left out since."""

    def __init__(self) -> None:
        self._said: dict[Hashable, tuple[Seconds, int]] = {}

    def said(self, key: Hashable, text: str, now: Seconds) -> str | None:
        """`text`, if it is time to say it, with how often it was left out before; else None."""
        at, left_out = self._said.get(key, (-PERIOD_S, 0))
        if now - at < PERIOD_S:
            self._said[key] = at, left_out + 1
            return None
        self._said.pop(key, None)
        self._said[key] = now, 0
        if len(self._said) > MOST_KEYS:
            del self._said[next(iter(self._said))]
        return f"{text} (and {left_out} times more before)" if left_out else text
