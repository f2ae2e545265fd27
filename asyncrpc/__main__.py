"""`python -m asyncrpc`: the command line, if its script is not on the path."""

import sys

from asyncrpc.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
