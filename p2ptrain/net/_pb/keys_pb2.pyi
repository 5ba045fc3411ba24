from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("public", "name")
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    public: bytes
    name: str
    def __init__(self, public: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("calls", "answers", "seed", "records", "elsewhere")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    calls: bytes
    answers: bytes
    seed: bytes
    records: _containers.RepeatedCompositeFieldContainer[KeyRecord]
    elsewhere: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, calls: _Optional[bytes] = ..., answers: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., records: _Optional[_Iterable[_Union[KeyRecord, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[str]] = ...) -> None: ...

class KeyRecords(_message.Message):
    __slots__ = ("digest", "records")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    records: _containers.RepeatedCompositeFieldContainer[KeyRecord]
    def __init__(self, digest: _Optional[bytes] = ..., records: _Optional[_Iterable[_Union[KeyRecord, _Mapping]]] = ...) -> None: ...

class KeyRecord(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class KeyFact(_message.Message):
    __slots__ = ("made", "used", "void", "revoked", "signers")
    MADE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    made: TokenMade
    used: TokenUsed
    void: str
    revoked: str
    signers: SignersLimited
    def __init__(self, made: _Optional[_Union[TokenMade, _Mapping]] = ..., used: _Optional[_Union[TokenUsed, _Mapping]] = ..., void: _Optional[str] = ..., revoked: _Optional[str] = ..., signers: _Optional[_Union[SignersLimited, _Mapping]] = ...) -> None: ...

class TokenMade(_message.Message):
    __slots__ = ("public", "viewer", "until_s", "uses")
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    public: bytes
    viewer: bool
    until_s: int
    uses: int
    def __init__(self, public: _Optional[bytes] = ..., viewer: bool = ..., until_s: _Optional[int] = ..., uses: _Optional[int] = ...) -> None: ...

class TokenUsed(_message.Message):
    __slots__ = ("token", "name")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    token: str
    name: str
    def __init__(self, token: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SignersLimited(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class KeyCommand(_message.Message):
    __slots__ = ("show", "token", "revoke", "rotate")
    SHOW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    ROTATE_FIELD_NUMBER: _ClassVar[int]
    show: bool
    token: TokenWanted
    revoke: str
    rotate: bool
    def __init__(self, show: bool = ..., token: _Optional[_Union[TokenWanted, _Mapping]] = ..., revoke: _Optional[str] = ..., rotate: bool = ...) -> None: ...

class TokenWanted(_message.Message):
    __slots__ = ("viewer", "lasts_s", "uses")
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    viewer: bool
    lasts_s: int
    uses: int
    def __init__(self, viewer: bool = ..., lasts_s: _Optional[int] = ..., uses: _Optional[int] = ...) -> None: ...

class KeyAnswer(_message.Message):
    __slots__ = ("token", "shown")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    token: str
    shown: str
    def __init__(self, token: _Optional[str] = ..., shown: _Optional[str] = ...) -> None: ...
