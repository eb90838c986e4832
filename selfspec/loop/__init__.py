"""The decode loop: prompt -> prefill -> draft a candidate tree -> verify -> accept -> compact -> text."""
