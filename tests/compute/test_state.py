"""States as bytes: the taker continues bit for bit, and a stranger's bytes change nothing."""

import json
import pickle
from random import Random

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from p2ptrain.compute.state import SMALLEST_ROOM
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Peer:
    def __init__(self, kind="adam", seed=0, dtype=torch.float32):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)
            ).to(dtype)
        self.dtype = dtype
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.replica = TorchReplica(self.model, self.optimizer)

    def train(self, steps):
        for step in range(steps):
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(inputs.to(self.dtype)).float().square().mean().backward()
            self.replica.update(self.optimizer.step)
        return self

    def everything(self):
        """All that may not change when a state is refused."""
        model = {k: v.tolist() for k, v in self.model.state_dict().items()}
        return repr((model, self.optimizer.state_dict(), self.replica.updates, self.snapshot()))

    def snapshot(self):
        into = np.empty(self.replica.model_size, np.float32)
        self.replica.snapshot(into)
        return into.tolist()


def forge(state, **changes):
    """A state whose metadata or tensors were changed by someone who knows the format."""
    state = bytes(state)
    tensors = safetensors.torch.load(state)
    header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
    document = json.loads(header["__metadata__"]["p2ptrain"])
    changes.get("document", lambda d: None)(document)
    changes.get("tensors", lambda t: None)(tensors)
    return safetensors.torch.save(tensors, {"p2ptrain": json.dumps(document)})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("taker_has_trained", [False, True])
def test_two_replicas_continue_bit_identically(kind, taker_has_trained):
    giver = Peer(kind, seed=1).train(3)
    taker = Peer(kind, seed=2).train(2 * taker_has_trained)
    taker.replica.import_state(giver.replica.export_state())
    assert taker.replica.updates == 3
    assert giver.train(4).everything() == taker.train(4).everything()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_continue_bit_identically(dtype):
    giver, taker = Peer("momentum", 1, dtype).train(3), Peer("momentum", 2, dtype)
    taker.replica.import_state(giver.replica.export_state())
    assert giver.train(2).everything() == taker.train(2).everything()


def test_pending_goes_along_and_the_takers_own_is_given_up():
    giver, taker = Peer(seed=1), Peer(seed=2)
    giver.replica.add_delta(np.ones(giver.replica.model_size, np.float32))
    taker.replica.add_delta(np.full(giver.replica.model_size, 9, np.float32))
    taker.replica.import_state(giver.replica.export_state())
    assert taker.snapshot() == giver.snapshot()
    giver.replica.settle()
    taker.replica.settle()
    assert taker.everything() == giver.everything()


def test_the_module_is_still_made_of_views_after_an_import():
    giver, taker = Peer(seed=1).train(1), Peer(seed=2)
    taker.replica.import_state(giver.replica.export_state())
    taker.replica.settle()  # checks
    assert torch.equal(taker.model[0].weight, giver.model[0].weight)


def test_the_learning_rate_is_taken_over_and_how_to_compute_is_not():
    giver, taker = Peer("momentum"), Peer("momentum")
    giver.optimizer.param_groups[0].update(lr=0.5, foreach=True)
    taker.optimizer.param_groups[0].update(foreach=False, initial_lr=0.1)
    taker.replica.import_state(giver.replica.export_state())
    group = taker.optimizer.param_groups[0]
    assert (group["lr"], group["foreach"], group["initial_lr"]) == (0.5, False, 0.1)


def test_a_state_is_safetensors_that_others_can_read():
    tensors = safetensors.torch.load(bytes(Peer().train(1).replica.export_state()))
    assert {"model/0.weight", "local/1.num_batches_tracked"} < tensors.keys()


def refuse(taker, state, words):
    before = taker.everything()
    with pytest.raises(StateError, match=words) as refusal:
        taker.replica.import_state(state)
    assert "\n" not in str(refusal.value)
    assert taker.everything() == before


def test_another_model_is_refused_and_both_digests_are_named():
    other = nn.Linear(2, 2)
    replica = TorchReplica(other, torch.optim.Adam(other.parameters()))
    taker = Peer()
    words = f"{replica.fingerprint}.*{taker.replica.fingerprint}"
    refuse(taker, replica.export_state(), words)


