"""How much other programs use the processors of this one."""

from __future__ import annotations

import os
import time

BUSY_BEFORE = 1.5
"""Load average per core from which a machine was busy before this program began."""
BUSY_SHARE = 0.25
"""Share of the cores' time from which the work of others slows a run down."""
SHORTEST_S = 1.0
"""Seconds after which that share is known well enough."""


class OtherWork:
    """The work of other programs: the load average before its creation, and their processor time since then.

    Only the cores on which this process may run count.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._load = os.getloadavg()[0]  # before this program adds to it
        self.restart()

    def restart(self) -> None:
        """Measures processor time from now on."""
        self._began, self._busy, self._own = time.monotonic(), self._busy_seconds(), _own_seconds()

    def note(self) -> str | None:
        """Returns a note on the other work; None for little."""
        cores = len(self._cores)
        if self._load > BUSY_BEFORE * cores:
            return (
                f"other work slows it down: the load average was {self._load:.1f} on {cores} cores before it"
            )
        passed = time.monotonic() - self._began
        others = (self._busy_seconds() - self._busy) - (_own_seconds() - self._own)
        if passed < SHORTEST_S or (share := others / (passed * cores)) < BUSY_SHARE:
            return None
        return f"other work slows it down: it took {min(share, 1):.0%} of the time of {cores} cores meanwhile"

    def _busy_seconds(self) -> float:
        """Returns the time for which these cores have worked for any program."""
        import psutil  # here, as a program's help need not wait for it

        times = psutil.cpu_times(percpu=True)
        cores = (times[core] for core in self._cores if core < len(times))
        return float(sum(core.user + core.system + core.nice for core in cores))


def _own_seconds() -> float:
    """Returns the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])
