"""Write the reference pages that follow from the code: `generate_reference_pages.py FOLDER`.

`settings.md` lists every field of the configuration dataclasses with its default, its unit and the
text beneath it. `errors.md` lists every sentence that peers and lab raise, as its source has it.
`records.md` lists the kinds of records, from the docstring of `runtime/metrics.py`.
"""

import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Collection, Iterator
from pathlib import Path

import p2ptrain
from p2ptrain.config import RunConfig
from p2ptrain.documented import default_of, texts_of
from p2ptrain.runtime import metrics
from p2ptrain.runtime.settings import PeerConfig

ROOT = Path(p2ptrain.__file__).parents[1]

UNITS = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_kib": "KiB",
    "_bytes": "bytes",
    "_mbit": "Mbit/s",
}
"""By the end of a field's name."""

RAISED = ("ConfigError", "RefusedError", "StateError", "LocalProtocolError", "TransportError")

MADE_BEFORE = {
    "p2ptrain/runtime/admission.py": "RefusedError",
    "p2ptrain/runtime/lifecycle.py": "TransportError",
    "p2ptrain/compute/contract.py": "RefusedError",
    "p2ptrain/compute/coverage.py": "StateError",
    "launcher/lab.py": "ConfigError",
}
"""Files whose functions return a sentence, or name it ``text`` or ``why``, for a later error."""


# --- settings -------------------------------------------------------------------------------------

SETTINGS = """\
# Settings

Made from the dataclasses by `make reference-pages`. In a program the settings of a peer are
keyword arguments of [`Peer`](api.md), and so are its tables (`stop`, `protocol`, `exchange`,
`network`); in a file for `p2ptrain peer --config FILE` each section is a TOML table. A value of
another type, an unknown name and a relation that cannot work are refused at the start, in one
sentence.

```python
p2ptrain.Peer(model, optimizer, algorithm="ad_psgd", stop=p2ptrain.StopConfig(samples=100_000))
```

```toml
algorithm = "ad_psgd"

[stop]
samples = 100_000
```

The options of an algorithm are on [its own page](../choosing.md), those of a task are on [the
page of tasks](../tasks.md)."""


def settings_page() -> str:
    """Every table of `PeerConfig`, then what `RunConfig` adds."""
    of_a_peer = [field.name for field in dataclasses.fields(PeerConfig)]
    return "\n".join(
        [
            SETTINGS,
            "## A peer\n",
            *_tables(PeerConfig, ""),
            "## The task of `p2ptrain peer`\n\nNot in a program, which has a loop of its own.\n",
            *_tables(RunConfig, "", but=of_a_peer),
        ]
    )


def _tables(kind: type, table: str, but: Collection[str] = ()) -> Iterator[str]:
    """The fields of a dataclass, then a section for each field that is a dataclass itself."""
    texts, hints = texts_of(kind), typing.get_type_hints(kind)
    yield "| setting | default | unit | |\n|---|---|---|---|"
    nested: list[tuple[type, str, bool]] = []
    for field in dataclasses.fields(kind):
        inner, many = _dataclass_in(hints[field.name])
        if field.name in but:
            continue
        if inner:
            nested.append((inner, f"{table}.{field.name}".lstrip("."), many))
            continue
        text = cell(texts.get(field.name, ""))
        yield f"| `{field.name}` | `{default_of(field)}` | {_unit(field.name)} | {text} |"
    yield ""
    for inner, name, many in nested:
        yield f"## `[[{name}]]`\n" if many else f"## `[{name}]`\n"
        yield from _tables(inner, name)


def _dataclass_in(hint: object) -> tuple[type | None, bool]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, False
    found = [part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)]
    return (found[0] if found else None), bool(found)


def _unit(name: str) -> str:
    endings = [unit for ending, unit in UNITS.items() if name.endswith(ending)]
    return endings[0] if endings else {"seconds": "seconds", "samples": "samples"}.get(name, "")


# --- errors ---------------------------------------------------------------------------------------

ERRORS = """\
# Every error sentence

Made from the code by `make reference-pages`; `…` stands for a value. Search this page for a part
of your message that is not a value. The sentence itself names the remedy;
[troubleshooting](../troubleshooting.md) goes further for the frequent ones.

On a command line such a sentence ends the process with [exit code
2](../training-loops.md#how-a-program-ends). In a program it is an exception: the class is in the
second column ([the tree](api.md#errors))."""


def errors_page() -> str:
    """Every sentence, by the folder of the package that raises it."""
    by_folder: dict[str, dict[str, tuple[str, str]]] = {}
    for package, others in (("p2ptrain", "command line and configuration"), ("launcher", "")):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT)
            inner = file.parts[1] if len(file.parts) > 2 else others
            folder = inner if package == "p2ptrain" else "p2plab"
            for kind, sentence in sentences_of(path):
                by_folder.setdefault(folder, {}).setdefault(sentence, (kind, file.as_posix()))
    parts = [ERRORS]
    for folder, found in by_folder.items():
        parts.append(f"## {folder}\n\n| sentence | class | raised in |\n|---|---|---|")
        parts += [
            f"| {cell(sentence)} | `{kind}` | [`{file.partition('/')[2]}`](../../{file}) |"
            for sentence, (kind, file) in sorted(found.items())
        ]
        parts.append("")
    return "\n".join(parts)


def sentences_of(path: Path) -> Iterator[tuple[str, str]]:
    """The class and the sentence of each error that a file raises; `…` for what it fills in."""
    file = path.relative_to(ROOT)
    if "sim" in file.parts:
        return
    later = MADE_BEFORE.get(file.as_posix(), "")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[text, *_]) if kind in RAISED:
                sentence = _text_of(text)
            case ast.Return(value=ast.expr() as text) if later:
                kind, sentence = later, _text_of(text)
            case ast.Assign(targets=[ast.Name(id="text" | "why")], value=text) if later:
                kind, sentence = later, _text_of(text)
            case _:
                continue
        if re.search(r"\w{4}", sentence) and not sentence.startswith(":"):
            yield kind, sentence


def _text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(text.split("\n"))
        case ast.JoinedStr(values=parts):
            return re.sub("(… ?)+…", "…", "".join(map(_text_of, parts)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text_of(left) + _text_of(right)
        case _:
            return "…"


# --- records --------------------------------------------------------------------------------------

RECORDS = """\
# Records

Made from [`runtime/metrics.py`](../../p2ptrain/runtime/metrics.py) by `make reference-pages`.
With `out` (`--out DIR`) a peer writes one JSON object per line to `DIR/<name>.jsonl`. The tables,
pictures and reports of the lab are derived from these files. Every record has `kind` and `t`:
seconds on the clock of the peer, which is monotonic, or virtual in the simulator.

| kind | |
|---|---|
"""


def records_page() -> str:
    """One row per kind."""
    text = metrics.__doc__ or ""
    found = re.findall(r"^``(\w+)``( .*(?:\n  .*)*)", text, re.MULTILINE)
    return RECORDS + "".join(f"| `{kind}` | {cell(what)} |\n" for kind, what in found)


def cell(text: str) -> str:
    """One line, Markdown, that does not end a cell of a table."""
    line = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    return line.replace("<", "&lt;") if "`" not in line else line


def generate(folder: Path) -> None:
    """Write all pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"settings": settings_page(), "errors": errors_page(), "records": records_page()}
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
