"""Generate the protobuf code from `protos/` into a folder: `generate_protos.py FOLDER`."""

import sys
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos" / "p2ptrain" / "v1"


def generate(folder: Path) -> None:
    """Write `peer_pb2.py` and `peer_pb2.pyi` into `folder`."""
    arguments = ["protoc", f"-I{PROTOS}", f"--python_out={folder}", f"--pyi_out={folder}"]
    if protoc.main([*arguments, str(PROTOS / "peer.proto")]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
