"""`megatron-rl view RUN`: recorded rollouts in a browser, served on loopback only.

`server.py` answers requests, `index.py` finds rollouts, `tokens.py` reads their tokens, `static/`
has the page. May import config and protocol.
"""
