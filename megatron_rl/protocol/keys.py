"""CURVE keys of a run: who has them may speak with its sockets, and nobody else can read along.

Used by every process of a run on several nodes. The launcher makes them; all read the same file.
"""

from pathlib import Path
from typing import NamedTuple

import zmq.auth

_NAME = "run"


class Keys(NamedTuple):
    """The key pair of all sockets that a run binds.

    The public key is as secret as the other: CurveZMQ (rfc.zeromq.org/spec/26) never sends it, and
    a client that does not know it cannot open a connection.
    """

    public: bytes
    secret: bytes


def make_keys(folder: Path) -> None:
    """Write new keys into a folder that only this user can read. Raises OSError if it exists."""
    folder.mkdir(mode=0o700, parents=True)
    zmq.auth.create_certificates(folder, _NAME)


def load_keys(folder: Path | None) -> Keys | None:
    """The keys of a folder; None for none. Raises OSError or ValueError when it holds no keys."""
    if folder is None:
        return None
    public, secret = zmq.auth.load_certificate(folder / f"{_NAME}.key_secret")
    if secret is None:
        raise ValueError(f"{folder} holds no secret key: have the launcher make the keys again")
    return Keys(public, secret)
