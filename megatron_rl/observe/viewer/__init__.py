"""`megatron-rl view RUN`: recorded rollouts in a browser, served on loopback alone.

`server.py` answers, `index.py` knows which rollouts there are, `tokens.py` what their tokens say,
`static/` is what the browser gets. May import config and protocol.
"""
