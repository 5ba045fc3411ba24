"""Messages to bytes and back; hostile bytes decode to something valid or raise `CodecError`."""

import dataclasses
import tracemalloc
import typing
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.core import messages as m
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.data_ledger import DataPlan, EpochCount, Share
from p2ptrain.core.links import MAX_MBIT, WHOLE
from p2ptrain.core.purpose import MOST_FRAGMENTS, Formation, Purpose, What
from p2ptrain.core.roster import ACCUSERS, size_of
from p2ptrain.errors import CodecError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net import wire, wire_members, wire_parts
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire import AverageOpening, Chunk, Envelope, Hello, JoinReply, StateOpening
from p2ptrain.net.wire_members import member_to_pb
from p2ptrain.net.wire_parts import varint

MESSAGES = typing.get_args(m.AnyMessage)
AB = m.Begin(Ticket(PeerId("a"), 1, 1), (PeerId("a"), PeerId("b")))

visible = st.characters(codec="utf-8").filter(lambda c: c.isprintable() and c != " ")
names = st.text(visible, min_size=1, max_size=wire.MAX_NAME).map(PeerId)
texts = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=40)
numbers = st.one_of(st.integers(0, 300), st.integers(0, wire.MAX_NUMBER))
addresses = st.builds(
    lambda host, port: Address(f"{host}:{port}"),
    st.sampled_from(["127.0.0.1", "[::1]", "peer-3.example", "sim", "unix"]),
    st.integers(1, 65535),
)
tickets = st.builds(Ticket, names, numbers, numbers, numbers)
lineages = st.integers(0, 2**64 - 1)
versions = st.integers(0, 2**32 - 1)
digests = st.text("0123456789abcdef", max_size=16)
groups = st.lists(names, min_size=1, max_size=8, unique=True).map(lambda g: tuple(sorted(g)))
members = st.builds(
    m.Member,
    peer=names,
    address=addresses,
    incarnation=numbers,
    state=st.sampled_from(m.MemberState),
    beat=numbers,
    phase=st.sampled_from(m.Phase),
    steps=numbers,
    samples=numbers,
    link_mbit=st.integers(0, MAX_MBIT),
    resumes=versions,
    resumes_before=st.lists(versions, max_size=m.MOST_BEFORE).map(tuple),
).flatmap(
    lambda member: (
        groups.map(lambda names: dataclasses.replace(member, accusers=names[:ACCUSERS]))
        if member.state is m.MemberState.SUSPECT
        else st.just(member)
    )
)
purposes = st.builds(
    Purpose,
    st.sampled_from(Formation),
    st.sampled_from(What),
    version=numbers,
    lineage=lineages,
    epoch=numbers,
).flatmap(
    lambda purpose: st.integers(1, MOST_FRAGMENTS).flatmap(
        lambda parts: st.integers(0, parts - 1).map(
            lambda part: dataclasses.replace(purpose, fragment=part, fragments=parts)
        )
    )
)
contributions = st.builds(
    Contribution,
    weight=st.integers(0, wire_parts.MAX_WEIGHT),
    usual=st.integers(0, wire_parts.MAX_WEIGHT),
    samples=numbers,
    wants_to_end=st.booleans(),
    gradient_mask=st.binary(max_size=40),
    rule=lineages,
    progress=numbers,
    history=lineages,
    outer_steps=numbers,
    speed=numbers,
    wants_checkpoint=st.booleans(),
    writes_checkpoint=st.booleans(),
)


def of_each(group: tuple[PeerId, ...], values: st.SearchStrategy) -> st.SearchStrategy:
    """One of each member, or none."""
    size = len(group)
    return st.just(()) | st.lists(values, min_size=size, max_size=size).map(tuple)


begins = groups.flatmap(
    lambda group: st.builds(
        m.Begin,
        tickets,
        st.just(group),
        of_each(group, st.integers(1, WHOLE)),
        purposes,
        of_each(group, contributions),
        numbers,
        st.none() | tickets,
    )
)
FIELDS: dict[str, st.SearchStrategy] = {
    "number": numbers,
    "born": numbers,
    "purpose": purposes,
    "contribution": contributions,
    "offer": tickets,
    "version": numbers,
    "lineage": lineages,
    "ticket": tickets,
    "reason": st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=300),
    "donor": names,
    "waits": st.booleans(),
    "target": names,
    "answered": st.booleans(),
    "phase": st.sampled_from(m.AttemptPhase),
    "asks": st.booleans(),
    "adopt": st.booleans(),
    "again": numbers,
    "kind": st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=32),
    "numbers": st.lists(numbers, max_size=64).map(tuple),
    "peers": st.lists(names, max_size=8).map(tuple),
    "epoch": numbers,
    "text": st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=2000),
    "by": names,
    "why": st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=300),
}


