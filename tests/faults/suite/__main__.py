"""`python -m tests.faults.suite`."""

import sys

from tests.faults.suite.run import main

sys.exit(main())
