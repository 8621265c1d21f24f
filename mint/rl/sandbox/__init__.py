"""A local sandbox for untrusted Python, without Docker or an account; `Sandbox` is the public noun."""

from mint.rl.sandbox.isolation import IsolationUnavailable
from mint.rl.sandbox.process import Limits, Result
from mint.rl.sandbox.sandbox import Case, Outcome, Sandbox, TestReport

__all__ = ["Case", "IsolationUnavailable", "Limits", "Outcome", "Result", "Sandbox", "TestReport"]
