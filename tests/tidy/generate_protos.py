"""Generate the protobuf code from `protos/` into a folder: `generate_protos.py FOLDER`.

Generated code runs on the protobuf that its compiler belongs to and on newer ones, never on older
ones. So the compiler is an old one, pinned in pyproject.toml, however new the protobuf here is.
"""

import re
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos" / "p2ptrain" / "v1"
PROTOC = Path(sys.executable).parent / "protoc"


def generate(folder: Path) -> None:
    """Write the code of every proto, and its stub, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [f"-I{PROTOS}", f"--python_out={folder}", f"--pyi_out={folder}"]
    protos = sorted(PROTOS.glob("*.proto"))
    subprocess.run([str(PROTOC), *arguments, *map(str, protos)], check=True)
    for proto in protos:
        stub = folder / f"{proto.stem}_pb2.pyi"
        stub.write_text(_with_names_apart(stub.read_text()))


def _with_names_apart(stub: str) -> str:
    """A message with a field `self`: this compiler calls the instance so, too."""
    return re.sub(r"(def __init__\(self)(, (?:.*, )?self:)", r"\1_\2", stub)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
