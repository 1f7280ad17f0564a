"""`python -m reflex_runtime` is the command `reflex`."""

import sys

from reflex_runtime.cli import main

sys.exit(main())
