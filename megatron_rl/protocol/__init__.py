"""What two processes must agree on: messages, wire format, configuration, metrics, start-up."""
