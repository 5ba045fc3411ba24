"""Write a page per algorithm from its docstrings: `generate_algorithm_pages.py FOLDER`.

The module's docstring is the page, and its options are the fields of `Config` with the docstrings
beneath them. So what a page says stands beside the code that it is about.
"""

import dataclasses
import inspect
import json
import sys
from pathlib import Path

from p2ptrain.averaging.base import Algorithm, known_algorithms, load_algorithm
from p2ptrain.documented import texts_of

FOLDER = Path(inspect.getfile(Algorithm)).parent


def page_of(name: str) -> str:
    """The whole page, Markdown."""
    kind = type(load_algorithm(name))
    module = inspect.getdoc(sys.modules[kind.__module__]) or ""
    title, _, body = module.partition("\n")
    by_option = ", by default" if isinstance(kind.averages, property) else ""
    averages = f"{load_algorithm(name).averages}{by_option}"
    file = str(Path(inspect.getfile(kind)).relative_to(FOLDER))
    parts = [
        f"# `{name}`: {title.rstrip('.')}",
        f"Averages {averages}. The code is [`{file}`](../../p2ptrain/averaging/{file}), "
        "from which this page is made (`make algorithm-pages`).",
        markdown(body.strip("\n")),
        "## Options",
        options_of(kind),
    ]
    return "\n\n".join(parts) + "\n"


def options_of(kind: type[Algorithm]) -> str:
    """Every option with its default and what it does."""
    texts = {name: markdown(text) for name, text in texts_of(kind.Config).items()}
    own = inspect.get_annotations(kind.Config)
    fields = sorted(dataclasses.fields(kind.Config), key=lambda field: field.name not in own)
    if not fields:
        return "None."
    table = f"[options.{kind.__module__.rpartition('.')[2]}]"
    lines = [f"In a scenario under `{table}`, in a program as `algorithm_options`."]
    for field in fields:
        default = json.dumps(field.default)
        lines.append(f"**`{field.name} = {default}`**  \n{texts[field.name]}")
    return "\n\n".join(lines)


def markdown(text: str) -> str:
    """Double backquotes are single ones here; a block that `::` announces is indented already."""
    return text.replace("``", "`").replace("::\n", ":\n")


def generate(folder: Path) -> None:
    """Write all pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in known_algorithms():
        (folder / f"{name}.md").write_text(page_of(name), encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