PLAN = DataPlan(samples=1000, part_size=16, seed=2**64 - 1)
shares = st.integers(0, 15).flatmap(
    lambda start: st.builds(
        Share,
        numbers,
        st.integers(0, PLAN.parts),
        names,
        numbers,
        numbers,
        st.just(start),
        st.integers(start, 16),
        st.booleans(),
    )
)
counts = st.integers(0, 1000).map(lambda again: (1000 - again, again, 1000 + again))
ledger_updates = st.builds(
    m.LedgerUpdate,
    st.just(PLAN),
    numbers,
    st.lists(shares, max_size=4).map(tuple),
    st.lists(st.builds(lambda e, c: EpochCount(e, 0, *c), numbers, counts), max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
)


def instances(kind: type) -> st.SearchStrategy:
    """Any value of one kind of message; `members` are records in some and names in others."""
    if kind is m.LedgerUpdate:
        return ledger_updates
    if kind is m.Begin:
        return begins
    records = kind in (m.Ping, m.Ack, m.IndirectAck, m.MembershipUpdates)
    lists = st.lists(members, max_size=4).map(tuple) if records else groups
    known = FIELDS | {"members": lists}
    fields = [field.name for field in dataclasses.fields(kind)]
    some = st.builds(kind, **{name: known[name] for name in fields})
    if "offer" in fields:  # nothing is stated without it
        some |= some.map(lambda one: dataclasses.replace(one, offer=None, contribution=MODEL))
    return some


envelopes = st.builds(Envelope, names, digests, st.one_of(*map(instances, MESSAGES)), numbers)
hellos = st.builds(
    Hello,
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.sampled_from(["ad_psgd", "mine.module:Class"]),
    digests,
    numbers,
    members,
    st.dictionaries(texts, texts, max_size=4),
    st.dictionaries(texts, texts, max_size=4),
    st.lists(texts, max_size=4).map(tuple),
    texts,
)
join_replies = st.builds(
    JoinReply,
    st.sampled_from(["", "you run another model"]),
    st.lists(members, max_size=4).map(tuple),
    st.none() | instances(m.SettingsChange),
)
openings = st.one_of(
    st.builds(AverageOpening, digests, names, tickets, numbers, numbers, digests, digests),
    st.builds(StateOpening, digests, names, st.none() | numbers, lineages, bare=st.booleans()),
)

DECODERS = {
    "envelope": wire.decode_envelope,
    "hello": wire.decode_hello,
    "welcome": wire.decode_join_reply,
    "chunk": wire.decode_chunk,
}


def decode_anything(data: bytes) -> None:
    """Whatever the method, bytes decode or are refused in words; nothing else may come out."""
    for decode in DECODERS.values():
        with suppress(CodecError):
            decode(data)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind, data):
    envelope = Envelope(data.draw(names), data.draw(digests), data.draw(instances(kind)))
    assert wire.decode_envelope(wire.encode_envelope(envelope)) == envelope


@given(hellos)
def test_a_hello_comes_back_as_it_was(hello):
    assert wire.decode_hello(wire.encode_hello(hello)) == hello


@given(join_replies)
def test_a_join_reply_comes_back_as_it_was(reply):
    assert wire.decode_join_reply(wire.encode_join_reply(reply)) == reply


@given(openings)
def test_an_opening_comes_back_as_it_was(opening):
    content = Chunk(opening=opening)
    assert wire.decode_chunk(wire.encode_chunk(content)) == content


def test_every_message_of_the_protocol_has_a_decoder():
    field = pb.Envelope.DESCRIPTOR.oneofs_by_name["message"].fields
    assert {f.name for f in field} == set(wire._FROM_PB)
    assert len(MESSAGES) == len(wire._FROM_PB)


def sent(message: m.Message) -> m.Message:
    """As it arrives."""
    return wire.decode_envelope(wire.encode_envelope(Envelope(PeerId("a"), "", message))).message


