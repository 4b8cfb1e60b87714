"""Mutual proof of the job's token: who passes, and that nothing of use is shown to anybody else."""

import pytest

from holdfast.protocol.network.proof import MAX_CREDENTIAL, OWN_HEADER, Question, admit, answer_to

ASKED = ("GET", "/status?a=1")


def test_both_sides_know_the_token():
    question = Question("token", "coordinator 1", *ASKED)
    answer = answer_to(question.credential, "token", "coordinator 1", *ASKED)
    assert answer is not None
    assert question.proves(answer)
    assert "token" not in question.credential
    assert "token" not in answer


@pytest.mark.parametrize(
    ("token", "server", "asked"),
    [
        ("another", "coordinator 1", ASKED),
        ("token", "coordinator 2", ASKED),
        ("token", "coordinator 1", ("POST", "/status?a=1")),
        ("token", "coordinator 1", ("GET/status?a=1",)),
        ("token", "coordinator 1", ()),
    ],
)
def test_a_credential_is_good_for_one_token_server_and_request(token, server, asked):
    question = Question("token", "coordinator 1", *ASKED)
    assert answer_to(question.credential, token, server, *asked) is None
    good = answer_to(Question(token, server, *asked).credential, token, server, *asked)
    assert good is not None
    assert not question.proves(good)


def test_a_server_cannot_answer_with_what_it_was_sent():
    question = Question("token", "coordinator 1", *ASKED)
    nonce, code = question.credential.split()
    assert not question.proves(code)
    assert not question.proves(nonce)
    assert not question.proves(question.credential)


@pytest.mark.parametrize("text", ["", " ", "é", "é é", "\udcff", "\ud800 x", "a" * 10_000_000, "x " * 200])
def test_any_text_is_refused_and_raises_nothing(text):
    assert answer_to(text, "token", "s") is None
    assert not Question("token", "s").proves(text)
    for header in ("Authorization", OWN_HEADER):
        for value in (text, f"Bearer {text}", f"Holdfast {text}"):
            assert admit([(header, value)], "token", "s") is None


def test_credentials_are_short_and_never_twice_the_same():
    first, second = (Question("token", "s", *ASKED).credential for _ in range(2))
    assert first != second
    assert len(first) <= MAX_CREDENTIAL
    assert first.isascii()


def shown(*headers):
    """The answer to a request with these headers."""
    return admit(headers, "token", "s", *ASKED)


BEARER, PLAIN = ("Authorization", "Bearer token"), (OWN_HEADER, "token")


def test_who_shows_the_token_is_let_in():
    assert shown(BEARER) == ""
    assert shown(("AUTHORIZATION", "Bearer token")) == ""
    assert shown(("Host", "x"), (OWN_HEADER.lower(), "token")) == ""
    assert shown(BEARER, PLAIN) == ""


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("Host", "token"),),
        (("Authorization", "Bearer token "),),
        (("Authorization", "token"),),
        ((OWN_HEADER, "Bearer token"),),
        ((OWN_HEADER, "token" + " " * 10_000),),
        (BEARER, (OWN_HEADER, "another")),
        (("Authorization", "Bearer of-the-api-server"), PLAIN),
        (("Authorization", ""), PLAIN),
        (BEARER, BEARER, PLAIN),
    ],
)
def test_two_credentials_that_differ_are_as_good_as_none(headers):
    assert shown(*headers) is None


@pytest.mark.parametrize("header", ["Authorization", OWN_HEADER])
def test_a_proof_is_answered_in_either_header(header):
    question = Question("token", "s", *ASKED)
    other = Question("token", "s", "GET", "/stop")
    assert question.proves(shown((header, question.authorization)))
    assert shown((header, other.authorization)) is None


def test_one_of_two_proofs_cannot_be_answered():
    first, second = Question("token", "s", *ASKED), Question("token", "s", *ASKED)
    assert first.proves(shown(("Authorization", first.authorization), PLAIN))
    assert shown(("Authorization", first.authorization), (OWN_HEADER, second.authorization)) is None
