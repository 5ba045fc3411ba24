"""``p2plab`` and ``python -m p2plab``: the lab, or one sentence where its extra is missing."""

import sys
from typing import NoReturn

from p2ptrain import exit_codes

OF_THE_EXTRA = ("matplotlib", "jinja2", "sklearn")


def main() -> NoReturn:
    """Run `p2plab.cli`."""
    try:
        from p2plab.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OF_THE_EXTRA:
            raise
        print(f"error: p2plab needs {error.name}; pip install 'p2ptrain[lab]'", file=sys.stderr)
        sys.exit(exit_codes.MISTAKE)


if __name__ == "__main__":
    main()
