"""p2ptrain: peers of unequal speed train one PyTorch model together, without a server."""
