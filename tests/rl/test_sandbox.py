"""The sandbox: an attack is contained and earns nothing, an honest solution earns what plain Python would give it.

The strong mode needs bubblewrap; without it these tests fail, with the hint how to install it, rather than skip.
"""

import asyncio
import json
import os
import pickle
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint.errors import BadRequest, Internal
from mint.rl.sandbox import Case, IsolationUnavailable, Limits, Sandbox
from mint.rl.sandbox.child import decode, encode
from mint.rl.sandbox.isolation import Interpreter, find_jail
from tests.waiting import eventually

T = TypeVar("T")

LIMITS = Limits(seconds=20, cpu_seconds=5, memory_mb=256, processes=6, disk_mb=4, output_bytes=50_000)
SHORT = Limits(seconds=2, memory_mb=256)


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder of this machine that any user could read and change, were it not for the sandbox."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    (folder / "secret.txt").write_text("hunter2")
    (folder / "secret.txt").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


# --------------------------------------------------------------------------------------------------------------------
# A program


def test_a_program_reads_its_input_and_its_output_and_exit_code_come_back(sandbox: Sandbox) -> None:
    assert sandbox.run("print(len(input()))", stdin="x" * 10**6).stdout == "1000000\n"
    result = sandbox.run("import sys\nprint(input()[::-1])\nprint('warned', file=sys.stderr)\nsys.exit(3)", stdin="abc")
    assert (result.stdout, result.stderr, result.exit_code) == ("cba\n", "warned\n", 3)
    assert (result.status, result.isolation) == ("failed", "bubblewrap")
    assert sandbox.run("print('ü')").stdout == "ü\n"
    assert sandbox.run("import sys; sys.exit(0)").status == "ok"
    assert "ZeroDivisionError" in sandbox.run("1/0").stderr


def test_the_network_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)"
        subprocess.run([find_jail(True, None).interpreter.executable, "-c", code], check=True)
        result = sandbox.run(code)
    assert result.status == "failed"
    assert "Network is unreachable" in result.stderr or "refused" in result.stderr


def test_files_of_this_machine_cannot_be_seen_changed_or_deleted(sandbox: Sandbox, public_folder: Path) -> None:
    result = sandbox.run(
        f"""
import os, shutil
for path in ({str(public_folder)!r}, "/etc/passwd", "/root", "/home", "/var", {str(Path(__file__).parent)!r}):
    assert not os.path.exists(path), path
try:
    os.makedirs({str(public_folder)!r})
except OSError:
    pass
for path in ("/x", "/usr/x", "/dev/x", "/etc/x", "/proc/x", "/usr/bin/x"):
    try:
        open(path, "w")
    except OSError:
        continue
    raise AssertionError(path)
for path in ({str(public_folder)!r}, "/usr/bin", "/dev", "/etc", "/proc/1"):
    shutil.rmtree(path, ignore_errors=True)
print("did my worst")
"""
    )
    assert result.stdout == "did my worst\n", result.stderr
    assert (public_folder / "secret.txt").read_text() == "hunter2"
    assert Path("/usr/bin/env").exists()


def test_nothing_written_outlives_its_run(sandbox: Sandbox) -> None:
    code = "import os\nprint(os.listdir('.'), os.listdir('/dev/shm'))\nopen('/tmp/a', 'w')\nopen('/dev/shm/b', 'w')"
    assert [sandbox.run(code).stdout for _ in range(2)] == ["[] []\n"] * 2


def test_secrets_in_the_environment_stay_outside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    result = sandbox.run(
        "import glob, os\nprint(dict(os.environ))\nprint([open(p, 'rb').read() for p in glob.glob('/proc/*/environ')])"
    )
    assert "HOME" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


def test_only_the_three_standard_descriptors_are_handed_in(sandbox: Sandbox) -> None:
    assert sandbox.run("import os; print(sorted(os.listdir('/proc/self/fd')))").stdout == "['0', '1', '2', '3']\n"


