"""Messages, sockets, keys, metrics, files, start and end of processes.

Imported by every process. Imports only `config`.
"""
