"""Limit what one source may ask for: token buckets, and fair shares of a bounded room.

A bucket holds up to `burst` tokens and gains `rate` of them per second. Work is paid for before it
is done, in proportion to its size, so no source can make a peer do more than its rate, however it
cuts its messages. Sources are whatever the caller tells apart: connections, names, addresses.

Memory is bounded: beyond `MOST_SOURCES` the one that has paid least recently is forgotten. All
functions take `now`.

Source of the shares: max-min fairness (Bertsekas and Gallager, Data Networks, section 6.5.2), by
taking from the fullest, as the longest queue drop of Suter et al. (INFOCOM 1998).
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2ptrain.ids import Seconds

MOST_SOURCES = 1024
"""Buckets of one table."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second, and how many can be saved up."""

    per_s: float
    burst: float


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: Seconds

    def refill(self, rate: Rate, now: Seconds) -> None:
        gained = max(0.0, now - self.at) * rate.per_s
        self.tokens, self.at = min(rate.burst, self.tokens + gained), max(now, self.at)


class Budgets(Generic[T]):
    """One bucket for each source, all of the same rate."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._buckets: OrderedDict[T, _Bucket] = OrderedDict()  # that has paid least recently first

    def take(self, source: T, now: Seconds, amount: float = 1.0) -> bool:
        """Pay `amount` tokens if the source has them; False, and nothing paid, if it has not."""
        bucket = self._bucket(source, now)
        if bucket.tokens < amount:
            return False
        bucket.tokens -= amount
        return True

    def charge(self, source: T, now: Seconds, amount: float = 1.0) -> Seconds:
        """Pay `amount`, on credit if need be; how long the source has to wait until it is paid."""
        bucket = self._bucket(source, now)
        bucket.tokens -= amount
        return max(0.0, -bucket.tokens / self._rate.per_s)

    def give_back(self, source: T, amount: float = 1.0) -> None:
        """What was paid turned out to be worth it."""
        if bucket := self._buckets.get(source):
            bucket.tokens = min(self._rate.burst, bucket.tokens + amount)

    def owes(self, source: T, now: Seconds) -> bool:
        """True if the source has nothing left."""
        return source in self._buckets and self._bucket(source, now).tokens <= 0

    def __len__(self) -> int:
        return len(self._buckets)

    def _bucket(self, source: T, now: Seconds) -> _Bucket:
        bucket = self._buckets.setdefault(source, _Bucket(self._rate.burst, now))
        self._buckets.move_to_end(source)
        bucket.refill(self._rate, now)
        if len(self._buckets) > MOST_SOURCES:
            self._buckets.popitem(last=False)
        return bucket


class FairRoom(Generic[T]):
    """A room for entries of many sources; when it is full, the source with most loses one.

    A source is a name and where it was used: an impostor shares the places of the name that it
    claims, and among those that claim a name the one with most entries loses first.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], dict[T, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def enter(self, name: str, place: str, entry: T, most: int) -> T | None:
        """Let `entry` in; returns the one that has to leave instead, perhaps itself, or None."""
        source = name, place
        self._entries.setdefault(source, {})[entry] = None
        self._size += 1
        if self._size <= most:
            return None
        of_name: Counter[str] = Counter()
        for (one, _), entries in self._entries.items():
            of_name[one] += len(entries)
        sizes = {one: (of_name[one[0]], len(entries)) for one, entries in self._entries.items()}
        fullest = max(sizes, key=lambda one: (sizes[one], one == source))
        victim = entry if fullest == source else next(iter(self._entries[fullest]))
        self._remove(fullest, victim)
        return victim

    def leave(self, name: str, place: str, entry: T) -> None:
        """Free the place of `entry`; no effect if it has lost it."""
        if entry in self._entries.get((name, place), ()):
            self._remove((name, place), entry)

    def _remove(self, source: tuple[str, str], entry: T) -> None:
        del self._entries[source][entry]
        if not self._entries[source]:
            del self._entries[source]
        self._size -= 1