def test_another_optimizer_is_refused_and_both_are_named():
    refuse(Peer("sgd"), Peer("adam").replica.export_state(), "'Adam'.*'SGD'")


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        b"hello, this is no state at all",
        pickle.dumps({"a": 1}),
        safetensors.torch.save({"a": torch.zeros(2)}),
        safetensors.torch.save({}, {"p2ptrain": "[]"}),
        safetensors.torch.save({}, {"p2ptrain": "[" * 100_000}),
        safetensors.torch.save({}, {"p2ptrain": '{"format": "p2ptrain-state-3"}'}),
    ],
)
def test_bytes_that_are_no_state_change_nothing(junk):
    refuse(Peer().train(1), junk, "these bytes are no replica's state|does not fit")


def deep(document):
    value = 0
    for _ in range(330):
        value = {"list": [value]}
    document["optimizers"][0]["groups"] = value


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("updates is -1", lambda d: d.update(updates=-1)),
        ("updates is True", lambda d: d.update(updates=True)),
        ("version is -1", lambda d: d.update(version=-1)),
        ("version is None", lambda d: d.update(version=None)),
        ("no optimizer", lambda d: d.update(optimizers=None)),
        ("optimizer", lambda d: d["optimizers"][0].update(groups={"list": []})),
        ("decoded", lambda d: d["optimizers"][0].update(groups={"pickle": "x"})),
        ("decoded", lambda d: d["optimizers"][0].update(state={"dict": [["a"]]})),
        ("no mapping", lambda d: d["optimizers"][0].update(state=3)),
        ("parameter 99", lambda d: d["optimizers"][0].update(state={"dict": [[99, {"dict": []}]]})),
        ("not there", lambda d: d["optimizers"][0].update(state={"tensor": "model/0.weight"})),
        ("groups|nested", deep),
    ],
)
def test_forged_metadata_changes_nothing(words, change):
    refuse(Peer().train(1), forge(Peer().train(1).replica.export_state(), document=change), words)


def set_lr(value):
    def change(document):
        (group,) = document["optimizers"][0]["groups"]["list"]
        for pair in group["dict"]:
            if pair[0] == "lr":
                pair[1] = value

    return change


@pytest.mark.parametrize("value", ["fast", None.__class__.__name__, float("nan"), True])
def test_a_forged_learning_rate_changes_nothing(value):
    state = forge(Peer().replica.export_state(), document=set_lr(value))
    refuse(Peer(), state, "lr is .* there and 0.01 here")


FIRST_MOMENT = "optimizer/0/state/0/exp_avg"
EIGHT_BITS = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("lacks the tensor 'model/0.weight'", lambda t: t.pop("model/0.weight")),
        ("lacks the tensor 'local", lambda t: t.pop("local/1.num_batches_tracked")),
        ("unknown tensor 'stowaway'", lambda t: t.update(stowaway=torch.zeros(1))),
        ("float64", lambda t: t.update({"model/0.weight": t["model/0.weight"].double()})),
        (r"shape \(12,\)", lambda t: t.update({"model/0.weight": torch.zeros(12)})),
        ("not finite", lambda t: t["model/0.weight"].fill_(torch.nan)),
        ("not finite", lambda t: t[FIRST_MOMENT].fill_(torch.inf)),
        ("shape", lambda t: t.update({FIRST_MOMENT: torch.zeros(5, 5)})),
        ("shape", lambda t: t.update(pending=torch.zeros(3))),
        ("cannot compute", lambda t: t.update({FIRST_MOMENT: t[FIRST_MOMENT].to(EIGHT_BITS)})),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_forged_tensors_change_nothing(words, change, steps):
    state = forge(Peer().train(1).replica.export_state(), tensors=change)
    refuse(Peer().train(steps), state, words)


def test_state_that_lacks_what_ours_has_changes_nothing():
    def rename(document):
        ((_, entry), *_) = document["optimizers"][0]["state"]["dict"]
        entry["dict"][1][0] = "exp_avq"

    state = forge(Peer().train(1).replica.export_state(), document=rename)
    refuse(Peer().train(1), state, "state of parameter 0 lacks exp_avg")


@pytest.mark.parametrize("when", ["pre", "post"])
def test_an_optimizer_that_refuses_its_state_changes_nothing(when):
    taker = Peer(seed=2).train(1)

    def dislike(*_):
        raise ValueError("I do not like it")

    getattr(taker.optimizer, f"register_load_state_dict_{when}_hook")(dislike)
    refuse(taker, Peer(seed=1).train(2).replica.export_state(), "refuses it: I do not like it")


def test_a_replica_whose_storage_was_replaced_takes_nothing_over():
    taker = Peer(seed=2)
    taker.model[2].bias.data = taker.model[2].bias.data.clone()
    refuse(taker, Peer(seed=1).replica.export_state(), "2[.]bias was replaced")


