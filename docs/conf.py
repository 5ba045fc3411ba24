"""The documentation as a site: Sphinx over the Markdown of this folder (`make docs`).

The pages are written for a reader of the repository: they link to source files by relative paths,
and the index is plain lists of links. Here the index's lists become the navigation, and each linked
file outside this folder becomes a page that shows it.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import find_lexer_class_for_filename
from sphinx.application import Sphinx

import p2ptrain

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "p2ptrain"
author = "The p2ptrain developers"
version = release = p2ptrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "literal"  # the docstrings' single backquotes
highlight_language = "text"
smartquotes = False  # a reader searches for a sentence as the program prints it
html_theme = "furo"
html_title = f"p2ptrain {version}"
html_copy_source = False
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": None}

LINK_UP = re.compile(r"\]\(((?:\.\./)+[^)\s]+)\)")


def file_behind(page: Path, link: str) -> str | None:
    """The path from the root of the repository, if `link` leads out of the documentation."""
    target = (page.parent / link.partition("#")[0]).resolve()
    return None if target.is_relative_to(DOCS) else target.relative_to(ROOT).as_posix()


def linked_files() -> set[str]:
    """Every file or folder outside the documentation that a page links to."""
    return {
        file
        for page in DOCS.rglob("*.md")
        for link in LINK_UP.findall(page.read_text(encoding="utf-8"))
        if (file := file_behind(page, link))
    }


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """Mark the links that lead to source files; add the navigation to the index."""
    page = Path(app.env.doc2path(docname))

    def marked(found: re.Match[str]) -> str:
        file = file_behind(page, found[1])
        return f"](source:{file})" if file else found[0]

    content[0] = LINK_UP.sub(marked, content[0])
    if docname == "index":
        content[0] += navigation(content[0])


def navigation(index: str) -> str:
    """A table of contents for each section of the index: the pages that its list links to."""
    tables = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^\s*\* \[([^\]]*)\]\(([\w/-]+)\.md\)", section, re.MULTILINE)
        if pages:
            options = f":hidden:\n:caption: {section.splitlines()[0]}\n"
            entries = "\n".join(f"{title} <{name}>" for title, name in pages)
            tables.append("\n```{toctree}\n" + options + "\n" + entries + "\n```\n")
    return "".join(tables)


def resolve_sources(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let marked links lead to the pages that show their files."""
    for reference in doctree.findall(nodes.reference):
        uri = reference.get("refuri", "")
        if uri.startswith("source:"):
            target = f"source/{uri.removeprefix('source:')}"
            reference["refuri"] = app.builder.get_relative_uri(docname, target)


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each linked file; of a folder, its list of files."""
    for name in sorted(linked_files()):
        path = ROOT / name
        if path.is_dir():
            files = "".join(f"<li>{escape(file.name)}</li>" for file in sorted(path.iterdir()))
            shown = f"<ul>{files}</ul>"
        else:
            lexer = find_lexer_class_for_filename(path.name)
            language = lexer.aliases[0] if lexer else "text"
            text = path.read_text(encoding="utf-8")
            shown = app.builder.highlighter.highlight_block(text, language, force=True)
        body = f"<h1>{escape(name)}</h1>\n{shown}"
        yield f"source/{name}", {"title": name, "body": body, "parents": []}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
    app.connect("doctree-resolved", resolve_sources)
    app.connect("html-collect-pages", source_pages)