@pytest.mark.parametrize(
    ("code", "sign"),
    {
        "memory": ("x = bytearray(10**9)", "MemoryError"),
        "one huge file": ("open('a', 'wb').write(bytes(10**7))", "File too large"),
        "many files": ("for i in range(9): open(str(i), 'wb').write(bytes(10**6))", "No space left"),
        "shared memory": ("for i in range(9): open(f'/dev/shm/{i}', 'wb').write(bytes(10**6))", "No space left"),
        "open files": ("files = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        "threads": (
            "from threading import Thread\nimport time\n"
            "for _ in range(20): Thread(target=time.sleep, args=(100,), daemon=True).start()",
            "can't start new thread",
        ),
        "recursion": ("def f(): f()\nf()", "RecursionError"),
        "new namespaces": (
            "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())",
            "No space left",
        ),
        "mounts": (
            "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0, 'refused'",
            "refused",
        ),
    }.values(),
    ids=lambda value: "",
)
def test_a_limit_stops(sandbox: Sandbox, code: str, sign: str) -> None:
    result = sandbox.run(code)
    assert result.status == "failed"
    assert sign in result.stderr


def test_unlimited_recursion_in_c_ends_the_child_only(sandbox: Sandbox) -> None:
    code = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return sorted([1], key=f)\nf(1)"
    assert Sandbox(Limits(memory_mb=64)).run(code).status == "failed"


def in_time(run: Callable[[Sandbox], T], has_begun: Callable[[T], object]) -> T:
    """In a short time, or in a longer one where the machine was too slow to begin."""
    result = run(Sandbox(SHORT))
    return result if has_begun(result) else run(Sandbox(LIMITS))


def test_an_endless_loop_ends_at_the_wall_clock_or_at_the_cpu_limit() -> None:
    lasting = "print('here', flush=True)\nimport time\ntime.sleep(1000)"
    result = in_time(lambda box: box.run(lasting), lambda r: r.stdout)
    assert (result.status, result.stdout, result.exit_code) == ("timeout", "here\n", None)
    closed = Sandbox(SHORT).run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1000)")
    assert closed.status == "timeout"
    busy = Sandbox(Limits(seconds=60, cpu_seconds=1)).run("while True: pass")
    assert busy.status == "failed"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_off(sandbox: Sandbox, stream: str) -> None:
    result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 10_000)")
    assert result.status == "flooded"
    assert getattr(result, stream) == "x" * LIMITS.output_bytes


def test_a_fork_bomb_stops_at_the_process_limit_and_leaves_nobody_behind(sandbox: Sandbox) -> None:
    marker = f"survivor-{uuid.uuid4()}"
    result = sandbox.run(
        f"""
import os, sys
children = 0
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {marker!r}])
    except OSError as error:
        print(children, error, flush=True)
        break
    children += 1
"""
    )
    assert result.stdout.startswith(f"{LIMITS.processes - 1} [Errno 11]"), result
    assert result.status == "ok", "the first process ended well, the others with it"
    eventually(lambda: not survivors(marker))


