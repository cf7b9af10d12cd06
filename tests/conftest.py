"""What every test runs under."""

from __future__ import annotations

import os

# Before anything imports transformers: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anything imports torch: threads wait for each other longer than tiny models compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
