"""`python -m selfspec`, for where the `selfspec` script is not on the path."""

from selfspec.cli.main import app

app(prog_name="selfspec")