def survivors(marker: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if marker in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


def test_no_other_process_can_be_seen_signalled_or_traced(sandbox: Sandbox) -> None:
    result = sandbox.run(
        f"""
import ctypes, os
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))
print(ctypes.CDLL(None).ptrace(16, {os.getpid()}, 0, 0))
print(os.getppid(), os.getuid())
os.kill(-1, 9)
"""
    )
    assert result.stdout == "[1, 2]\n-1\n1 65534\n"


def test_the_kernel_is_told_to_sacrifice_the_child_first(sandbox: Sandbox) -> None:
    assert sandbox.run("print(open('/proc/self/oom_score_adj').read())").stdout.strip() == "1000"


# --------------------------------------------------------------------------------------------------------------------
# Scores

ATTACKS = {
    "exit by os._exit": "import os\nos._exit(0)",
    "exit by sys.exit": "import sys\nsys.exit(0)",
    "exit when called": "import os\ndef double(x): os._exit(0)",
    "exit politely when called": "def double(x): raise SystemExit(0)",
    "printed verdicts": (
        "import os\nfor _ in range(9): os.write(1, b'\\x06\"\"\\n')\ndef double(x): print('\"\"'); return 0"
    ),
    "bytes on every descriptor": (
        "import os\nfor fd in range(64):\n  for text in (b'\"\"', b'{\"value\": null}', b'{\"value\": true}'):\n"
        "    try: os.write(fd, text + b'\\n')\n    except OSError: pass"
    ),
    "an object equal to everything": (
        "class Yes:\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\n"
        "  __hash__ = None\ndef double(x): return Yes()"
    ),
    "an integer equal to everything": (
        "class Yes(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def double(x): return Yes(0)"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.any = lambda x: True\n"
        "builtins.AssertionError = StopIteration\n"
        "def abs(x): return 0\ndef any(x): return True\ndef isclose(*a, **k): return True\ndef double(x): return 0.0"
    ),
    "patched modules": (
        "import sys, types\nmath = types.SimpleNamespace(isclose=lambda *a: True)\nsys.modules['math'] = math\n"
        "def double(x): return 0.0"
    ),
    "patched harness": (
        "import __main__, sys\n__main__.encode = lambda v, r: True\n__main__.failure = lambda e: {'value': True}\n"
        "frame = sys._getframe()\nwhile frame:\n  frame.f_globals['check'] = frame.f_globals['attempt'] = str\n"
        "  frame = frame.f_back\ndef double(x): return 0"
    ),
    "killing": "import os\nfor pid in (os.getppid(), 1, -1, 0): os.kill(pid, 9)",
    "an endless loop": "def double(x):\n  while True: pass",
    "a flood": "def double(x):\n  while True: print('x' * 10_000)",
    "memory": "def double(x): return 'x' * 10**10",
    "a fork bomb": "import os\ndef double(x):\n  while True: os.fork()",
    "endless nesting": "def double(x):\n  y = []\n  for _ in range(10**5): y = [y]\n  return y",
    "itself": "def double(x):\n  y = []\n  y.append(y)\n  return y",
    "a syntax error": "def double(x) return 2 * x",
    "an error at the end": "def double(x): return 2 * x\nraise ValueError",
    "nothing": "",
}
ATTACKED = [
    "assert double(21) == 42",
    Case("double(21)", 42),
    "import math\nassert math.isclose(double(1.5), 3.0)",
    "assert abs(double(0.5) - 1.0) < 1e-6",
    "assert any(double(x) == 2 * x for x in (3, 4))",
    "def check(candidate):\n    for x in range(1, 9):\n        assert candidate(x) == 2 * x\ncheck(double)",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing(attack: str) -> None:
    limits = Limits(seconds=2, memory_mb=256, processes=6, output_bytes=50_000)
    report = Sandbox(limits).run_tests(ATTACKS[attack], ATTACKED)
    assert (report.passed, report.total, report.score) == (0, len(ATTACKED), 0.0)
    assert all(outcome.message for outcome in report.outcomes)


def test_the_honest_solution_to_the_attacked_tests_earns_everything(sandbox: Sandbox) -> None:
    assert sandbox.run_tests("def double(x): return 2 * x", ATTACKED).score == 1.0


def test_expected_values_never_enter_the_process_of_the_code(sandbox: Sandbox) -> None:
    code = """
import gc, glob
def double(x):
    print([o for o in gc.get_objects() if type(o) in (list, dict, tuple)])
    print([open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline")])
    return 0
"""
    tests = [Case("double(21)", "needle-in-case"), "assert double(1) == 'needle-in-assert'"]
    report = Sandbox(Limits(output_bytes=10_000_000)).run_tests(code, tests)
    assert report.passed == 0
    assert "solution" in report.code.stdout
    assert "needle" not in report.code.stdout


def test_what_passed_before_the_end_is_kept() -> None:
    tests = [f"assert f({x}) == {x}" for x in range(4)]
    ends = {"os._exit(0)": "the code ended", "time.sleep(1000)": "timeout", "sys.exit(1)": "SystemExit: 1"}
    for end, message in ends.items():
        code = f"import os, sys, time\ndef f(x):\n    if x == 2: {end}\n    return x"
        report = in_time(lambda box, code=code: box.run_tests(code, tests), lambda r: r.outcomes[1].passed)
        assert [outcome.passed for outcome in report.outcomes] == [True, True, False, end.startswith("sys")]
        assert message in report.outcomes[2].message


CODE = """
import collections, math
LIMIT = 3
Point = collections.namedtuple("Point", "x y")
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __len__(self): return 1 + (len(self.next) if self.next else 0)
    def __eq__(self, other): return self.value == other.value
    def __getitem__(self, i): return (self.value, i)
class OwnError(ValueError): pass
def add(a, b=1): return a + b
def values(): return [None, True, 1, 2.5, "s", b"b", 1j, (1, [2]), {1: (2,)}, {3}, frozenset([4]), math.inf, 2**9000]
def count(words): return collections.Counter(words)
def squares(n): return (i * i for i in range(n))
def sort(items): items.sort()
def fill(table, seen): table["k"] = [1]; seen.add(2)
def fail(kind): raise {"key": KeyError("k"), "own": OwnError("o"), "type": TypeError("t")}[kind]
def length(node): return len(node)
def kind(value, of): return isinstance(value, of)
def origin(): return Point(0, 0)
def sum(a, b): return a * b
"""
TESTS = [
    "assert add(1) == 2",
    "assert add(1, b=2) == 4",
    "assert add('a', 'b') == 'ab' and add([1], [2]) == [1, 2]",
    "assert values()[:7] == [None, True, 1, 2.5, 's', b'b', 1j]",
    "assert values()[7:] == [(1, [2]), {1: (2,)}, {3}, frozenset([4]), math.inf, 2**9000]",
    "assert [type(v) for v in values()][:3] == [type(None), bool, int]",
    "assert origin() == (0, 0)",
    "assert count('abca') == {'a': 2, 'b': 1, 'c': 1}",
    "assert squares(3) == [0, 1, 4]",
    "assert list(squares(3)) == [0, 1, 4] and 4 in squares(9) and next(squares(1)) == 0",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "table, seen = {}, {1}\nfill(table, seen)\nassert table == {'k': [1]} and seen == {1, 2}",
    "try:\n    fail('key')\nexcept KeyError:\n    pass\nelse:\n    assert False",
    "try:\n    fail('own')\nexcept ValueError as error:\n    assert 'o' in str(error)",
    "try:\n    fail('type')\nexcept ValueError:\n    pass",
    "a, b = Node(1), Node(2)\na.next = b\nassert a.next.value == 2 and len(a) == 2 == length(a) and a[5] == (1, 5)",
    "assert Node(1) == Node(1) and not Node(1) == Node(2)",
    "assert Node(1) == 1",
    "assert kind(1, int) and not kind(1, str)",
    "assert LIMIT == 3",
    "assert undefined(1)",
    "def helper(x):\n    return add(x, x)\nassert helper(2) == 4",
    "assert helper(3) == 6",
    "assert sum(3, 4) == 12",
    "assert sum([1, 2]) == 3",
    "raise SystemExit(0)",
]


def test_verdicts_are_those_of_plain_python(sandbox: Sandbox) -> None:
    namespace: dict[str, object] = {}
    exec(CODE, namespace)
    expected = []
    for test in TESTS:
        try:
            exec(test, namespace)
            expected.append(True)
        except BaseException:
            expected.append(False)
    report = sandbox.run_tests(CODE, TESTS, entry_point="sum")
    messages = [outcome.message for outcome in report.outcomes]
    assert [outcome.passed for outcome in report.outcomes] == expected, messages
    assert expected.count(False) == 7


def test_a_built_in_keeps_its_meaning_unless_it_is_the_entry_point(sandbox: Sandbox) -> None:
    tests = ["assert sum([1, 2]) == 3", "assert sum(3, 4) == 12"]
    assert [o.passed for o in sandbox.run_tests(CODE, tests).outcomes] == [True, False]
    assert [o.passed for o in sandbox.run_tests(CODE, tests, entry_point="sum").outcomes] == [False, True]


def test_setup_belongs_to_the_tests_and_wins_over_the_code(sandbox: Sandbox) -> None:
    code = "def f(x): return x\ndef same(a, b): return True"
    tests = ["assert same(f(1), 2)"]
    assert sandbox.run_tests(code, tests).score == 1.0, "a helper that only the code defines is the code's word"
    assert sandbox.run_tests(code, tests, setup="def same(a, b): return a == b").score == 0.0
    broken = sandbox.run_tests(code, ["assert f(1) == 1"], setup="import no_such_module")
    assert "no_such_module" in broken.outcomes[0].message


def test_what_a_case_got_and_expected_is_reported(sandbox: Sandbox) -> None:
    report = sandbox.run_tests("def f(x): return [x]", [Case("f(1)", [2]), Case("f(1)", [1]), Case("f(1)", (1,))])
    assert [outcome.message for outcome in report.outcomes] == [
        "AssertionError: f(1) gave [1], expected [2]",
        "",
        "AssertionError: f(1) gave [1], expected (1,)",
    ]


def test_mistakes_of_the_caller_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(BadRequest, match="no tests"):
        sandbox.run_tests("x = 1", [])
    with pytest.raises(BadRequest, match="not Python"):
        sandbox.run_tests("x = 1", ["assert f(1) = 2"])
    with pytest.raises(BadRequest, match="not Python"):
        sandbox.run_tests("x = 1", ["pass"], setup="import")
    with pytest.raises(BadRequest, match="Fraction"):
        from fractions import Fraction

        sandbox.run_tests("x = 1", [Case("x", Fraction(1, 2))])
    with pytest.raises(BadRequest, match="seconds=0"):
        Limits(seconds=0)


hashable = st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.text())
plain_data = st.recursive(
    hashable | st.none() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.frozensets(hashable),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner)
        | st.tuples(inner, st.sets(hashable))
    ),
    max_leaves=10,
)


