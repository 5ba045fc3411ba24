"""Print a Markdown page whose relative links start with a URL: `absolute_links.py PAGE URL`.

A package index shows the README without the repository around it, so that relative links and images
lead nowhere. The repository's URL is known when a release is made, and is given then.
"""

import re
import sys
from pathlib import Path

RELATIVE = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text: str, url: str) -> str:
    """The page with links to `url`/blob/HEAD/FILE, and images from `url`/raw/HEAD/FILE."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        return f"{mark}{label}({url.rstrip('/')}/{'raw' if mark else 'blob'}/HEAD/{target})"

    return RELATIVE.sub(link, text)


if __name__ == "__main__":
    sys.stdout.write(absolute(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]))
