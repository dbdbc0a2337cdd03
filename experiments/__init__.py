"""Programs on absl flags: `python -m experiments.NAME --help`."""

import signal
import sys

# Python says "-m" as long as it imports the packages of the program that it was asked to run. Until
# `settings.start` Ctrl-C ends it as other signals do, without a traceback of imports.
if sys.argv[0] == '-m' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