def test_a_long_reason_is_cut_on_its_way_out():
    message = sent(m.Failed(Ticket(PeerId("a"), 1, 1), "x" * 10_000))
    assert isinstance(message, m.Failed)
    assert message.reason == "x" * wire.MAX_REASON


def test_what_is_said_to_each_member_differs_only_in_its_offer():
    """The rest is encoded and decoded once for all; one must not be told another's offer."""
    ticket, group = Ticket(PeerId("a"), 1, 1), (PeerId("a"), PeerId("b"), PeerId("c"))
    begin = m.Begin(ticket, group, (1, 2, 3), contributions=(Contribution(weight=5), MODEL, MODEL))
    told = [
        dataclasses.replace(begin, offer=Ticket(PeerId("b"), 1, 7)),
        begin,
        dataclasses.replace(begin, offer=Ticket(PeerId("c"), 2, 9)),
    ]
    assert [sent(one) for one in told] == told


def test_a_gradient_mask_of_the_largest_model_comes_back_as_it_was():
    mask = bytes(range(256)) * (wire_parts.MAX_MASK_BYTES // 256)
    grant = m.Grant(
        Ticket(PeerId("a"), 1, 1), Contribution(weight=wire_parts.MAX_WEIGHT, gradient_mask=mask)
    )
    assert sent(grant) == grant


def test_what_states_nothing_states_what_a_member_that_averages_models_does():
    """One without an offer has no contribution on the wire at all."""
    for message in (m.Arrive(3, 7), m.Activate(3, waits=True)):
        data = wire.encode_envelope(Envelope(PeerId("a"), "", message))
        packed = pb.Envelope.FromString(data)
        body = getattr(packed, packed.WhichOneof("message"))
        assert not body.HasField("contribution")
        assert not body.HasField("offer")
        decoded = sent(message)
        assert isinstance(decoded, m.Arrive | m.Activate)
        assert decoded.contribution == MODEL


def test_a_refusal_keeps_no_control_characters():
    reply = JoinReply("no\x1b[31m\nreally", ())
    assert wire.decode_join_reply(wire.encode_join_reply(reply)).refusal == "no?[31m?really"


# --- hostile bytes --------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x0a")
@example(b"\x0a\xff\xff\xff\xff\xff\xff")
@example(b"\x0b" * 150)
def test_random_bytes_decode_or_are_refused(data):
    decode_anything(data)


encoded = st.one_of(
    envelopes.map(wire.encode_envelope),
    hellos.map(wire.encode_hello),
    join_replies.map(wire.encode_join_reply),
    openings.map(lambda opening: wire.encode_chunk(Chunk(opening=opening))),
)


@given(encoded, st.data())
def test_a_truncated_message_decodes_or_is_refused(data, draw):
    decode_anything(data[: draw.draw(st.integers(0, len(data)))])


@given(encoded, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8))
def test_a_mutated_message_decodes_or_is_refused(data, changes):
    mutated = bytearray(data)
    for place, value in changes:
        if mutated:
            mutated[place % len(mutated)] = value
    decode_anything(bytes(mutated))


@given(encoded, encoded)
def test_two_messages_run_together_decode_or_are_refused(one, other):
    decode_anything(one + other)


hostile_text = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "\x00", "x" * 100_000, "host:" + "9" * 5_000, "٣:٣", "a:1\n", ":1"]),
)
hostile_numbers = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**64 - 1, 2**62 + 1]))