def test_a_disk_that_fills_up_is_named(monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2ptrain.compute.state.write_entries", no_room)
    with pytest.raises(StateError, match=r"cannot be kept in .*No space left"):
        Peer().replica.export_state()


def test_a_state_is_written_from_where_its_numbers_are():
    peer, pieces = Peer("momentum").train(1), []
    peer.replica.add_delta(np.ones(peer.replica.model_size, np.float32))
    peer.replica.write_state(pieces.append, lambda: None)
    written = {np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces}
    momenta = [entry["momentum_buffer"] for entry in peer.optimizer.state.values()]
    assert {one.data_ptr() for one in (*peer.model.parameters(), *momenta)} <= written
    assert max(len(piece) for piece in pieces[1:]) == 4 * peer.replica.model_size  # pending


def test_an_optimizer_takes_another_ones_state_into_the_memory_of_its_own():
    giver, taker = Peer(seed=1).train(2), Peer().train(1)
    memory = [entry["exp_avg"].data_ptr() for entry in taker.optimizer.state.values()]
    taker.replica.import_state(giver.replica.export_state())
    taken = list(taker.optimizer.state.values())
    assert [entry["exp_avg"].data_ptr() for entry in taken] == memory
    theirs = list(giver.optimizer.state.values())
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(taken, theirs, strict=True))


def test_numbers_of_any_width_stand_where_a_library_can_read_them_in_place():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.short = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.long = nn.Parameter(torch.full((2,), 2.0))
            self.register_buffer("count", torch.tensor(7))

    model = Mixed()
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = bytes(replica.export_state())
    header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
    starts = {name: one["data_offsets"][0] for name, one in header.items() if "/" in name}
    assert starts == {"local/count": 0, "model/long": 8, "model/short": 16}
    assert safetensors.torch.load(state)["model/short"].tolist() == [1, 1, 1]


def test_a_disk_without_room_is_named_and_changes_nothing(monkeypatch):
    def no_room():
        raise OSError(28, "No space left on device")

    giver, taker = Peer(seed=1).train(1), Peer()
    given = giver.replica.export_state()
    monkeypatch.setattr("tempfile.TemporaryDirectory", no_room)
    refuse(taker, given, "cannot be kept in .*No space left.*make room there, or name another")
    with pytest.raises(StateError, match="cannot be kept"):
        giver.replica.export_state()


def test_damaged_bytes_are_refused_or_taken_whole():
    state = Peer().train(1).replica.export_state()
    rng = Random(1)
    taker = Peer(seed=2)
    for _ in range(300):
        damaged = bytearray(state)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(rng.choice([8, 2_000, len(state)]))] = rng.randrange(256)
        cut = len(state) if rng.random() < 0.7 else rng.randrange(len(state))
        before = taker.everything()
        try:
            taker.replica.import_state(bytes(damaged[:cut]))
        except StateError:
            assert taker.everything() == before


def test_an_optimizer_that_holds_what_cannot_travel_is_refused_on_export():
    peer = Peer()
    peer.optimizer.state[peer.model[0].weight]["secret"] = object()
    with pytest.raises(StateError, match="secret is a object"):
        peer.replica.export_state()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_state_is_longer_than_an_untrained_replica_believes(kind):
    trained = Peer(kind).train(3)
    trained.replica.add_delta(np.ones(trained.replica.model_size, np.float32))
    assert len(trained.replica.export_state()) <= Peer(kind).replica.most_state_bytes


def test_what_a_replica_believes_follows_from_its_model_frozen_parameters_included():
    def most(module: nn.Module) -> int:
        trainable = [one for one in module.parameters() if one.requires_grad]
        return TorchReplica(module, torch.optim.SGD(trainable, 0.1)).most_state_bytes

    body, head = nn.Linear(1000, 1000), nn.Linear(1000, 10)
    small = most(head)
    assert small < 2 * SMALLEST_ROOM
    frozen = most(nn.Sequential(body.requires_grad_(requires_grad=False), head))
    assert 4_000_000 <= frozen - small < 4_100_000


def test_a_bare_state_leaves_the_optimizer_of_its_taker_as_it_was():
    giver, taker = Peer(seed=1).train(3), Peer(seed=2).train(1)
    own = repr(taker.optimizer.state_dict())
    bare = giver.replica.export_state(whole=False, bare=True)
    assert "it was asked for without" in taker.replica.import_state(bare, whole=False)
    assert repr(taker.optimizer.state_dict()) == own
    assert taker.snapshot() == giver.snapshot()
    assert len(bare) < len(giver.replica.export_state())
