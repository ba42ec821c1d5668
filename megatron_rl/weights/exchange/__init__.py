"""Shared parts of both ends of an exchange of weights: plan, transport, receiver.

Used by trainer ranks and by the ranks of an engine, which have torch and no other framework of
ours. May import protocol and weights.layout.
"""
