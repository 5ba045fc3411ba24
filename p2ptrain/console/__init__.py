"""What a person at a terminal sees: a peer's progress, a swarm's status, a doctor's findings."""
