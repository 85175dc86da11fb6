"""`python -m mlxgen` is the `mlxgen` command."""

import sys

from mlxgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