@given(st.data())
def test_valid_protobuf_with_hostile_values_decodes_or_is_refused(data):
    def text():
        return data.draw(hostile_text)

    def number():
        return data.draw(hostile_numbers)

    member = pb.Member(
        peer=text(),
        address=text(),
        incarnation=number(),
        state=data.draw(st.integers(-(2**31), 2**31 - 1)),
        phase=data.draw(st.integers(-(2**31), 2**31 - 1)),
        steps=number(),
        link_mbit=data.draw(st.integers(0, 2**32 - 1)),
        resumes=data.draw(versions),
        resumes_before=data.draw(st.lists(versions, max_size=99)),
        accusers=[text() for _ in range(9)],
    )
    ticket = pb.Ticket(initiator=text(), incarnation=number(), number=number())
    purpose = pb.Purpose(
        formation=data.draw(st.integers(-(2**31), 2**31 - 1)),
        what=data.draw(st.integers(-(2**31), 2**31 - 1)),
        version=number(),
        lineage=number(),
    )
    stated = pb.Contribution(
        weight=number(),
        usual=number(),
        samples=number(),
        gradient_mask=data.draw(st.binary()),
        speed=number(),
    )
    formed = pb.Formed(
        ticket=ticket,
        members=[text(), text()],
        weights=[data.draw(st.integers(0, 2**32 - 1))] * 2,
        purpose=purpose,
        contributions=[stated] * data.draw(st.integers(0, 3)),
        outside_samples=number(),
    )
    for packed in (
        pb.Envelope(source=text(), ping=pb.Ping(members=[member])),
        pb.Envelope(source="a", membership_updates=pb.MembershipUpdates(members=[member])),
        pb.Envelope(source="a", indirect_ping=pb.IndirectPing(number=number(), target=text())),
        pb.Envelope(source="a", indirect_ack=pb.IndirectAck(target=text(), members=[member])),
        pb.Envelope(source="a", request=pb.Request(ticket=ticket, born=number(), purpose=purpose)),
        pb.Envelope(source="a", grant=pb.Grant(ticket=ticket, contribution=stated)),
        pb.Envelope(source="a", begin=pb.Begin(formed=formed, offer=ticket)),
        pb.Envelope(source="a", failed=pb.Failed(ticket=ticket, reason=text())),
        pb.Envelope(
            source="a",
            algorithm=pb.AlgorithmMessage(kind=text(), numbers=[number()], peers=[text()]),
        ),
        pb.Envelope(
            source="a",
            ledger_update=pb.LedgerUpdate(
                samples=number(),
                part_size=number(),
                peers=[text()],
                numbers=[number() for _ in range(data.draw(st.sampled_from([0, 6, 7])))],
                closed=[number() for _ in range(data.draw(st.sampled_from([0, 3, 4])))],
            ),
        ),
        pb.Envelope(source="a", relinquish=pb.Relinquish(ticket=ticket)),
        pb.Envelope(
            source="a", arrive=pb.Arrive(version=number(), offer=ticket, contribution=stated)
        ),
        pb.Envelope(
            source="a", activate=pb.Activate(version=number(), offer=ticket, contribution=stated)
        ),
        pb.Envelope(
            source="a", catch_up=pb.CatchUp(version=number(), donor=text(), lineage=number())
        ),
        pb.Hello(
            algorithm=text(),
            model=text(),
            model_size=number(),
            self=member,
            settings=[pb.Setting(name=text(), value=text())],
            tensors=[text()],
            refused=text(),
        ),
        pb.JoinReply(refusal=text(), members=[member]),
        pb.Chunk(average=pb.AverageOpening(sender=text(), ticket=ticket, swarm=text())),
        pb.Chunk(state=pb.StateOpening(sender=text(), version=number())),
    ):
        decode_anything(packed.SerializeToString())


# --- bounds ---------------------------------------------------------------------------------------


@given(members)
def test_no_record_is_larger_than_gossip_thinks(member):
    alone = wire.encode_join_reply(JoinReply("", (member,)))
    assert len(alone) <= size_of(member)


def test_who_is_accused_by_many_is_accused_by_some_and_who_is_no_suspect_by_nobody():
    names = [f"p{i}" for i in range(20, 0, -1)]
    for state, expected in ((1, ("p13", "p14", "p15", "p16")), (2, ())):
        record = pb.Member(
            peer="a", address="b:1", incarnation=1, state=state, accusers=[*names, "p20"]
        )
        (member,) = wire.decode_join_reply(
            pb.JoinReply(members=[record]).SerializeToString()
        ).members
        assert member.accusers == expected


@pytest.mark.parametrize(
    "name", ["", " ", "two words", "x" * 129, "tab\t", "line\n", "\x00", "\u2028"]
)
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(CodecError, match="a peer's name that cannot be one"):
        wire.decode_envelope(pb.Envelope(source=name, ping=pb.Ping()).SerializeToString())


@pytest.mark.parametrize("number", [wire.MAX_NUMBER + 1, 2**64 - 1])
def test_a_number_out_of_range_is_refused(number):
    data = pb.Envelope(source="a", arrive=pb.Arrive(version=number)).SerializeToString()
    with pytest.raises(CodecError, match="out of range"):
        wire.decode_envelope(data)


@pytest.mark.parametrize("group", [[], ["b", "a"], ["a", "a"]])
def test_a_group_that_is_empty_unsorted_or_repeats_a_peer_is_refused(group):
    with pytest.raises(CodecError, match="group"):
        decode_begin(members=group)


