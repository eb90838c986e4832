"""Draft heads: trainable modules that guess the target's next tokens, by the name their config carries.

A head imports no engine code, so that it trains and loads alone. Import this package as `selfspec.heads`.
"""

HEADS: dict[str, type] = {}
