"""Conversations on their way to training: captured, read, cleaned, redacted, and answered by the target."""