@pytest.mark.parametrize(
    "weights", [[1], [1, 1, 1], [0, 0], [WHOLE + 1, 1], [2**32 - 1, 0]], ids=str
)
def test_weights_that_are_not_one_of_each_member_or_too_large_are_refused(weights):
    with pytest.raises(CodecError, match="weight"):
        decode_begin(members=["a", "b"], weights=weights)


def decode_begin(**formed: object) -> m.Begin:
    """A group as somebody claims that it was formed; what is not said is in order."""
    packed = pb.Formed(**{"ticket": pb.Ticket(initiator="a"), "members": ["a", "b"], **formed})
    envelope = pb.Envelope(source="a", begin=pb.Begin(formed=packed))
    message = wire.decode_envelope(envelope.SerializeToString()).message
    assert isinstance(message, m.Begin)
    return message


@pytest.mark.parametrize("count", [1, 3])
def test_contributions_that_are_not_one_of_each_member_are_refused(count: int):
    with pytest.raises(CodecError, match=f"{count} contributions of 2 members"):
        decode_begin(contributions=[pb.Contribution(weight=1)] * count)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight", wire_parts.MAX_WEIGHT + 1, "a weight out of range"),
        ("usual", wire_parts.MAX_WEIGHT + 1, "a weight out of range"),
        ("samples", wire.MAX_NUMBER + 1, "a number out of range"),
        ("speed", wire.MAX_NUMBER + 1, "a number out of range"),
        ("gradient_mask", bytes(wire_parts.MAX_MASK_BYTES + 1), "gradients of 1048584 parameters"),
    ],
)
def test_a_contribution_out_of_range_is_refused_wherever_it_is_stated(
    field: str, value: int | bytes, message: str
):
    stated, ticket = pb.Contribution(**{field: value}), pb.Ticket(initiator="a")
    with pytest.raises(CodecError, match=message):
        decode_begin(contributions=[stated, stated])
    for form in (
        {"grant": pb.Grant(ticket=ticket, contribution=stated)},
        {"arrive": pb.Arrive(offer=ticket, contribution=stated)},
        {"activate": pb.Activate(offer=ticket, contribution=stated)},
    ):
        with pytest.raises(CodecError, match=message):
            wire.decode_envelope(pb.Envelope(source="a", **form).SerializeToString())


@pytest.mark.parametrize(
    "purpose",
    [
        {"fragment": 1},
        {"fragment": 4, "fragments": 3},
        {"fragments": MOST_FRAGMENTS},
        {"fragment": 1 << 31, "fragments": 1},
    ],
)
def test_a_fragment_that_there_is_not_is_refused(purpose: dict[str, int]):
    with pytest.raises(CodecError, match="fragment"):
        decode_begin(purpose=pb.Purpose(**purpose))


