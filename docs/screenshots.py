"""Screenshots of the dashboard for docs/dashboard.md, taken with a real browser.

    python benchmarks/demo_runs.py runs/demo
    python docs/screenshots.py runs/demo docs/images

Needs Playwright for Python and a Chromium (its path in CHROMIUM, else Debian's).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SIZES = {"laptop": (1366, 768), "wide": (1920, 1080)}
PAGES = {
    "runs": "/",
    "run": "/run/addition/seed-0",
    "rollouts": "/step/addition/seed-0?step=12",
    "surprise": "/step/addition/seed-0?step=12",
    "agent": "/step/calculator?step=3",
    "ledger": "/ledger/addition/seed-0",
    "doctor": "/doctor/addition-cut-off",
    "playground": "/playground",
    "server": "/server",
    "alarms": "/run/addition-too-fast",
}
KEPT = {
    ("runs", "dark"), ("run", "light"), ("surprise", "light"), ("rollouts", "dark"), ("agent", "dark"),
    ("ledger", "light"), ("doctor", "dark"), ("playground", "light"), ("server", "dark"), ("alarms", "light"),
}  # fmt: skip


@contextmanager
def served(runs: str) -> Iterator[str]:
    """The address of a dashboard."""
    command = [sys.executable, "-m", "mint.cli", "dashboard", runs, "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = next(line for line in child.stdout if "http://" in line)
        try:
            yield next(word for word in line.split() if word.startswith("http://"))
        finally:
            child.terminate()


def prepare(page: Page, name: str) -> None:
    """Brings a page into the state worth showing."""
    if name == "playground":
        page.wait_for_selector(".pair", timeout=120_000)
        page.locator(".side input").nth(1).fill("calculator, step 16")
        page.locator(".q-menu .q-item").first.click()
        page.locator("textarea").first.fill("What is 47 + 38?")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "[...document.querySelectorAll('.side .meta')].every(e => e.innerText.includes('tokens'))"
            " && !document.querySelector('.pair').innerText.includes('▍')",
            timeout=180_000,
        )
    elif name in ("rollouts", "surprise", "agent"):
        page.wait_for_selector(".t")
        page.locator("select").select_option("spread")
        page.locator(".groupline").first.click()
        page.keyboard.press("2" if name == "surprise" else "1")
        page.wait_for_timeout(400)
        page.locator(".rollout .t").nth(2).hover()
    else:
        page.wait_for_timeout(1500)
    page.wait_for_timeout(500)


def main() -> None:
    runs, folder = sys.argv[1], Path(sys.argv[2])
    everything = "--all" in sys.argv
    only = [word for word in sys.argv[3:] if not word.startswith("--")]
    folder.mkdir(parents=True, exist_ok=True)
    with served(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        for size, (width, height) in SIZES.items() if everything else [("laptop", SIZES["laptop"])]:
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                for name, path in PAGES.items():
                    if (only and name not in only) or not (everything or (name, theme) in KEPT):
                        continue
                    page = context.new_page()
                    page.on("console", lambda message: message.type == "error" and print(message.text))
                    page.on("pageerror", lambda error: print(error))
                    page.goto(address + path)
                    prepare(page, name)
                    suffix = f"-{size}" if everything else ""
                    page.screenshot(path=folder / f"dashboard-{name}-{theme}{suffix}.png")
                    page.close()
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
