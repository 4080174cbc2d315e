"""How ranks prove to each other that they are of one job."""

import pytest

from hpcdist.rpc import trust
from hpcdist.rpc.trust import Challenge, Response, Stranger

TOKEN, OTHER = trust.random_token(), trust.random_token()
LAST_BYTE_OTHER = TOKEN[:-1] + bytes([TOKEN[-1] ^ 1])


def test_ranks_that_know_the_token_trust_each_other():
    challenge = Challenge(TOKEN, 7)
    response = Response(TOKEN, 3, 7, challenge.greeting)
    assert len(challenge.greeting) == trust.GREETING_BYTES
    assert len(response.answer) == trust.ANSWER_BYTES
    caller, welcome = challenge.welcome(response.answer)
    assert caller == 3
    assert len(welcome) == trust.WELCOME_BYTES
    response.check(welcome)


@pytest.mark.parametrize(
    ("token", "me", "to"),
    [(OTHER, 3, 7), (TOKEN, 3, 8), (LAST_BYTE_OTHER, 3, 7)],
    ids=["token", "rank", "last byte"],
)
def test_a_caller_that_knows_another_token_or_means_another_rank_is_a_stranger(token, me, to):
    challenge = Challenge(TOKEN, 7)
    with pytest.raises(Stranger):
        challenge.welcome(Response(token, me, to, challenge.greeting).answer)


def test_a_listener_that_does_not_know_the_token_is_a_stranger():
    challenge = Challenge(TOKEN, 7)
    response = Response(TOKEN, 3, 7, challenge.greeting)
    _, welcome = challenge.welcome(response.answer)
    for wrong in (b"", bytes(32), response.answer[-32:], welcome[:-1], welcome[::-1]):
        with pytest.raises(Stranger):
            response.check(wrong)


def test_an_answer_is_good_once_and_for_its_rank_only():
    first, second = Challenge(TOKEN, 7), Challenge(TOKEN, 7)
    answer = Response(TOKEN, 3, 7, first.greeting).answer
    with pytest.raises(Stranger):
        second.welcome(answer)
    for at in (0, 10, len(answer) - 1):
        forged = bytearray(answer)
        forged[at] ^= 1
        with pytest.raises(Stranger):
            first.welcome(bytes(forged))
    with pytest.raises(Stranger):
        first.welcome(answer[:-1])
    assert first.welcome(answer)[0] == 3


def test_what_greets_otherwise_is_a_stranger():
    greeting = Challenge(TOKEN, 7).greeting
    for wrong in (b"SSH-2.0-OpenSSH_9.6".ljust(len(greeting)), greeting[1:], b""):
        with pytest.raises(Stranger):
            Response(TOKEN, 3, 7, wrong)
