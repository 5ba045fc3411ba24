"""``python -m launcher`` is ``p2plab``."""

from launcher.cli import main

if __name__ == "__main__":
    main()
