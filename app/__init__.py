"""The page: drafters race on one prompt, and every step can be looked into. It needs gradio, which the library does not."""