@pytest.mark.parametrize(
    "purpose", [{"formation": 3}, {"what": 5}, {"formation": -1}, {"what": -1}]
)
def test_a_group_for_something_that_this_version_does_not_know_is_refused(purpose: dict[str, int]):
    packed, ticket = pb.Purpose(**purpose), pb.Ticket(initiator="a")
    with pytest.raises(CodecError, match="a group for something unknown"):
        decode_begin(purpose=packed)
    request = pb.Request(ticket=ticket, purpose=packed)
    with pytest.raises(CodecError, match="a group for something unknown"):
        wire.decode_envelope(pb.Envelope(source="a", request=request).SerializeToString())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"kind": "x" * 33}, "a message with 33 characters"),
        ({"numbers": [0] * 65}, "65 numbers"),
        ({"peers": ["a"] * 4097}, "4097 names"),
        ({"peers": ["a"] * 100_000}, "4097 names"),
        ({"numbers": [wire.MAX_NUMBER + 1]}, "write numbers from 0"),
        ({"peers": ["two words"]}, "a peer's name that cannot be one"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_message_of_an_algorithm_that_it_could_not_send_is_refused(
    said: dict[str, object], message: str
):
    packed = pb.Envelope(source="a", algorithm=pb.AlgorithmMessage(**said))
    with pytest.raises(CodecError, match=message):
        wire.decode_envelope(packed.SerializeToString())


def test_a_group_of_more_members_than_a_swarm_may_have_is_refused():
    names = [f"p{i:05}" for i in range(wire.MAX_MEMBERS + 1)]
    assert decode_begin(members=names[:-1]).members == tuple(names[:-1])
    with pytest.raises(CodecError, match="a group of 4097 members"):
        decode_begin(members=names)


def test_an_offer_of_nobody_is_refused():
    for form in (
        {"begin": pb.Begin(formed=wire._formed_to_pb(AB), offer=pb.Ticket())},
        {"arrive": pb.Arrive(offer=pb.Ticket())},
        {"activate": pb.Activate(offer=pb.Ticket())},
    ):
        with pytest.raises(CodecError, match="a peer's name that cannot be one"):
            wire.decode_envelope(pb.Envelope(source="a", **form).SerializeToString())


def test_a_begin_without_a_group_is_refused():
    with pytest.raises(CodecError, match="group"):
        wire.decode_envelope(pb.Envelope(source="a", begin=pb.Begin()).SerializeToString())


def test_a_link_faster_than_any_is_refused():
    member = member_to_pb(m.Member(peer=PeerId("a"), address=Address("h:1"), incarnation=1))
    member.link_mbit = MAX_MBIT + 1
    with pytest.raises(CodecError, match="a link's speed out of range"):
        wire.decode_join_reply(pb.JoinReply(members=[member]).SerializeToString())


def test_more_members_than_a_swarm_may_have_are_refused():
    one = member_to_pb(m.Member(peer=PeerId("a"), address=Address("h:1"), incarnation=1))
    packed = pb.JoinReply(members=[one] * (wire.MAX_MEMBERS + 1))
    with pytest.raises(CodecError, match="members"):
        wire.decode_join_reply(packed.SerializeToString())


def test_large_records_of_made_up_members_are_not_remembered():
    """What a later version adds to a record may have any size, and a forger may add it, too."""
    later_field = varint(1000 << 3 | 2) + varint(1 << 16) + bytes(1 << 16)
    tracemalloc.start()
    try:
        for number in range(200):
            one = m.Member(peer=PeerId(f"x{number}"), address=Address("h:1"), incarnation=1)
            record = pb.Member.FromString(member_to_pb(one).SerializeToString() + later_field)
            said = pb.Envelope(source="a", ping=pb.Ping(members=[record]))
            assert wire.decode_envelope(said.SerializeToString()).message.members == (one,)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 << 20


def test_no_more_records_are_remembered_than_a_large_swarm_has():
    """A forger could fill 30 MB with small ones."""
    for number in range(2 * wire_members.KNOWN_RECORDS):
        one = m.Member(peer=PeerId("a"), address=Address("h:1"), incarnation=number)
        said = Envelope(one.peer, "", m.Ping(1, (one,)))
        wire.decode_envelope(wire.encode_envelope(said))
    for cache in wire_members._known_member, wire_members.known_to_pb:
        assert cache.cache_info().currsize <= 4096


def test_a_message_that_this_version_does_not_know_is_refused():
    with pytest.raises(CodecError, match="an envelope without a message"):
        wire.decode_envelope(pb.Envelope(source="a", swarm="s").SerializeToString())


def test_a_field_of_a_later_minor_version_is_ignored():
    envelope = Envelope(PeerId("a"), "s", m.Arrive(3))
    later = wire.encode_envelope(envelope) + b"\xfa\x06\x03new"  # field 111
    assert wire.decode_envelope(later) == envelope


def test_an_opening_of_megabytes_is_refused():
    opening = pb.Chunk(average=pb.AverageOpening(swarm="x" * 1_000_000)).SerializeToString()
    with pytest.raises(CodecError, match="an opening of"):
        wire.decode_chunk(opening)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["127.0.0.1:4000", "[::1]:1", "peer:65535", "a.b-c_d.example:80"])
def test_these_are_addresses(text):
    assert wire.address(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "peer",
        "peer:",
        ":4000",
        "peer:0",
        "peer:65536",
        "peer:-1",
        "peer:4 0",
        "peer:४०",
        "a b:1",
        "a/b:1",
        "a,b:1",
        "http://peer:80",
        "peer:80/",
        "p\n:80",
        "x" * 300 + ":80",
        "peer:" + "9" * 5_000,
    ],
)
def test_these_are_no_addresses(text):
    with pytest.raises(CodecError, match="is not an address; write host:port"):
        wire.address(text)


# --- chunks ---------------------------------------------------------------------------------------


