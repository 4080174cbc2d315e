"""`Token`: how two ranks prove to each other that they belong to one job. Pure.

MPI has given all ranks the same 32 random bytes. Who connects is challenged, and challenges, before
anything it sends is unpickled:

| from | message |
|---|---|
| listener | greeting: what this is, and 32 random bytes |
| caller | its rank, 32 random bytes of its own, and the proof that it knows the token |
| listener | the proof that it knows the token, too |

All have a fixed size. A proof is the HMAC-SHA256 of both sides' random bytes and ranks and of the
role, so none can be used twice, for another rank, or sent back to whom it came from.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import final

_GREETING = b"hpcdist rpc 1\r\n\0"
_RANDOM = 32
_PROOF = 32
_RANKS = struct.Struct("<II")
_RANK = struct.Struct("<I")

GREETING_BYTES = len(_GREETING) + _RANDOM
ANSWER_BYTES = _RANK.size + _RANDOM + _PROOF
WELCOME_BYTES = _PROOF


class Stranger(Exception):
    """The other side has not proved that it is a rank of this job."""


def random_token() -> bytes:
    """Return 32 bytes that nobody else knows."""
    return secrets.token_bytes(32)


@final
class Challenge:
    """The listener's side of one connection; `me` is the rank that listens."""

    def __init__(self, token: bytes, me: int) -> None:
        self._token, self._me = token, me
        self._random = secrets.token_bytes(_RANDOM)

    @property
    def greeting(self) -> bytes:
        """What the caller is sent first."""
        return _GREETING + self._random

    def welcome(self, answer: bytes) -> tuple[int, bytes]:
        """Check an answer; return the rank that calls and what it is sent.

        Raises:
            Stranger: the answer proves nothing.

        """
        if len(answer) != ANSWER_BYTES:
            raise Stranger(f"an answer has {ANSWER_BYTES} bytes, not {len(answer)}")
        (caller,) = _RANK.unpack_from(answer)
        random, proof = answer[_RANK.size : -_PROOF], answer[-_PROOF:]
        ranks = _RANKS.pack(caller, self._me)
        expected = _proof(self._token, b"caller", self._random, random, ranks)
        if not hmac.compare_digest(proof, expected):
            raise Stranger("it does not know the token of this job")
        return caller, _proof(self._token, b"listener", self._random, random, ranks)


@final
class Response:
    """The caller's side: rank `me` has connected to rank `to`."""

    def __init__(self, token: bytes, me: int, to: int, greeting: bytes) -> None:
        if len(greeting) != GREETING_BYTES or not greeting.startswith(_GREETING):
            raise Stranger(f"what listens there is not a rank of hpcdist: it says {greeting!r}")
        challenge, random = greeting[len(_GREETING) :], secrets.token_bytes(_RANDOM)
        ranks = _RANKS.pack(me, to)
        self.answer = _RANK.pack(me) + random + _proof(token, b"caller", challenge, random, ranks)
        self._expected = _proof(token, b"listener", challenge, random, ranks)

    def check(self, welcome: bytes) -> None:
        """Raise `Stranger` unless the listener has proved that it knows the token."""
        if not hmac.compare_digest(welcome, self._expected):
            raise Stranger("what listens there does not know the token of this job")


def _proof(token: bytes, role: bytes, challenge: bytes, random: bytes, ranks: bytes) -> bytes:
    return hmac.new(token, role + challenge + random + ranks, hashlib.sha256).digest()
