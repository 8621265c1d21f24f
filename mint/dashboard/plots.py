"""A chart on a page: redrawn only when it changed, its clicks and its crosshair joined to the others."""

from __future__ import annotations

import json

from nicegui import ui

from mint.dashboard.charts import Options


class Plot:
    def __init__(self, options: Options, opens: str | None = None, group: str | None = None) -> None:
        """A click opens the address `opens` with the step put behind it. Plots of one group share a crosshair."""
        self._drawn = options
        self._chart = ui.echart(options)
        script = f"mint.chart({self._chart.id}, {json.dumps(opens)}, {json.dumps(group)})"
        client = self._chart.client
        client.on_connect(lambda: client.run_javascript(script))
        if client.has_socket_connection:
            client.run_javascript(script)

    def draw(self, options: Options) -> None:
        if options == self._drawn:
            return
        self._drawn = options
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()
