"""`python app` from a checkout is `selfspec app`."""

import sys

from selfspec.cli.main import app

app(["app", *sys.argv[1:]], prog_name="python app")
