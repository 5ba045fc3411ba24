"""``python -m p2ptrain``."""

from p2ptrain.cli import main

main()
