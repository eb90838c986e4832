"""The paged KV cache: which blocks a row has, and the tensors of those blocks."""
