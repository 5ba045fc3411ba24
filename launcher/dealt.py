"""Count from the records of peers how often each sample was trained, epoch by epoch.

A step's record says which samples it was of, where data are dealt (``trained``). So the counts of
this file are what happened, whatever the peers believe. What these say at their ends (``data`` of
``ended``), their ledgers, is compared with it.

An epoch is *finished* if the ledgers of the peers that trained and came to their ends say so.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from p2plab.harness.claims import Json
from p2plab.records import PeerHistory


def data_of(histories: Sequence[PeerHistory]) -> Json | None:
    """What a summary says of the data; None where they were not dealt.

    ``finished`` (epochs); of the samples of those ``never``, ``again`` (shares, 0 to 1, of all such
    epochs together) and ``again_worst`` (of the worst epoch); ``ledger_gap`` (by how many samples a
    ledger and the records differ at most in the samples trained in a finished epoch, as a share of
    its samples), ``uncounted`` (samples of steps that are in no epoch) and ``epochs``: of each its
    number and its samples trained never, once, more often, and in all.
    """
    spans = [span for history in histories for span in history.trained]
    ended = [one.ended for one in histories if one.ended and one.trained]
    ledgers = [data for one in ended if (data := one.get("data"))]
    if not spans or not ledgers:
        return None
    samples = max(never + once + again for _, never, once, again, _ in ledgers[0])
    epochs = [_count(epoch, spans, samples) for epoch in sorted({span[0] for span in spans})]
    finished = min(_finished(ledger) for ledger in ledgers)
    done = [one for one in epochs if one[0] < finished]
    trained = sum(stop - start for _, start, stop in spans)
    return {
        "finished": finished,
        "never": _share(done, 1, samples),
        "again": _share(done, 3, samples),
        "again_worst": max((one[3] / samples for one in done), default=0.0),
        "ledger_gap": _gap(done, ledgers) / samples,
        "uncounted": sum(history.samples for history in histories) - trained,
        "epochs": epochs,
    }


def _count(epoch: int, spans: Iterable[Sequence[int]], samples: int) -> list[int]:
    changes = np.zeros(samples + 1, np.int64)
    for number, start, stop in spans:
        if number == epoch:
            changes[start] += 1
            changes[stop] -= 1
    often = np.cumsum(changes[:-1])
    counts = [int((often == 0).sum()), int((often == 1).sum()), int((often > 1).sum())]
    return [epoch, *counts, int(often.sum())]


def _finished(ledger: Sequence[Sequence[int]]) -> int:
    """The first epoch of which a sample is left."""
    left = [epoch for epoch, never, *_ in ledger if never]
    return min(left) if left else max(epoch for epoch, *_ in ledger) + 1


def _share(epochs: Sequence[Sequence[int]], which: int, samples: int) -> float | None:
    whole = samples * len(epochs)
    return sum(one[which] for one in epochs) / whole if whole else None


def _gap(done: Sequence[Sequence[int]], ledgers: Iterable[Sequence[Sequence[int]]]) -> int:
    """The largest difference of what a ledger and the records say was trained in an epoch."""
    happened = {epoch: trained for epoch, *_, trained in done}
    said = ((epoch, trained) for ledger in ledgers for epoch, *_, trained in ledger)
    return max((abs(happened[e] - trained) for e, trained in said if e in happened), default=0)
