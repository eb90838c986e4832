"""Decoding: draft a candidate tree, verify it in one target pass, accept, compact, commit."""
