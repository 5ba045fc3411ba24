"""The exit codes of `p2ptrain`, `p2plab` and the benchmarks: one meaning each.

docs/training-loops.md has the same table for readers.
"""

OK = 0
PROBLEM = 1
"""An exception that the program did not catch; ``doctor`` and ``health``: something is wrong."""
MISTAKE = 2
"""What the user can correct, or a refusal by others: one sentence on standard error."""
CLAIM_FAILED = 3
"""``p2plab run --check`` and benchmarks: a claim does not hold."""
HUNG_UP = 129
"""SIGHUP, after `p2plab` has ended its peers."""
INTERRUPTED = 130
"""Ctrl-C."""
TERMINATED = 143
"""SIGTERM outside of a peer's ``with``; `p2plab`: after it has ended its peers."""
