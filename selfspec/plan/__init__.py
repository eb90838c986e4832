"""Whether a target and its drafter fit on an accelerator, and how fast they should be, by formulas."""
