"""`python -m cbatch` is `cbatch`."""

import sys

from cbatch.cli.app import main

sys.exit(main())
