"""One peer's checkpoints in its folder: each is whole, or does not count.

::

    DIR/<peer>/00000012/           one checkpoint; larger numbers are newer
        model.safetensors          what the replica hands over (`compute/state.py`)
        peer.safetensors           vectors of the peer's other parts
        checkpoint.json            everything else; size and digest of the files beside it
    DIR/<peer>/00000013.partial/   one that is being written, or was when the process ended, or the
                                   room of the oldest one, into which the next one is written

A checkpoint is written into a folder that does not count, brought to the disk, and renamed: a crash
after any write leaves the ones before it as they were. A changed bit of any file is found before
anything of it is used, since `checkpoint.json` has digests of the other files and of itself.

When more than so many are whole, the oldest counts no more, and the model's file of the next one is
written over its own. New pages of a file cost a virtual machine several times what these cost: its
host may have taken back those of a removed file. So the folder has one more, until `tidy`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.poly1305 import Poly1305
from safetensors import SafetensorError
from safetensors.numpy import load

from p2ptrain.compute.replica import State
from p2ptrain.compute.tensor_file import Data, entry_of, write_entries
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.runtime.files import Files

FORMAT = "p2ptrain-checkpoint-1"
MODEL, VECTORS, DOCUMENT = "model.safetensors", "peer.safetensors", "checkpoint.json"
PARTIAL = ".partial"
PIECE = 1 << 20
"""Bytes that are read at a time for a digest."""
KEY = hashlib.sha256(FORMAT.encode()).digest()
"""Poly1305 has one. It is no secret: digests are against broken disks, not against people."""
DIGESTS: Mapping[str, Callable[[], Any]] = {  # Any: of two libraries
    "poly1305:": lambda: Poly1305(KEY),
    "sha256:": hashlib.sha256,
    "": lambda: hashlib.blake2b(digest_size=32),
}
"""By what is before a file's digest. Poly1305 takes a quarter of SHA-256's time and a tenth of that
of BLAKE2, of which the first checkpoints have digests. A change within 16 bytes always changes it:
by a number times a power of the key, modulo a prime. Of others one in some 2^100 does not
(Bernstein, The Poly1305-AES message-authentication code, FSE 2005, theorem 3.3)."""

Document = dict[str, Any]  # Any: whatever JSON can hold


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    number: int
    document: Document
    model: State
    vectors: Mapping[str, Any]  # Any: numpy arrays

    @property
    def updates(self) -> int:
        """Of its model."""
        return int(self.document["updates"])


class CheckpointFolder:
    """The checkpoints of one peer; used by one thread at a time."""

    def __init__(self, folder: Path, keep: int, files: Files) -> None:
        self.folder = folder
        self._keep = keep
        self._files = files

    def numbers(self) -> list[int]:
        """Of all that were finished, the newest first."""
        found = [name for name in self._files.names(self.folder) if name.isdecimal()]
        return sorted((int(name) for name in found if self._is_finished(name)), reverse=True)

    def _is_finished(self, name: str) -> bool:
        return DOCUMENT in self._files.names(self.folder / name)

    # --- writing ----------------------------------------------------------------------------------

    def begin(self, write_model: Callable[[Callable[[Data], None]], None]) -> Path:
        """Remove what is left of unfinished ones, and write the model's file of the next one.

        Returns its folder, for `finish`. Raises OSError.
        """
        partial = self._next()
        self.tidy(but=partial.name)
        there = self._files.names(partial)
        for name in {*there} - {MODEL}:
            self._files.remove(partial / name)
        write_to = self._files.overwrite if MODEL in there else self._files.create
        self._file = write_to(partial / MODEL)
        write_model(self._file.write)
        return partial

    def _next(self) -> Path:
        """The folder in which the next one is written."""
        number = max(self.numbers(), default=0) + 1
        return self.folder / f"{number:08}{PARTIAL}"

    def tidy(self, but: str = "") -> None:
        """Remove all that does not count, except for the folder of that name. Raises OSError."""
        for name in self._files.names(self.folder):
            is_whole = name.isdecimal() and self._is_finished(name)
            if name != but and not is_whole and name.removesuffix(PARTIAL).isdecimal():
                self._files.remove_folder(self.folder / name)

    def finish(self, partial: Path, document: Document, vectors: Mapping[str, Any]) -> int:
        """Write the rest of it; then it counts, and the oldest ones go. Returns its size in bytes.

        Raises:
            OSError: it does not count then, or the oldest ones are still there.
        """
        self._file.finish()
        rest = self._files.create(partial / VECTORS)
        write_entries({n: entry_of(array) for n, array in vectors.items()}, {}, rest.write)
        rest.finish()
        found = {name: self._files.read(partial / name) for name in (MODEL, VECTORS)}
        kind = _usual_digest()
        described = {n: [len(data), kind + _digest(data, kind)] for n, data in found.items()}
        text = encode({**document, "format": FORMAT, "files": described})
        last = self._files.create(partial / DOCUMENT)
        last.write(text)
        last.finish()
        self._files.rename(partial, partial.with_name(partial.name.removesuffix(PARTIAL)))
        too_old = self.numbers()[self._keep :]
        for number in too_old[1:]:
            self._remove(number)
        for number in too_old[:1]:
            folder = self.folder / f"{number:08}"
            self._files.remove(folder / DOCUMENT)  # from here on it does not count
            self._files.rename(folder, self._next())
        return len(text) + sum(len(data) for data in found.values())

    def forget_after(self, number: int) -> None:
        """Remove those that are newer: a run that goes on from this one is another future."""
        for newer in self.numbers():
            if newer > number:
                self._remove(newer)

    def _remove(self, number: int) -> None:
        folder = self.folder / f"{number:08}"
        self._files.remove(folder / DOCUMENT)  # from here on it does not count
        self._files.remove_folder(folder)

    # --- reading ----------------------------------------------------------------------------------

    def whole(self, damaged: Callable[[str], object]) -> Iterator[Checkpoint]:
        """Those that are whole, the newest first; of each other one a sentence for `damaged`."""
        for number in self.numbers():
            try:
                yield self.read(number)
            except (StateError, OSError) as error:
                where = self.folder / f"{number:08}"
                damaged(f"checkpoint {where} is damaged: {error}; the one before it is used")

    def documents(self, before: int) -> Iterator[Document]:
        """Those with smaller numbers whose document is as it was written, the newest first."""
        for number in self.numbers():
            if number < before:
                with suppress(StateError, OSError):
                    yield decode(bytes(self._files.read(self.folder / f"{number:08}" / DOCUMENT)))

    def read(self, number: int) -> Checkpoint:
        """One of them.

        Raises:
            StateError: if any bit of it is not as it was written.
            ConfigError: if its digests cannot be computed here.
            OSError: if it cannot be read.
        """
        folder = self.folder / f"{number:08}"
        document = decode(bytes(self._files.read(folder / DOCUMENT)))
        found = {}
        for name, (size, digest) in document["files"].items():
            found[name] = data = self._files.read(folder / name)
            kind = next(one for one in DIGESTS if digest.startswith(one))
            if len(data) != size or kind + _digest(data, kind) != digest:
                raise StateError(f"{name} is not what was written")
        try:
            vectors = load(bytes(found[VECTORS]))
        except SafetensorError as error:
            raise StateError(f"{VECTORS} cannot be read ({error})") from error
        return Checkpoint(number, document, found[MODEL], vectors)


def encode(document: Document) -> bytes:
    """The document with its own digest, as bytes that only it has."""
    text = json.dumps(document, sort_keys=True)
    return f'{{"digest": "{_digest(text.encode())}",\n"checkpoint": {text}}}\n'.encode()


def decode(data: bytes) -> Document:
    """The inverse. Raises StateError for bytes that `encode` has not given, or an older format."""
    try:
        document = json.loads(data)["checkpoint"]
        is_whole = encode(document) == data
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{DOCUMENT} is not what was written") from error
    if not is_whole or not isinstance(document, dict):
        raise StateError(f"{DOCUMENT} is not what was written")
    if document.get("format") != FORMAT:
        raise StateError(f"{DOCUMENT} is of format {document.get('format')!r}, not {FORMAT!r}")
    return document


def _usual_digest() -> str:
    """What new checkpoints have: there are builds of OpenSSL without Poly1305."""
    try:
        Poly1305(KEY)
    except UnsupportedAlgorithm:
        return "sha256:"
    return "poly1305:"


def _digest(data: State, kind: str = "") -> str:
    try:
        digest = DIGESTS[kind]()
    except UnsupportedAlgorithm as error:
        text = f"checkpoints here have digests of {kind.rstrip(':')}, which this build of OpenSSL"
        raise ConfigError(f"{text} lacks; install cryptography as a wheel") from error
    view = memoryview(data)
    for start in range(0, len(view), PIECE):
        digest.update(view[start : start + PIECE])
    value: bytes = digest.finalize() if kind == "poly1305:" else digest.digest()
    return value.hex()
