"""Fetch the consensus model of a running swarm (`p2ptrain export`)."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from p2ptrain.errors import CodecError, StateError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig


async def export_model(
    address: Address, file: Path, timeout_s: Seconds, network: GrpcConfig
) -> str:
    """Write the mean model to `file`, which is replaced in one piece; returns what was written.

    Raises:
        StateError: if the file cannot be written.
        TransportError, RefusedError, CodecError: if the peer does not answer, refuses us, or sends
            what is no model; `file` is as it was then.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        try:
            with partial.open("wb") as out:
                async with asking(address, network) as asker:
                    size = await asker.export(out.write, timeout_s)
            about = _about(partial, address)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"cannot write {file}: {error.strerror}") from error
    whose = about.get("mean_of", "").split()
    model = f"the mean model of {', '.join(whose)}" if len(whose) > 1 else "the model"
    return f"{model} after {about.get('samples', '?')} samples is in {file} ({size / 1e6:.1f} MB)"


def _about(file: Path, address: Address) -> dict[str, str]:
    """The metadata of a file of safetensors. Raises CodecError if it is none."""
    try:
        with safe_open(file, "np") as opened:
            about = opened.metadata() or {}
    except SafetensorError as error:
        raise CodecError(f"{address} sent what is no safetensors file ({error})") from error
    return {name: "".join(c if c.isprintable() else "?" for c in v) for name, v in about.items()}