@given(plain_data)
def test_plain_data_crosses_the_pipe_unchanged(value: object) -> None:
    def refuse(_: object) -> int:
        raise AssertionError

    back = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
    assert type(back) is type(value)
    assert back == value


def test_subclasses_cross_as_the_plain_type_they_extend() -> None:
    class Sly(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    assert type(encode(Sly("a"), id)) is str
    assert encode(Counter("a"), id) == {"dict": [["a", 1]]}


# --------------------------------------------------------------------------------------------------------------------
# Many at once, other users, other interpreters


def test_asynchronous_runs_share_a_bounded_pool(sandbox: Sandbox) -> None:
    async def many() -> tuple[list[str], list[float]]:
        runs = [sandbox.run_async(f"print({i})") for i in range(12)]
        tests = [sandbox.run_tests_async("def f(x): return 1", [Case("f(0)", i % 2)]) for i in range(6)]
        return [r.stdout for r in await asyncio.gather(*runs)], [r.score for r in await asyncio.gather(*tests)]

    outputs, scores = asyncio.run(many())
    assert outputs == [f"{i}\n" for i in range(12)]
    assert scores == [0, 1, 0, 1, 0, 1]


def test_a_sandbox_can_be_sent_to_another_process(sandbox: Sandbox) -> None:
    assert pickle.loads(pickle.dumps(sandbox)) == sandbox


def test_a_jail_that_does_not_start_raises_instead_of_scoring(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interpreter, "argv", lambda self, source, *arguments: ["/no/such/python"])
    with pytest.raises(Internal, match="did not start"):
        sandbox.run("print(1)")
    with pytest.raises(Internal, match="did not start"):
        sandbox.run_tests("x = 1", ["assert x == 1"])


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs all the other tests as one already")
def test_an_ordinary_user_is_isolated_as_well() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
            find_jail.cache_clear()
            sandbox = Sandbox(LIMITS)
            assert sandbox.run("import os; print(os.getuid())").stdout == "65534\n"
            bomb = sandbox.run("import os\nn = 0\nwhile True:\n    if os.fork() == 0: os.pause()\n    n += 1")
            assert "Resource temporarily unavailable" in bomb.stderr
            assert sandbox.run_tests("def double(x): return 2 * x", ATTACKED).score == 1.0
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_given_interpreter_brings_its_packages(sandbox: Sandbox, public_folder: Path) -> None:
    base = find_jail(True, None).interpreter.executable
    subprocess.run([base, "-m", "venv", "--without-pip", public_folder / "venv"], check=True)
    (site,) = (public_folder / "venv" / "lib").glob("python*/site-packages")
    (site / "guest.py").write_text("NAME = 'guest'")
    code = "import guest; print(guest.NAME)"
    assert sandbox.run(code).status == "failed"
    assert Sandbox(LIMITS, python=str(public_folder / "venv" / "bin" / "python")).run(code).stdout == "guest\n"


# --------------------------------------------------------------------------------------------------------------------
# Without bubblewrap


@pytest.fixture(params=["namespaces", "process"])
def weak(request: pytest.FixtureRequest, public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A machine on which bubblewrap, or unshare as well, is not installed."""
    for tool in ("setpriv", "unshare") if request.param == "namespaces" else ("setpriv",):
        (public_folder / tool).symlink_to(shutil.which(tool) or f"/{tool} is not installed")
    monkeypatch.setenv("PATH", str(public_folder))
    find_jail.cache_clear()
    with pytest.raises(IsolationUnavailable, match="apt-get install bubblewrap"):
        Sandbox()
    with pytest.warns(RuntimeWarning, match=f"weak isolation '{request.param}'"):
        sandbox = Sandbox(LIMITS, require_isolation=False)
    assert sandbox.isolation == request.param
    yield sandbox
    find_jail.cache_clear()


def test_the_fallback_limits_scores_and_says_what_it_is(weak: Sandbox) -> None:
    result = weak.run("import os; print(os.getcwd()); open('a', 'w')")
    assert (result.status, result.isolation) == ("ok", weak.isolation)
    assert not os.path.exists(result.stdout.strip()), "its folder is deleted"
    assert "MemoryError" in weak.run("x = bytearray(10**9)").stderr
    assert weak.run("while True: print('x' * 10_000)").status == "flooded"
    with pytest.warns(RuntimeWarning, match="weak isolation"):
        hasty = Sandbox(Limits(seconds=0.5), require_isolation=False)
    assert hasty.run("import time\nprint(1, flush=True)\ntime.sleep(1000)").status == "timeout"
    bomb = weak.run("import os\nwhile True:\n    if os.fork() == 0: os.execv('/bin/sleep', ['sleep', '2'])")
    assert "Resource temporarily unavailable" in bomb.stderr
    assert weak.run_tests("def double(x): return 2 * x", ATTACKED).score == 1.0
    for attack in ("exit by os._exit", "printed verdicts", "an object equal to everything", "patched builtins"):
        assert weak.run_tests(ATTACKS[attack], ATTACKED).score == 0.0


def test_the_fallback_keeps_secrets_of_the_environment(weak: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    assert "hunter2" not in weak.run("import os; print(dict(os.environ))").stdout


def test_the_fallback_with_namespaces_has_no_network(weak: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)"
        assert weak.run(code).status == ("failed" if weak.isolation == "namespaces" else "ok")
