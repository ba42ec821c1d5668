"""The command line: one thin file a command, no logic. Imported by nothing else."""
