"""Who may import whom: the table of CONTRIBUTING.md, read off the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mint"

FLOOR = {
    "errors",
    "types",
    "wire",
    "proto",
    "config",
    "backend",
    "chat",
    "checks",
    "columns",
    "doorbell",
    "mistakes",
    "arguments",
    "machine",
    "version",
}
# room -> the rooms of mint it may import at all, then packages it must never import
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "floor": (FLOOR, {"torch", "fastapi", "ray", "nicegui"}),
    "client": (FLOOR | {"client", "local"}, {"torch", "fastapi", "ray"}),
    "engine": (
        {"errors", "types", "backend", "checks", "columns", "machine", "engine"},
        {"fastapi", "ray", "pydantic", "httpx", "google", "sqlalchemy"},
    ),
    "server": (FLOOR | {"server"}, {"torch", "ray"}),
    "rl": (FLOOR | {"client", "rl", ""}, {"torch", "fastapi", "ray"}),
    "recipes": (FLOOR | {"client", "rl", "recipes", ""}, {"torch", "fastapi", "ray"}),
    "dashboard": (FLOOR | {"client", "local", "rl", "dashboard"}, {"torch", "ray", "sqlalchemy", "transformers"}),
    "cli": (FLOOR | {"client", "local", "engine", "server", "rl", "recipes", "dashboard", "cli", ""}, set()),
}
# What the dashboard reads of a run is its directory, its ledger and its doctor: never the loop.
OF_RL_FOR_THE_DASHBOARD = ("mint.rl.rundir", "mint.rl.ledger", "mint.rl.doctor")
# `forward_backward_custom` hands the user's loss torch tensors, inside the function.
TORCH_INSIDE_FUNCTIONS = {"client/custom_loss.py", "types/tensors.py"}


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    if first.endswith(".py"):
        stem = first.removesuffix(".py")
        return "client" if stem in ("local", "__init__", "tinker") else "floor"
    return "floor" if first in FLOOR else first


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "mint":
            names.update(f"mint.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def source_files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "models" not in p.relative_to(ROOT).parts)


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_imports_only_what_its_room_may(path: Path) -> None:
    rooms, banned = ROOMS[room_of(path)]
    if str(path.relative_to(ROOT)) in TORCH_INSIDE_FUNCTIONS:
        banned = banned - {"torch"}
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        assert top not in banned, f"{path.name} imports {name}, which its room never may"
        public_name_of_mint = rest[:1].isupper()
        if top == "mint" and not public_name_of_mint:
            assert rest.partition(".")[0] in rooms, f"{path.name} imports {name}, which is not open to its room"


def test_the_dashboard_sees_of_rl_only_the_run_directory_the_ledger_and_the_doctor() -> None:
    used = {name for path in (ROOT / "dashboard").glob("*.py") for name in imports_of(path)}
    used = {name for name in used if name.startswith("mint.rl")}
    assert used and used <= set(OF_RL_FOR_THE_DASHBOARD), used


def test_importing_mint_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import mint, mint.types, mint.cli.__main__, sys; "
        "print(sorted({'torch', 'fastapi', 'ray', 'transformers', 'nicegui'} & set(sys.modules)))"
    )
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert heavy == "[]"