@given(st.binary(max_size=70_000), st.booleans())
@example(b"", True)
@example(bytes(127), False)
@example(bytes(128), False)
@example(bytes(16_383), True)
@example(bytes(16_384), False)
def test_a_chunk_is_written_as_protobuf_would_write_it(payload, last):
    data = wire.encode_chunk(Chunk(memoryview(payload), last))
    assert data == pb.Chunk(payload=payload, last=last or None).SerializeToString()
    assert wire.decode_chunk(data) == Chunk(memoryview(payload), last)


def test_the_largest_chunk_is_written_as_protobuf_would_write_it():
    payload = bytes(wire.MAX_CHUNK_BYTES)
    data = wire.encode_chunk(Chunk(memoryview(payload)))
    assert data == pb.Chunk(payload=payload).SerializeToString()


@given(openings, st.binary(max_size=100), st.booleans())
def test_opening_payload_and_end_may_share_one_message(opening, payload, last):
    content = Chunk(memoryview(payload), last, opening)
    data = wire.encode_chunk(content)
    assert wire.decode_chunk(data) == content
    packed = pb.Chunk.FromString(data)
    assert (packed.payload, packed.last) == (payload, last)


def test_a_decoded_payload_is_the_received_memory_itself():
    data = wire.encode_chunk(Chunk(memoryview(b"x" * 1000), last=True))
    payload = wire.decode_chunk(data).payload
    assert payload.obj is data
    assert payload.readonly


def test_a_chunk_with_a_field_of_a_later_minor_version_is_read():
    data = wire.encode_chunk(Chunk(memoryview(b"four"))) + b"\xfa\x06\x03new" + b"\x28\x07"
    assert bytes(wire.decode_chunk(data).payload) == b"four"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\x0a\x05four",
        b"\x0a\x80\x80\x80\x80\x80\x01",
        b"\x0d\x00\x00\x00\x00",
        b"\x20\x00",
    ],
)
def test_what_is_not_a_chunk_is_refused(data):
    with pytest.raises(CodecError, match="chunk"):
        wire.decode_chunk(data)


def test_a_peer_that_describes_itself_at_length_is_refused_or_cut():
    me = m.Member(peer=PeerId("a"), address=Address("h:1"), incarnation=1)
    long = Hello((1, 0), "a", "b", 1, me, tensors=("x" * 400,) * 5000, refused="y" * 5000)
    heard = wire.decode_hello(wire.encode_hello(long))
    assert len(heard.tensors) == wire.MAX_TENSORS
    assert {len(line) for line in heard.tensors} == {wire.MAX_REASON}
    assert len(heard.refused) == wire.MAX_REFUSAL
    for settings in ({str(n): "" for n in range(300)}, {"x": "y" * 400}, {"x" * 400: "y"}):
        with pytest.raises(CodecError, match=r"settings; at most 256|a text of 400 characters"):
            wire.decode_hello(wire.encode_hello(Hello((1, 0), "a", "b", 1, me, settings)))


@pytest.mark.parametrize(
    "said",
    [
        {"samples": 0, "part_size": 1},
        {"samples": 1 << 60, "part_size": 1 << 50},
        {"samples": 1 << 20, "part_size": 1},
        {"samples": 100, "part_size": 0},
        {"samples": 100, "part_size": 10, "peers": ["a"], "numbers": [0, 0, 1, 1, 0, 0, 1]},
        {"samples": 100, "part_size": 10, "peers": ["a"], "numbers": [0, 0, 0, 1, 0, 9, 8]},
        {"samples": 100, "part_size": 10, "peers": ["a"], "numbers": [0, 0, 0, 1, 0, 0]},
        {"samples": 100, "part_size": 10, "peers": ["a"], "numbers": [0, 1 << 20, 0, 1, 0, 0, 1]},
        {"samples": 100, "part_size": 10, "peers": ["a"], "numbers": [0] * 7 * 2049},
        {"samples": 100, "part_size": 10, "closed": [0, 50, 49, 200]},
        {"samples": 100, "part_size": 10, "closed": [0, 50, 50, 149]},
        {"samples": 100, "part_size": 10, "closed": [0, 100, 0, 100] * 4097},
    ],
)
def test_a_ledger_of_what_cannot_be_is_refused(said: dict[str, object]):
    packed = pb.Envelope(source="a", ledger_update=pb.LedgerUpdate(**said))
    with pytest.raises(CodecError):
        wire.decode_envelope(packed.SerializeToString())
