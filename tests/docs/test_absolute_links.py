"""Links of the README lead somewhere on a package index, once the repository's URL is known."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "absolute_links", ROOT / "tests/tidy/absolute_links.py"
)
assert SPEC
assert SPEC.loader
MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)

URL = "https://forge.example/team/p2ptrain"


def test_a_file_is_linked_as_a_page_and_an_image_as_a_file():
    text = "![alt, with (words)](docs/a.png), [`code`](docs/b.md#part), [x](https://y.example)"
    assert MODULE.absolute(text, f"{URL}/") == (
        f"![alt, with (words)]({URL}/raw/HEAD/docs/a.png), "
        f"[`code`]({URL}/blob/HEAD/docs/b.md#part), [x](https://y.example)"
    )


def test_no_relative_link_of_the_readme_is_left():
    text = MODULE.absolute((ROOT / "README.md").read_text(), URL)
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
