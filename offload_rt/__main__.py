"""`python -m offload_rt`: the same as `offload-rt`."""

import sys

from offload_rt.cli import main

sys.exit(main())
