"""What the recipes share: settings, packed rows, losses, the training loop, evaluation, checkpoints and cards."""
