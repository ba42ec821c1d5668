"""Entry of an environment's processes: `python .../child.py CONTROL LIFE OPTIONS`, by path.

Runs under any Python from 3.9 with nothing but the standard library, and finds our other files
beside itself. `ForkClient` starts one per environment:

    host --- keeper --- fork server --- keeper --- episode (and what it starts)
                                    --- keeper --- episode ...

| process | waits for | does |
|---|---|---|
| fork server (`fork_server.py`) | a datagram of the host on CONTROL | imports the module; forks |
| episode (`fork_server.py`) | messages of the host | runs the user's code once |
| keeper (`keeper.py`) | its child; the host on LIFE | logs output; kills all below it |
"""

import json
import os
import socket
import sys
import types


def main() -> None:
    """Fork the fork server and keep it."""
    if sys.version_info < (3, 9):  # noqa: UP036  The interpreter is the user's.
        sys.exit("environments need Python 3.9 or later, this is " + sys.version.split()[0])
    control = socket.socket(fileno=int(sys.argv[1]))
    life = socket.socket(fileno=int(sys.argv[2]))
    options = json.loads(sys.argv[3])
    # Modules beside this file must not hide the user's.
    sys.path[0] = os.getcwd()
    # Our packages may be missing, or be others than those of the host.
    package = types.ModuleType("verification")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["verification"] = package
    from verification.environments.fork_server import ForkServer
    from verification.environments.keeper import Keeper

    server = ForkServer(control, **options)
    Keeper(life, options["target"], options["log_path"]).keep(server.run, [control])


if __name__ == "__main__":
    main()
