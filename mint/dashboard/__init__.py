"""Pages over run directories and a server's own API: `mount(app)` puts them into a FastAPI application.

It reads run directories (`mint.rl.rundir`, the ledger, the doctor) and asks a server over HTTP; it holds no tensor and
knows nothing of a server's insides. All scripts, styles and fonts come from installed packages.
"""

from mint.dashboard.mounting import mount

__all__ = ["mount"]
