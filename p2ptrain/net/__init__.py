"""Bytes on a wire."""

import os

# gRPC's core writes to stderr, past every logger, what also reaches us as an error. It reads this
# once, when it starts; `GRPC_VERBOSITY=ERROR` in the environment brings its own words back.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
