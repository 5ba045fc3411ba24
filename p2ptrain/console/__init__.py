"""The terminal output for users: a peer's progress, a swarm's status, the findings of `doctor`."""
