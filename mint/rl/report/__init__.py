"""A run as one HTML file: no network, nothing outside the file, everything that a run wrote escaped.

`report_page(run)` is the page. Curves are in `charts`, rollouts in `samples`, findings, settings and the rest in
`sections`, the look in `style`. Everything is read from the run directory.
"""

from mint.rl.report.page import report_page

__all__ = ["report_page"]
