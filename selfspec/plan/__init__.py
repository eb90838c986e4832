"""Whether a target and its drafter fit a GPU, and how fast they should be, by formulas."""
