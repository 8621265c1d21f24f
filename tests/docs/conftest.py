"""The run and the server of the command line's tests."""

from tests.cli.conftest import run, tiny_server

__all__ = ["run", "tiny_server"]
