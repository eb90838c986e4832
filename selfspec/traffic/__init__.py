"""Text on its way to training: conversations, cleaning, redaction, the target's own answers, captured requests."""
