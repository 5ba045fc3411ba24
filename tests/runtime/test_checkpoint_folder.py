"""A checkpoint is whole, or does not count."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from p2ptrain.errors import ConfigError, StateError
from p2ptrain.runtime import checkpoint_folder
from p2ptrain.runtime.checkpoint_folder import DIGESTS, CheckpointFolder, decode, encode
from p2ptrain.runtime.files import DiskFiles
from p2ptrain.runtime.state_owners import packed, unpacked
from p2ptrain.sim.files import Crashed, MemoryFiles

FOLDER = Path("/disk/p0")


def write(folder: CheckpointFolder, updates: int) -> int:
    partial = folder.begin(lambda write: write(bytes([updates % 256]) * 40))
    vectors = {"state/residual/left": np.full(3, updates, np.float32)}
    return folder.finish(partial, {"updates": updates, "state": {"x": updates / 3}}, vectors)


def newest(folder: CheckpointFolder, said: list[str] | None = None):
    return next(folder.whole((said if said is not None else []).append), None)


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path) -> CheckpointFolder:
    on_disk = request.param == "disk"
    files = DiskFiles() if on_disk else MemoryFiles()
    return CheckpointFolder(tmp_path / "p0" if on_disk else FOLDER, 3, files)


def test_a_checkpoint_comes_back_as_it_was_written(folder):
    assert newest(folder) is None
    for updates in (7, 8):
        write(folder, updates)
    found = newest(folder)
    assert found.updates == 8
    assert bytes(found.model) == bytes([8]) * 40
    assert found.vectors["state/residual/left"].tolist() == [8, 8, 8]
    assert found.document["state"] == {"x": 8 / 3}


def test_the_disk_holds_so_many_and_the_oldest_go(folder):
    sizes = [write(folder, updates) for updates in range(9)]
    assert [folder.read(n).updates for n in folder.numbers()] == [8, 7, 6]
    assert len(set(sizes)) <= 2


def test_the_next_model_is_written_over_the_oldest_one_which_counts_no_more(tmp_path):
    folder = CheckpointFolder(tmp_path / "p0", 2, DiskFiles())
    for updates in range(3):
        write(folder, updates)
    room = (tmp_path / "p0" / "00000004.partial" / "model.safetensors").stat().st_ino
    partial = folder.begin(lambda write: write(b"shorter"))
    folder.finish(partial, {"updates": 3}, {})
    assert (tmp_path / "p0" / "00000004" / "model.safetensors").stat().st_ino == room
    assert bytes(newest(folder).model) == b"shorter"


def test_a_copy_by_another_name_of_the_same_file_stays_as_it_was(tmp_path):
    folder = CheckpointFolder(tmp_path / "p0", 2, DiskFiles())
    write(folder, 1)
    copy = tmp_path / "copy"
    copy.hardlink_to(tmp_path / "p0" / "00000001" / "model.safetensors")
    for updates in range(2, 6):
        write(folder, updates)
    assert copy.read_bytes() == bytes([1]) * 40


@pytest.mark.parametrize("kind", DIGESTS)
def test_a_checkpoint_with_the_digests_of_earlier_versions_is_read(folder, kind, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_usual_digest", lambda: kind)
    write(folder, 5)
    monkeypatch.undo()
    assert folder.read(1).updates == 5


def test_where_openssl_has_no_poly1305_digests_are_of_sha256(folder, monkeypatch):
    def none(key):
        raise UnsupportedAlgorithm("poly1305 is not supported by this version of OpenSSL.")

    write(folder, 1)
    with monkeypatch.context() as without:
        without.setattr(checkpoint_folder, "Poly1305", none)
        with pytest.raises(ConfigError, match="poly1305, which this build of OpenSSL lacks"):
            next(folder.whole(print))
        assert checkpoint_folder._usual_digest() == "sha256:"
    assert checkpoint_folder._usual_digest() == "poly1305:"


def test_a_run_that_goes_on_from_an_older_one_forgets_the_newer_ones(folder):
    for updates in (1, 2, 3):
        write(folder, updates)
    folder.forget_after(folder.numbers()[-1])
    assert newest(folder).updates == 1


def changes_of_a_checkpoint() -> int:
    files = MemoryFiles()
    folder = CheckpointFolder(FOLDER, 2, files)
    for updates in range(4):  # the last one is written over the first one
        before = files.changes
        write(folder, updates)
    return files.changes - before


@pytest.mark.parametrize("change", range(1, changes_of_a_checkpoint() + 1))
def test_a_crash_after_any_change_of_the_disk_leaves_a_whole_one(change):
    files = MemoryFiles()
    folder = CheckpointFolder(FOLDER, 2, files)
    for updates in (0, 1, 2):
        write(folder, updates)
    files.crash_after = files.changes + change
    with pytest.raises(Crashed):
        write(folder, 3)
    files.crash(Random(change))
    said: list[str] = []
    again = CheckpointFolder(FOLDER, 2, files)
    assert newest(again, said).updates in (2, 3)
    assert not said, "an unfinished one is no damaged one"
    for updates in (4, 5, 6):
        write(again, updates)
    assert [again.read(n).updates for n in again.numbers()] == [6, 5]
    assert {p.name for p in spare(files)} == {"model.safetensors", "peer.safetensors"}
    again.tidy()
    assert len(files.contents) == 2 * 3, "nothing is left of the unfinished one"


def spare(files: MemoryFiles) -> list[Path]:
    """What is there and does not count."""
    return [path for path in files.contents if path.parent.name.endswith(".partial")]


def test_each_flipped_bit_is_found_and_the_one_before_is_used():
    files = MemoryFiles()
    folder = CheckpointFolder(FOLDER, 3, files)
    for updates in (1, 2):
        write(folder, updates)
    number = folder.numbers()[0]
    damaged = [path for path in files.contents if path.parent.name == f"{number:08}"]
    assert len(damaged) == 3
    for path in damaged:
        for bit in range(8 * len(files.contents[path])):
            files.contents[path][bit // 8] ^= 1 << bit % 8
            said: list[str] = []
            assert newest(folder, said).updates == 1, (path, bit)
            (sentence,) = said
            assert sentence.endswith("is not what was written; the one before it is used")
            files.contents[path][bit // 8] ^= 1 << bit % 8
    assert newest(folder).updates == 2


def test_a_file_that_is_missing_or_cut_is_damage_too():
    files = MemoryFiles()
    folder = CheckpointFolder(FOLDER, 3, files)
    for updates in (1, 2, 3):
        write(folder, updates)
    del files.contents[FOLDER / "00000003" / "peer.safetensors"]
    del files.contents[FOLDER / "00000002" / "model.safetensors"][10:]
    said: list[str] = []
    assert newest(folder, said).updates == 1
    assert len(said) == 2


def test_a_checkpoint_of_another_format_is_said(monkeypatch):
    data = json.dumps({"digest": "", "checkpoint": {}}).encode()
    with pytest.raises(StateError, match="not what was written"):
        decode(data)
    with pytest.raises(StateError, match="of format 'p2ptrain-checkpoint-9'"):
        decode(encode({"format": "p2ptrain-checkpoint-9"}))


def test_the_folders_of_a_first_checkpoint_are_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr("p2ptrain.runtime.files._sync_folder", synced.append)
    folder = CheckpointFolder(tmp_path / "all" / "p0", 3, DiskFiles())
    write(folder, 1)
    partial = tmp_path / "all" / "p0" / "00000001.partial"
    assert synced == [tmp_path, tmp_path / "all", partial, tmp_path / "all" / "p0"]
    write(folder, 2)
    assert len(synced) == 6, "later ones are in folders that are there"


def test_states_of_owners_come_back_in_kind():
    vectors: dict[str, np.ndarray] = {}
    state = {
        "counts": {1: "one", "two": 2},
        "tuple": (1, (2.5, None), [True]),
        "mask": b"\x00\xff",
        "vector": np.arange(3, dtype=np.uint32),
        "number": np.float32(0.5),
    }
    document = json.loads(json.dumps(packed(state, vectors, "state")))
    again = unpacked(document, vectors)
    assert again.pop("vector").tolist() == [0, 1, 2]
    del state["vector"]
    assert again == state
    with pytest.raises(StateError, match="state/x is a set, which a checkpoint cannot keep"):
        packed({"x": {1}}, {}, "state")
