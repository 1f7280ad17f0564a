"""`python examples/demo`: the folder above is where Python finds the package, also in the robots' processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.command import main

sys.exit(main())
