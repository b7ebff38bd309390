"""`python -m tests.faults.suite`."""

import signal
import sys

from tests.faults.suite.run import main

# Ended from outside it takes its stack along, as with Ctrl-C.
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(main())
