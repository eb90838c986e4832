"""The commands. Each reads options, calls the library, and shows the result."""
