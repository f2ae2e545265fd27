"""Both ends prove that they know the secret, or both learn why they could not."""

from __future__ import annotations

import itertools

import pytest

from asyncrpc.core.wire.frames import VERSION
from asyncrpc.core.wire.handshake import (
    PREFACE,
    PREFACE_MAGIC,
    PROOF_BYTES,
    REFUSAL,
    TICKET_BYTES,
    TOKEN_MODE,
    Handshake,
    HandshakeState,
    Role,
)
from asyncrpc.errors import (
    AuthenticationError,
    LocalProtocolError,
    MalformedError,
    VersionMismatchError,
)

SECRETS = (b"secret", b"other secret", None)


class End:
    """One end, its inbox, and how it failed."""

    def __init__(
        self, role: Role, secret: bytes | None, nonce: int, binding: bytes = b""
    ) -> None:
        self.machine = Handshake(role, secret, bytes([nonce]) * 32, binding)
        self.inbox = bytearray()
        self.error: Exception | None = None

    @property
    def can_step(self) -> bool:
        """Whether a record is here in full."""
        wanted = self.machine.wanted
        return self.error is None and 0 < wanted <= len(self.inbox)

    def step(self) -> bytes:
        """Take one record; return what to send."""
        wanted = self.machine.wanted
        record = bytes(self.inbox[:wanted])
        del self.inbox[:wanted]
        try:
            return self.machine.receive(record)
        except (AuthenticationError, VersionMismatchError, MalformedError) as error:
            self.error = error
            return self.machine.farewell


def meet(dialer: End, acceptor: End) -> None:
    """Let the two talk until nothing moves."""
    acceptor.inbox += dialer.machine.start()
    assert acceptor.machine.start() == b""
    talk(dialer, acceptor)


def talk(dialer: End, acceptor: End) -> None:
    while dialer.can_step or acceptor.can_step:
        if dialer.can_step:
            acceptor.inbox += dialer.step()
        if acceptor.can_step:
            dialer.inbox += acceptor.step()


def make_pair(
    dialers: bytes | None = b"secret", acceptors: bytes | None = b"secret"
) -> tuple[End, End]:
    return End(Role.DIALER, dialers, 1), End(Role.ACCEPTOR, acceptors, 2)


@pytest.mark.parametrize("secret", SECRETS)
def test_equal_secrets_prove_both_ends(secret: bytes | None) -> None:
    ends = make_pair(secret, secret)
    meet(*ends)
    for end in ends:
        assert end.machine.state is HandshakeState.PROVED
        assert end.machine.wanted == 0
        assert end.error is None
        assert not end.inbox
    assert ends[0].machine.token == ends[1].machine.token
    assert ends[0].machine.token >= 1 << 63


def test_token_names_one_connection() -> None:
    """It is of the dialer's nonce, whatever the acceptor's is."""
    tokens = []
    for nonce in (1, 3):
        ends = End(Role.DIALER, b"secret", nonce), End(Role.ACCEPTOR, b"secret", 2)
        meet(*ends)
        tokens.append(ends[1].machine.token)
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("dialers", "acceptors"), list(itertools.permutations(SECRETS, 2))
)
def test_unequal_secrets_fail_at_both_ends(
    dialers: bytes | None, acceptors: bytes | None
) -> None:
    ends = make_pair(dialers, acceptors)
    meet(*ends)
    for end, own, others in zip(
        ends, (dialers, acceptors), (acceptors, dialers), strict=True
    ):
        assert type(end.error) is AuthenticationError
        assert end.machine.state is HandshakeState.FAILED
        assert end.machine.wanted == 0
        text = str(end.error)
        assert "ASYNCRPC_SECRET" in text
        if own and others:
            assert "different secrets" in text
        else:
            assert ("this worker has none" if others else "peer has no secret") in text


def test_empty_secret_counts_as_no_secret() -> None:
    ends = make_pair(b"", None)
    meet(*ends)
    assert all(end.machine.state is HandshakeState.PROVED for end in ends)


def test_secret_does_not_travel() -> None:
    ends = make_pair()
    preface = ends[0].machine.start()
    answer = ends[1].machine.receive(preface)
    proof = ends[0].machine.receive(answer)
    last = ends[1].machine.receive(proof)
    assert ends[0].machine.receive(last) == b""
    assert b"secret" not in preface + answer + proof + last


