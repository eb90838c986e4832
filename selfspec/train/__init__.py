"""What the recipes share: conversations in, answers of the target's own, tokens with a loss mask, packed rows."""
