"""CURVE keys, which authenticate and encrypt the sockets of a run.

Used by every process of a multi-node run. The launcher makes them; all processes read one file.
"""

from pathlib import Path
from typing import NamedTuple

import zmq.auth

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import PRIVATE_FILE, PRIVATE_FOLDER

_NAME = "run"
_AGAIN = "remove its folder, and run `megatron-rl prepare` again"


class Keys(NamedTuple):
    """The key pair of all sockets that a run binds.

    The public key is secret too: CurveZMQ (rfc.zeromq.org/spec/26) never sends it, and a client
    without it cannot connect.
    """

    public: bytes
    secret: bytes


def make_keys(folder: Path) -> None:
    """Write new keys to a new folder that only this user can read. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
    for path in zmq.auth.create_certificates(folder, _NAME):
        Path(path).chmod(PRIVATE_FILE)


def load_keys(folder: Path | None) -> Keys | None:
    """The keys of a folder; None for no folder. Raises InputError if there are none."""
    if folder is None:
        return None
    path = folder / f"{_NAME}.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is missing or damaged: {error}; {_AGAIN}") from error
    if secret is None:
        raise InputError(f"{path} holds no secret key; {_AGAIN}")
    return Keys(public, secret)
