"""The live view of a swarm: one page in a browser (`server`), fed by asking its peers (`poller`).

`swarm` derives everything that is shown from the peers' reports, without a clock or a socket;
`p2ptrain top` shows the same in a terminal.
"""
