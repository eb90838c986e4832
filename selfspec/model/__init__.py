"""The target: a frozen Hugging Face model, and what makes it fast to decode with."""
