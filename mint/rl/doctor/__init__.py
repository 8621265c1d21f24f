"""Why is it not learning? Findings from what a run directory holds: evidence, remedy, likeliest cause first.

`diagnose(run_dir)` reads a run; `Watch` says the same while it goes. One file a kind of finding, each a pure function
of `Evidence`.
"""

from mint.rl.doctor.finding import Finding
from mint.rl.doctor.report import diagnose, examine
from mint.rl.doctor.watch import Watch

__all__ = ["Finding", "Watch", "diagnose", "examine"]
