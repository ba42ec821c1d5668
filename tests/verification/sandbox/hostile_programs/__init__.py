"""Programs that attack the sandbox: each prints what is expected only if its attack succeeds."""
