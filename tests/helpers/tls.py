"""Certificates, made as docs/by-hand.md says."""

import subprocess
from pathlib import Path

from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.tls import NAME

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_swarm(folder: Path, *, name: str = NAME, days: str = "2") -> GrpcConfig:
    """A CA and one certificate that it has signed, as docs/by-hand.md says."""
    folder.mkdir()
    ca, ca_key = str(folder / "swarm.pem"), str(folder / "swarm.key")
    cert, key, request = (str(folder / f"p01.{kind}") for kind in ("pem", "key", "csr"))
    extension = folder / "p01.ext"
    extension.write_text(f"subjectAltName=DNS:{name}\n")
    openssl("req", "-x509", *KEY, "-days", "2", "-subj", "/CN=swarm", "-keyout", ca_key, "-out", ca)
    openssl("req", *KEY, "-subj", "/CN=p01", "-keyout", key, "-out", request)
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", str(extension))
    openssl("x509", "-req", "-in", request, "-days", days, *signed, "-out", cert)
    return GrpcConfig(tls_cert=cert, tls_key=key, tls_ca=ca)
