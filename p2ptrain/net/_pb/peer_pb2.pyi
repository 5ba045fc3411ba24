from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNING: _ClassVar[AttemptPhase]
    BROKEN: _ClassVar[AttemptPhase]
    COMMITTED: _ClassVar[AttemptPhase]
    OUT: _ClassVar[AttemptPhase]
RUNNING: AttemptPhase
BROKEN: AttemptPhase
COMMITTED: AttemptPhase
OUT: AttemptPhase

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "algorithm", "model", "model_size", "self", "settings", "rule", "tensors", "refused")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    SELF_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    algorithm: str
    model: str
    model_size: int
    self: Member
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    rule: _containers.RepeatedCompositeFieldContainer[Setting]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    refused: str
    def __init__(self_, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., algorithm: _Optional[str] = ..., model: _Optional[str] = ..., model_size: _Optional[int] = ..., self: _Optional[_Union[Member, _Mapping]] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., rule: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., tensors: _Optional[_Iterable[str]] = ..., refused: _Optional[str] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("refusal", "members", "settings")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    settings: SettingsChange
    def __init__(self, refusal: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., settings: _Optional[_Union[SettingsChange, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "address", "incarnation", "state", "beat", "phase", "steps", "samples", "link_mbit", "resumes", "resumes_before", "accusers")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ALIVE: _ClassVar[Member.State]
        SUSPECT: _ClassVar[Member.State]
        DEAD: _ClassVar[Member.State]
        LEFT: _ClassVar[Member.State]
    ALIVE: Member.State
    SUSPECT: Member.State
    DEAD: Member.State
    LEFT: Member.State
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ARRIVING: _ClassVar[Member.Phase]
        TRAINING: _ClassVar[Member.Phase]
        DONE: _ClassVar[Member.Phase]
    ARRIVING: Member.Phase
    TRAINING: Member.Phase
    DONE: Member.Phase
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LINK_MBIT_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    RESUMES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ACCUSERS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    address: str
    incarnation: int
    state: Member.State
    beat: int
    phase: Member.Phase
    steps: int
    samples: int
    link_mbit: int
    resumes: int
    resumes_before: _containers.RepeatedScalarFieldContainer[int]
    accusers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[Member.State, str]] = ..., beat: _Optional[int] = ..., phase: _Optional[_Union[Member.Phase, str]] = ..., steps: _Optional[int] = ..., samples: _Optional[int] = ..., link_mbit: _Optional[int] = ..., resumes: _Optional[int] = ..., resumes_before: _Optional[_Iterable[int]] = ..., accusers: _Optional[_Iterable[str]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("initiator", "incarnation", "number", "attempt")
    INITIATOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    initiator: str
    incarnation: int
    number: int
    attempt: int
    def __init__(self, initiator: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("source", "swarm", "epoch", "ping", "ack", "membership_updates", "indirect_ping", "indirect_ack", "request", "grant", "failed", "begin", "release", "inquire", "relinquish", "arrive", "catch_up", "activate", "past", "attempt_status", "resolution", "algorithm", "settings_change", "ledger_update")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_UPDATES_FIELD_NUMBER: _ClassVar[int]
    INDIRECT_PING_FIELD_NUMBER: _ClassVar[int]
    INDIRECT_ACK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    INQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELINQUISH_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_STATUS_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_CHANGE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    source: str
    swarm: str
    epoch: int
    ping: Ping
    ack: Ack
    membership_updates: MembershipUpdates
    indirect_ping: IndirectPing
    indirect_ack: IndirectAck
    request: Request
    grant: Grant
    failed: Failed
    begin: Begin
    release: Release
    inquire: Inquire
    relinquish: Relinquish
    arrive: Arrive
    catch_up: CatchUp
    activate: Activate
    past: Past
    attempt_status: AttemptStatus
    resolution: Resolution
    algorithm: AlgorithmMessage
    settings_change: SettingsChange
    ledger_update: LedgerUpdate
    def __init__(self, source: _Optional[str] = ..., swarm: _Optional[str] = ..., epoch: _Optional[int] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., membership_updates: _Optional[_Union[MembershipUpdates, _Mapping]] = ..., indirect_ping: _Optional[_Union[IndirectPing, _Mapping]] = ..., indirect_ack: _Optional[_Union[IndirectAck, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., inquire: _Optional[_Union[Inquire, _Mapping]] = ..., relinquish: _Optional[_Union[Relinquish, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., catch_up: _Optional[_Union[CatchUp, _Mapping]] = ..., activate: _Optional[_Union[Activate, _Mapping]] = ..., past: _Optional[_Union[Past, _Mapping]] = ..., attempt_status: _Optional[_Union[AttemptStatus, _Mapping]] = ..., resolution: _Optional[_Union[Resolution, _Mapping]] = ..., algorithm: _Optional[_Union[AlgorithmMessage, _Mapping]] = ..., settings_change: _Optional[_Union[SettingsChange, _Mapping]] = ..., ledger_update: _Optional[_Union[LedgerUpdate, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number", "members")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, number: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("number", "members")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, number: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class IndirectPing(_message.Message):
    __slots__ = ("number", "target")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    number: int
    target: str
    def __init__(self, number: _Optional[int] = ..., target: _Optional[str] = ...) -> None: ...

class IndirectAck(_message.Message):
    __slots__ = ("number", "target", "answered", "members")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    target: str
    answered: bool
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, number: _Optional[int] = ..., target: _Optional[str] = ..., answered: bool = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class MembershipUpdates(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Purpose(_message.Message):
    __slots__ = ("formation", "what", "version", "lineage", "fragment", "fragments", "epoch")
    class Formation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CLAIMED: _ClassVar[Purpose.Formation]
        BARRIER: _ClassVar[Purpose.Formation]
        WAIT_AVOIDING: _ClassVar[Purpose.Formation]
    CLAIMED: Purpose.Formation
    BARRIER: Purpose.Formation
    WAIT_AVOIDING: Purpose.Formation
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODELS: _ClassVar[Purpose.What]
        GRADIENTS: _ClassVar[Purpose.What]
        STALE_GRADIENTS: _ClassVar[Purpose.What]
        PSEUDO_GRADIENTS: _ClassVar[Purpose.What]
        CONSENSUS: _ClassVar[Purpose.What]
    MODELS: Purpose.What
    GRADIENTS: Purpose.What
    STALE_GRADIENTS: Purpose.What
    PSEUDO_GRADIENTS: Purpose.What
    CONSENSUS: Purpose.What
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    formation: Purpose.Formation
    what: Purpose.What
    version: int
    lineage: int
    fragment: int
    fragments: int
    epoch: int
    def __init__(self, formation: _Optional[_Union[Purpose.Formation, str]] = ..., what: _Optional[_Union[Purpose.What, str]] = ..., version: _Optional[int] = ..., lineage: _Optional[int] = ..., fragment: _Optional[int] = ..., fragments: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("weight", "usual", "samples", "wants_to_end", "gradient_mask", "rule", "progress", "begun", "together", "history", "outer_steps", "speed", "wants_checkpoint", "writes_checkpoint")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    USUAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WANTS_TO_END_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_MASK_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    WANTS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WRITES_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    weight: int
    usual: int
    samples: int
    wants_to_end: bool
    gradient_mask: bytes
    rule: int
    progress: int
    begun: int
    together: int
    history: int
    outer_steps: int
    speed: int
    wants_checkpoint: bool
    writes_checkpoint: bool
    def __init__(self, weight: _Optional[int] = ..., usual: _Optional[int] = ..., samples: _Optional[int] = ..., wants_to_end: bool = ..., gradient_mask: _Optional[bytes] = ..., rule: _Optional[int] = ..., progress: _Optional[int] = ..., begun: _Optional[int] = ..., together: _Optional[int] = ..., history: _Optional[int] = ..., outer_steps: _Optional[int] = ..., speed: _Optional[int] = ..., wants_checkpoint: bool = ..., writes_checkpoint: bool = ...) -> None: ...

class LedgerUpdate(_message.Message):
    __slots__ = ("samples", "part_size", "seed", "begin", "peers", "numbers", "closed", "asks", "is_whole")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PART_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    samples: int
    part_size: int
    seed: int
    begin: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    closed: _containers.RepeatedScalarFieldContainer[int]
    asks: bool
    is_whole: bool
    def __init__(self, samples: _Optional[int] = ..., part_size: _Optional[int] = ..., seed: _Optional[int] = ..., begin: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., numbers: _Optional[_Iterable[int]] = ..., closed: _Optional[_Iterable[int]] = ..., asks: bool = ..., is_whole: bool = ...) -> None: ...

class EpochCount(_message.Message):
    __slots__ = ("epoch", "never", "once", "again", "trained")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    never: int
    once: int
    again: int
    trained: int
    def __init__(self, epoch: _Optional[int] = ..., never: _Optional[int] = ..., once: _Optional[int] = ..., again: _Optional[int] = ..., trained: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("ticket", "born", "purpose")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    born: int
    purpose: Purpose
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., born: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("ticket", "contribution")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    contribution: Contribution
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("ticket", "reason")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    reason: str
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("formed", "offer")
    FORMED_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    formed: Formed
    offer: Ticket
    def __init__(self, formed: _Optional[_Union[Formed, _Mapping]] = ..., offer: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Formed(_message.Message):
    __slots__ = ("ticket", "members", "weights", "purpose", "contributions", "outside_samples")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    members: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[int]
    purpose: Purpose
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    outside_samples: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., members: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[int]] = ..., purpose: _Optional[_Union[Purpose, _Mapping]] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., outside_samples: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Inquire(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Relinquish(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("version", "lineage", "offer", "contribution")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    version: int
    lineage: int
    offer: Ticket
    contribution: Contribution
    def __init__(self, version: _Optional[int] = ..., lineage: _Optional[int] = ..., offer: _Optional[_Union[Ticket, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class CatchUp(_message.Message):
    __slots__ = ("version", "donor", "lineage")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    donor: str
    lineage: int
    def __init__(self, version: _Optional[int] = ..., donor: _Optional[str] = ..., lineage: _Optional[int] = ...) -> None: ...

class Activate(_message.Message):
    __slots__ = ("version", "waits", "offer", "contribution")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    version: int
    waits: bool
    offer: Ticket
    contribution: Contribution
    def __init__(self, version: _Optional[int] = ..., waits: bool = ..., offer: _Optional[_Union[Ticket, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class Past(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class SettingsChange(_message.Message):
    __slots__ = ("epoch", "text", "by", "why")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    text: str
    by: str
    why: str
    def __init__(self, epoch: _Optional[int] = ..., text: _Optional[str] = ..., by: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class AlgorithmMessage(_message.Message):
    __slots__ = ("kind", "numbers", "peers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    numbers: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., numbers: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class AttemptStatus(_message.Message):
    __slots__ = ("ticket", "phase", "asks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    phase: AttemptPhase
    asks: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., phase: _Optional[_Union[AttemptPhase, str]] = ..., asks: bool = ...) -> None: ...

class Resolution(_message.Message):
    __slots__ = ("ticket", "adopt", "again", "members")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    adopt: bool
    again: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., adopt: bool = ..., again: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("payload", "average", "state", "last")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    average: AverageOpening
    state: StateOpening
    last: bool
    def __init__(self, payload: _Optional[bytes] = ..., average: _Optional[_Union[AverageOpening, _Mapping]] = ..., state: _Optional[_Union[StateOpening, _Mapping]] = ..., last: bool = ...) -> None: ...

class AverageOpening(_message.Message):
    __slots__ = ("swarm", "sender", "ticket", "vector_size", "chunk_size", "codec", "bucket")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    VECTOR_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    swarm: str
    sender: str
    ticket: Ticket
    vector_size: int
    chunk_size: int
    codec: str
    bucket: str
    def __init__(self, swarm: _Optional[str] = ..., sender: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., vector_size: _Optional[int] = ..., chunk_size: _Optional[int] = ..., codec: _Optional[str] = ..., bucket: _Optional[str] = ...) -> None: ...

class StateOpening(_message.Message):
    __slots__ = ("swarm", "sender", "version", "lineage", "outer", "snapshot", "bare")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    swarm: str
    sender: str
    version: int
    lineage: int
    outer: int
    snapshot: bytes
    bare: bool
    def __init__(self, swarm: _Optional[str] = ..., sender: _Optional[str] = ..., version: _Optional[int] = ..., lineage: _Optional[int] = ..., outer: _Optional[int] = ..., snapshot: _Optional[bytes] = ..., bare: bool = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("size", "chunk_size", "hashes", "progress")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    size: int
    chunk_size: int
    hashes: bytes
    progress: int
    def __init__(self, size: _Optional[int] = ..., chunk_size: _Optional[int] = ..., hashes: _Optional[bytes] = ..., progress: _Optional[int] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class StateNews(_message.Message):
    __slots__ = ("have", "others", "advised")
    HAVE_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    have: bytes
    others: _containers.RepeatedScalarFieldContainer[str]
    advised: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, have: _Optional[bytes] = ..., others: _Optional[_Iterable[str]] = ..., advised: _Optional[_Iterable[int]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("self", "members", "unix_s", "running_s", "samples_per_s", "wait_share", "progress", "doing", "loss", "partners", "consensus_distance_l2", "groups_done", "groups_failed", "warning", "silence", "since_average_s", "epoch", "settings", "changed_why", "data", "long_gone")
    SELF_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PARTNERS_FIELD_NUMBER: _ClassVar[int]
    CONSENSUS_DISTANCE_L2_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DONE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FAILED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_AVERAGE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_WHY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LONG_GONE_FIELD_NUMBER: _ClassVar[int]
    self: Hello
    members: _containers.RepeatedCompositeFieldContainer[Member]
    unix_s: float
    running_s: float
    samples_per_s: float
    wait_share: float
    progress: int
    doing: str
    loss: float
    partners: _containers.RepeatedScalarFieldContainer[str]
    consensus_distance_l2: float
    groups_done: int
    groups_failed: int
    warning: str
    silence: str
    since_average_s: float
    epoch: int
    settings: str
    changed_why: str
    data: _containers.RepeatedCompositeFieldContainer[EpochCount]
    long_gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, self_: _Optional[_Union[Hello, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., unix_s: _Optional[float] = ..., running_s: _Optional[float] = ..., samples_per_s: _Optional[float] = ..., wait_share: _Optional[float] = ..., progress: _Optional[int] = ..., doing: _Optional[str] = ..., loss: _Optional[float] = ..., partners: _Optional[_Iterable[str]] = ..., consensus_distance_l2: _Optional[float] = ..., groups_done: _Optional[int] = ..., groups_failed: _Optional[int] = ..., warning: _Optional[str] = ..., silence: _Optional[str] = ..., since_average_s: _Optional[float] = ..., epoch: _Optional[int] = ..., settings: _Optional[str] = ..., changed_why: _Optional[str] = ..., data: _Optional[_Iterable[_Union[EpochCount, _Mapping]]] = ..., long_gone: _Optional[_Iterable[str]] = ...) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("text", "why")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    text: str
    why: str
    def __init__(self, text: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class SetReply(_message.Message):
    __slots__ = ("refusal", "settings", "epoch")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    settings: str
    epoch: int
    def __init__(self, refusal: _Optional[str] = ..., settings: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("port", "number")
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    port: int
    number: int
    def __init__(self, port: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class DialedBack(_message.Message):
    __slots__ = ("seen_as", "why_not")
    SEEN_AS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    seen_as: str
    why_not: str
    def __init__(self, seen_as: _Optional[str] = ..., why_not: _Optional[str] = ...) -> None: ...

class Registering(_message.Message):
    __slots__ = ("address", "certificate", "round_trip_us", "echo")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    address: str
    certificate: bytes
    round_trip_us: int
    echo: int
    def __init__(self, address: _Optional[str] = ..., certificate: _Optional[bytes] = ..., round_trip_us: _Optional[int] = ..., echo: _Optional[int] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("number", "chunks", "echo", "relays")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    number: bytes
    chunks: bool
    echo: int
    relays: bool
    def __init__(self, number: _Optional[bytes] = ..., chunks: bool = ..., echo: _Optional[int] = ..., relays: bool = ...) -> None: ...

class Carried(_message.Message):
    __slots__ = ("opening", "data")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    opening: Carrying
    data: bytes
    def __init__(self, opening: _Optional[_Union[Carrying, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Carrying(_message.Message):
    __slots__ = ("number", "address", "chunks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    number: bytes
    address: str
    chunks: bool
    def __init__(self, number: _Optional[bytes] = ..., address: _Optional[str] = ..., chunks: bool = ...) -> None: ...

class ReachRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ReachReply(_message.Message):
    __slots__ = ("certificate", "round_trip_us", "streams")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    round_trip_us: int
    streams: int
    def __init__(self, certificate: _Optional[bytes] = ..., round_trip_us: _Optional[int] = ..., streams: _Optional[int] = ...) -> None: ...

class Paths(_message.Message):
    __slots__ = ("port", "secret", "machine", "unix_name")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    UNIX_NAME_FIELD_NUMBER: _ClassVar[int]
    port: int
    secret: bytes
    machine: str
    unix_name: str
    def __init__(self, port: _Optional[int] = ..., secret: _Optional[bytes] = ..., machine: _Optional[str] = ..., unix_name: _Optional[str] = ...) -> None: ...
