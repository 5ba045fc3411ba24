"""What a user may write for a device: ``auto``, ``cpu``, or a kind of accelerator and its index.

Whether this machine has it is asked in `compute/devices.py`, which imports torch; this file does
not, so that a configuration can be read without it.
"""

from p2ptrain.errors import ConfigError

AUTO = "auto"
KINDS = ("cuda", "mps", "xpu")
"""Of accelerators, as torch names them; GPUs under ROCm are ``cuda`` as well."""


def parse_device(text: str) -> tuple[str, int | None]:
    """The kind, and the index if there is one.

    Raises:
        ConfigError: if `text` is none of the words above.
    """
    kind, colon, index = text.partition(":")
    known = (AUTO, "cpu", *KINDS)
    if kind not in known:
        raise ConfigError(
            f"device = {text!r}: there is no such kind; write one of {', '.join(known)}"
        )
    if not colon:
        return kind, None
    if kind not in KINDS or not (index.isascii() and index.isdecimal()) or len(index) > 4:
        raise ConfigError(
            f"device = {text!r}: write {kind} alone"
            if kind not in KINDS
            else f"device = {text!r}: after the colon stands an index, as in {kind}:0"
        )
    return kind, int(index)
