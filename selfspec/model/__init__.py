"""The stages prefill and verify: a frozen Hugging Face model, the target, and what makes it fast to decode with."""