@pytest.mark.parametrize("ticket", [b"", b"t" * TICKET_BYTES])
def test_acceptor_reveals_nothing_of_a_key_before_the_proof(ticket: bytes) -> None:
    """Whatever its secret is, a stranger reads the same bytes: it can test no guess."""
    mode = TOKEN_MODE if ticket else 1
    liar = PREFACE.pack(PREFACE_MAGIC, VERSION, mode, 0, b"\7" * 32)
    heard = set()
    for key in (b"secret", b"another", b"z" * 64):
        keys = {ticket: key} if ticket else {}
        acceptor = Handshake(Role.ACCEPTOR, key, b"\2" * 32, key_of=keys.get)
        sent = acceptor.receive(liar)
        if ticket:
            sent += acceptor.receive(ticket)
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            acceptor.receive(bytes(PROOF_BYTES))
        heard.add(sent + acceptor.farewell)
    assert len(heard) == 1


class TestAttacks:
    def test_proof_cannot_be_reflected(self) -> None:
        """Sent back to its maker it names the wrong role."""
        dialer, _ = make_pair()
        liar = PREFACE.pack(PREFACE_MAGIC, VERSION, 1, 0, b"\x07" * 32)
        proof = dialer.machine.receive(liar)
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            dialer.machine.receive(proof)

    def test_preface_cannot_be_reflected(self) -> None:
        dialer, _ = make_pair()
        with pytest.raises(AuthenticationError, match="a reflection"):
            dialer.machine.receive(dialer.machine.start())
        assert dialer.machine.state is HandshakeState.FAILED

    def test_proof_of_a_dialer_cannot_be_replayed(self) -> None:
        dialer, acceptor = make_pair()
        recorded = dialer.machine.start()
        proof = dialer.machine.receive(acceptor.machine.receive(recorded))
        again = End(Role.ACCEPTOR, b"secret", 3)
        again.machine.receive(recorded)
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            again.machine.receive(proof)

    def test_proof_of_an_acceptor_cannot_be_replayed(self) -> None:
        dialer, acceptor = make_pair()
        answer = acceptor.machine.receive(dialer.machine.start())
        proof = acceptor.machine.receive(dialer.machine.receive(answer))
        again = End(Role.DIALER, b"secret", 3)
        again.machine.receive(answer)
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            again.machine.receive(proof)

    @pytest.mark.parametrize("bit", range(8 * PREFACE.size))
    def test_preface_changed_on_the_way_is_noticed(self, bit: int) -> None:
        dialer, acceptor = make_pair()
        preface = bytearray(dialer.machine.start())
        preface[bit // 8] ^= 1 << bit % 8
        acceptor.inbox += preface
        talk(dialer, acceptor)
        assert acceptor.error or dialer.error
        assert acceptor.machine.state is not HandshakeState.PROVED
        assert dialer.machine.state is not HandshakeState.PROVED

    @pytest.mark.parametrize("role", Role)
    @pytest.mark.parametrize("bit", range(0, 8 * PROOF_BYTES, 5))
    def test_proof_changed_on_the_way_is_noticed(self, bit: int, role: Role) -> None:
        dialer, acceptor = make_pair()
        reader, proof = (
            acceptor,
            bytearray(
                dialer.machine.receive(acceptor.machine.receive(dialer.machine.start()))
            ),
        )
        if role is Role.ACCEPTOR:
            reader, proof = dialer, bytearray(acceptor.machine.receive(bytes(proof)))
        proof[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AuthenticationError, match="different secrets"):
            reader.machine.receive(bytes(proof))


class TestBinding:
    """Proofs hold for one channel: they cannot be passed on over another."""

    @pytest.mark.parametrize("secret", SECRETS)
    def test_equal_bindings_prove_both_ends(self, secret: bytes | None) -> None:
        dialer = End(Role.DIALER, secret, 1, b"one certificate")
        acceptor = End(Role.ACCEPTOR, secret, 2, b"one certificate")
        meet(dialer, acceptor)
        assert dialer.machine.state is acceptor.machine.state is HandshakeState.PROVED

    @pytest.mark.parametrize("secret", SECRETS)
    @pytest.mark.parametrize(
        ("dialers", "acceptors"), list(itertools.permutations((b"", b"a", b"b"), 2))
    )
    def test_unequal_bindings_fail_at_both_ends(
        self, secret: bytes | None, dialers: bytes, acceptors: bytes
    ) -> None:
        dialer = End(Role.DIALER, secret, 1, dialers)
        acceptor = End(Role.ACCEPTOR, secret, 2, acceptors)
        meet(dialer, acceptor)
        for end, binding in ((dialer, dialers), (acceptor, acceptors)):
            assert type(end.error) is AuthenticationError
            assert (
                "terminates TLS with its own certificate" in str(end.error)
            ) is bool(binding)

    def test_binding_may_be_set_once_the_channel_exists(self) -> None:
        dialer, acceptor = make_pair()
        dialer.machine.binding = acceptor.machine.binding = b"later"
        meet(dialer, acceptor)
        assert dialer.machine.state is acceptor.machine.state is HandshakeState.PROVED


class TestBeginning:
    """Who is no worker is refused at the first byte that says so."""

    @pytest.mark.parametrize("length", range(5))
    def test_slow_worker_is_awaited(self, length: int) -> None:
        _, acceptor = make_pair()
        acceptor.machine.check_beginning(PREFACE_MAGIC[:length])
        assert acceptor.machine.state is HandshakeState.PREFACE

    @pytest.mark.parametrize("beginning", [b"G", b"AS", b"ARPX", b"ARPX rest", b"\0"])
    def test_stranger_is_refused_at_once(self, beginning: bytes) -> None:
        for end in make_pair():
            with pytest.raises(MalformedError, match="not an asyncrpc worker"):
                end.machine.check_beginning(beginning)
            assert end.machine.state is HandshakeState.FAILED
            assert end.machine.farewell == b""

    @pytest.mark.parametrize("beginning", [b"\x16", b"\x16\x03\x01\x02", b"\x15\x03"])
    def test_tls_client_is_refused_with_advice(self, beginning: bytes) -> None:
        """And answered: with what its TLS takes for none."""
        for end in make_pair():
            with pytest.raises(AuthenticationError, match=r"Options\(tls=\.\.\.\)"):
                end.machine.check_beginning(beginning)
            assert end.machine.state is HandshakeState.FAILED
        assert end.machine.farewell.startswith(PREFACE_MAGIC)

    def test_later_records_may_begin_with_any_byte(self) -> None:
        _, acceptor = make_pair()
        acceptor.machine.receive(PREFACE.pack(PREFACE_MAGIC, VERSION, 1, 0, bytes(32)))
        acceptor.machine.check_beginning(b"\x16\x03 any proof")
        assert acceptor.machine.state is HandshakeState.PROOF


class TestOtherPeers:
    @pytest.mark.parametrize("old_role", Role)
    def test_another_version_is_named_at_both_ends(self, old_role: Role) -> None:
        """The end of the other version is played here by its preface alone."""
        preface = PREFACE.pack(PREFACE_MAGIC, 9, 1, 0, bytes(32))
        ends = dict(zip(Role, make_pair(), strict=True))
        ours = ends[Role.ACCEPTOR if old_role is Role.DIALER else Role.DIALER].machine
        with pytest.raises(VersionMismatchError, match=rf"version 9 .*, we {VERSION}"):
            ours.receive(preface)
        assert ours.state is HandshakeState.FAILED
        preface_fields = PREFACE.unpack_from(ours.start() or ours.farewell)
        assert preface_fields[:2] == (PREFACE_MAGIC, VERSION)

    def test_stranger_gets_no_answer(self) -> None:
        _, acceptor = make_pair()
        stranger = b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".ljust(40)
        with pytest.raises(MalformedError, match="first bytes are b'GET '"):
            acceptor.machine.receive(stranger)
        assert (acceptor.machine.farewell, acceptor.machine.wanted) == (b"", 0)

    def test_refused_end_sends_nothing_more(self) -> None:
        dialer, acceptor = make_pair(b"one", b"other")
        meet(dialer, acceptor)
        assert acceptor.machine.farewell == REFUSAL
        assert dialer.machine.farewell == b""
        assert "refused our proof" in str(dialer.error)

    def test_dialer_that_refuses_the_acceptor_proves_nothing(self) -> None:
        dialer, acceptor = make_pair()
        acceptor.machine.receive(dialer.machine.start())
        with pytest.raises(AuthenticationError, match="does not prove itself"):
            acceptor.machine.receive(REFUSAL)
        assert acceptor.machine.farewell == b""


@pytest.mark.parametrize("is_cautious", [False, True])
def test_hello_follows_the_own_proof_or_that_of_the_peer(*, is_cautious: bool) -> None:
    dialer = Handshake(Role.DIALER, b"s", b"\1" * 32, is_cautious=is_cautious)
    acceptor = Handshake(Role.ACCEPTOR, b"s", b"\2" * 32)
    proof = dialer.receive(acceptor.receive(dialer.start()))
    assert (dialer.state is dialer.introduces_at) is not is_cautious
    assert acceptor.state is not acceptor.introduces_at
    dialer.receive(acceptor.receive(proof))
    assert (dialer.state is dialer.introduces_at) is is_cautious
    assert acceptor.state is acceptor.introduces_at


class TestUse:
    @pytest.mark.parametrize("nbytes", [0, PREFACE.size - 1, PREFACE.size + 1])
    def test_record_must_have_the_wanted_length(self, nbytes: int) -> None:
        _, acceptor = make_pair()
        with pytest.raises(LocalProtocolError, match=rf"{nbytes} bytes .* takes 40"):
            acceptor.machine.receive(bytes(nbytes))
        assert acceptor.machine.state is HandshakeState.PREFACE

    @pytest.mark.parametrize("secret", [b"secret", b"wrong"])
    def test_record_after_the_end_is_refused(self, secret: bytes) -> None:
        dialer, acceptor = make_pair(secret)
        meet(dialer, acceptor)
        for end in (dialer, acceptor):
            for record in (b"", bytes(PROOF_BYTES)):
                with pytest.raises(LocalProtocolError, match="takes 0"):
                    end.machine.receive(record)

    def test_nonce_must_have_its_length(self) -> None:
        with pytest.raises(LocalProtocolError, match="32 bytes"):
            Handshake(Role.DIALER, None, b"short")


# --- a token in place of the secret --------------------------------------------------

TICKET, KEY = b"t" * TICKET_BYTES, b"k" * 32


def with_token(
    acceptor_secret: bytes | None, keys: dict[bytes, bytes], key: bytes = KEY
) -> tuple[End, End]:
    dialer, acceptor = End(Role.DIALER, None, 1), End(Role.ACCEPTOR, None, 2)
    dialer.machine = Handshake(Role.DIALER, key, b"\1" * 32, ticket=TICKET)
    acceptor.machine = Handshake(
        Role.ACCEPTOR, acceptor_secret, b"\2" * 32, key_of=keys.get
    )
    meet(dialer, acceptor)
    return dialer, acceptor


@pytest.mark.parametrize("secret", SECRETS)
def test_valid_token_takes_the_place_of_the_secret(secret: bytes | None) -> None:
    dialer, acceptor = with_token(secret, {TICKET: KEY})
    for end in (dialer, acceptor):
        assert end.error is None
        assert end.machine.state is HandshakeState.PROVED
        assert end.machine.ticket == TICKET
    assert dialer.machine.token == acceptor.machine.token


@pytest.mark.parametrize(
    ("keys", "words"),
    [({}, "is not valid here"), ({TICKET: b"x" * 32}, "refused our proof")],
)
def test_invalid_token_is_refused_at_both_ends(
    keys: dict[bytes, bytes], words: str
) -> None:
    dialer, acceptor = with_token(b"secret", keys)
    assert isinstance(dialer.error, AuthenticationError)
    assert isinstance(acceptor.error, AuthenticationError)
    errors = f"{dialer.error} {acceptor.error}"
    assert words in errors or "proof is wrong" in errors


def test_key_of_a_token_does_not_travel() -> None:
    dialer = Handshake(Role.DIALER, KEY, b"\1" * 32, ticket=TICKET)
    acceptor = Handshake(Role.ACCEPTOR, b"s", b"\2" * 32, key_of={TICKET: KEY}.get)
    opening = dialer.start()
    assert acceptor.receive(opening[: PREFACE.size]) == b""
    answer = acceptor.receive(opening[PREFACE.size :])
    proof = dialer.receive(answer)
    last = acceptor.receive(proof)
    assert dialer.receive(last) == b""
    assert KEY not in opening + answer + proof + last


def test_dialer_with_the_secret_refuses_a_token_preface() -> None:
    dialer = Handshake(Role.DIALER, b"secret", b"\1" * 32)
    preface = PREFACE.pack(PREFACE_MAGIC, VERSION, TOKEN_MODE, 0, b"\2" * 32)
    with pytest.raises(AuthenticationError):
        dialer.receive(preface)
