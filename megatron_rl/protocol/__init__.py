"""What processes say to each other: messages, sockets, keys, metrics, files, start and end.

Imported by every process. May import config alone.
"""
