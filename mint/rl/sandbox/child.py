"""The program that runs inside the sandbox.

Its text is handed to an isolated interpreter (3.10 or newer, standard library only) with `-c`; `mint` itself imports
only `encode` from here. Imports are few and late, since each costs every run its start.

A child plays one of three roles. `script` executes code as a program; `candidate` executes code, then answers calls to
what the code defined; `tester` executes tests, in which a name that neither the tests nor Python define stands for the
candidate's object of that name. Candidate and tester are two sandboxes joined by two pipes. Only plain data crosses:
what the candidate sends are claims about values, never about verdicts, and it never sees a test.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the idiom that spares the child the import of typing
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, BinaryIO, NoReturn

MESSAGE_CHARS = 500
READY = b"\x06"  # the first byte of standard output: from here on, what goes wrong is the code's doing


def main() -> None:
    """argv: role, size of the payload on stdin, `RLIMIT_X=n,...`, the descriptors of the pipes to the other child."""
    role, size, limits, *pipes = sys.argv[1:]
    sys.argv[:] = ["solution.py"]
    payload = read_payload(int(size))
    for limit in limits.split(","):
        name, value = limit.split("=")
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        lowered = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(which, (lowered, lowered))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine's memory runs out, the kernel ends this process before the trainer
    os.write(1, READY)
    ROLES[role](payload, *map(int, pipes))


def read_payload(size: int) -> bytes:
    """Exactly `size` bytes, unbuffered: what follows them on stdin belongs to the script."""
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            raise EOFError("the payload ended early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def execute(code: bytes, name: str) -> ModuleType:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    return module


def script(code: bytes) -> None:
    execute(code, "__main__")


# --------------------------------------------------------------------------------------------------------------------
# Values on the pipes: JSON, where an object has one key that names a Python type. `remember` gives an object that is
# not plain data a number; `recall` makes an object of a number.


PLAIN_TYPES: dict[str, Any] = {
    plain.__name__: plain for plain in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}


def encode(value: Any, remember: Callable[[Any], int]) -> Any:
    """Subclasses travel as the plain type they extend, so an overridden `__eq__` stays behind."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain.__str__(value) if plain is str else plain(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, remember), encode(v, remember)] for k, v in value.items()]}
    for group in (list, tuple, set, frozenset):
        if isinstance(value, group):
            items = [encode(item, remember) for item in value]
            return items if group is list else {group.__name__: items}
    name = value.__name__ if isinstance(value, type) else None
    if name in PLAIN_TYPES and PLAIN_TYPES[name] is value:
        return {"type": name}
    return {"object": remember(value)}


def decode(value: Any, recall: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [decode(item, recall) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "object":
        return recall(body)
    if kind == "type":
        return PLAIN_TYPES[body]
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "complex":
        return complex(*body)
    if kind == "dict":
        return {decode(k, recall): decode(v, recall) for k, v in body}
    return PLAIN_TYPES[kind](decode(item, recall) for item in body)


def send(pipe: BinaryIO, message: Any) -> None:
    import json

    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


# --------------------------------------------------------------------------------------------------------------------
# Candidate


def candidate(code: bytes, calls_fd: int, replies_fd: int) -> None:
    import json

    sys.set_int_max_str_digits(0)
    objects: list[Any] = []

    def remember(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    calls, replies = os.fdopen(calls_fd, "rb"), os.fdopen(replies_fd, "wb")
    try:
        module = execute(code, "solution")
        operations = {**OPERATIONS, "name": module.__dict__.__getitem__}
    except BaseException as error:
        return send(replies, failure(error))
    send(replies, {"value": None})
    for line in calls:
        operation, sent = json.loads(line)
        try:
            arguments = decode(sent, objects.__getitem__)
            value = encode(operations[operation](*arguments), remember)
            # A list, dict or set that the call changed in place must change in the tests as well.
            after = encode(arguments[1], remember) if operation == "call" else None
            reply = {"value": value, "changed": after if after is not None and after != sent[1] else None}
            send(replies, reply)
        except BaseException as error:
            send(replies, failure(error))


def failure(error: BaseException) -> dict[str, list[str]]:
    builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    plain = type(error).__name__ == builtin and isinstance(error, Exception)
    message = str(error) if plain else f"{type(error).__name__}: {error}"
    return {"error": [builtin, message[:MESSAGE_CHARS]]}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda container, key: container[key],
    "setitem": lambda container, key, value: container.__setitem__(key, value),
    "eq": lambda left, right: left == right,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "bool": bool,
}


# --------------------------------------------------------------------------------------------------------------------
# Tester


class Line:
    """The tester's end of the conversation with the candidate."""

    def __init__(self, calls_fd: int, replies_fd: int) -> None:
        self.calls, self.replies = os.fdopen(calls_fd, "wb"), os.fdopen(replies_fd, "rb")

    def ask(self, operation: str, *arguments: Any) -> Any:
        try:
            send(self.calls, [operation, [encode(argument, Line.number) for argument in arguments]])
        except BrokenPipeError:
            raise ConnectionError("the code ended before it was called") from None
        reply = self.receive()
        if operation == "call" and reply.get("changed") is not None:
            restore(arguments[1], self.decode(reply["changed"]))
        return self.decode(reply["value"])

    def receive(self) -> dict[str, Any]:
        import json

        line = self.replies.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the code ended before it answered")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise_as_told(*reply["error"])
        return reply

    def decode(self, value: Any) -> Any:
        return decode(value, lambda number: Remote(self, number))

    @staticmethod
    def number(value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        raise TypeError(f"a test can hand plain data to the code under test, not {type(value).__name__}")


def raise_as_told(kind: str, message: str) -> NoReturn:
    error = getattr(builtins, kind, RuntimeError)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        error = RuntimeError
    try:
        raised = error(message)
    except TypeError:  # UnicodeDecodeError and its like want more than a message
        raised = RuntimeError(message)
    raise raised


def restore(arguments: list[Any], after: list[Any]) -> None:
    for mine, theirs in zip(arguments, after, strict=True):
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)


class Remote:
    """An object of the candidate's that is not plain data: a function, a class, an instance, an iterator.

    Whatever its own `__eq__` says, it equals no plain data; two of them are compared by the candidate.
    """

    _line: Line
    _number: int

    def __init__(self, line: Line, number: int) -> None:
        self.__dict__.update(_line=line, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._line.ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._line.ask("setitem", self, key, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._line.ask("eq", self, other) is True

    def __hash__(self) -> int:
        return self._number

    def __len__(self) -> int:
        return int(self._line.ask("len", self))

    def __iter__(self) -> Any:
        return self._line.ask("iter", self)

    def __next__(self) -> Any:
        return self._line.ask("next", self)

    def __str__(self) -> str:
        return str(self._line.ask("str", self))

    def __bool__(self) -> bool:
        return self._line.ask("bool", self) is True

    def __repr__(self) -> str:
        return f"<object {self._number} of the code under test>"


class Namespace(dict):
    """Globals of the tests: what Python or the tests define wins; any other name is the candidate's.

    So code cannot change what a test means by `abs` or `math`; the entry point alone may hide a built-in.
    """

    def __init__(self, line: Line, entry_point: str | None) -> None:
        super().__init__(__name__="tests")
        self._line, self._entry_point = line, entry_point

    def __missing__(self, name: str) -> Any:
        if name != self._entry_point:
            if name.startswith("__") or hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                self[name] = __import__(name)
                return self[name]
        try:
            self[name] = self._line.ask("name", name)
        except KeyError:
            raise NameError(f"neither the tests nor the code define {name!r}") from None
        return self[name]


def tester(payload: bytes, calls_fd: int, replies_fd: int) -> None:
    """Write one JSON line per test to the standard output this process was started with."""
    import json

    sys.set_int_max_str_digits(0)
    job = json.loads(payload)
    verdicts = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
    line = Line(calls_fd, replies_fd)
    namespace = Namespace(line, job["entry_point"])

    def prepare() -> None:
        line.receive()
        exec(compile(job["setup"], "setup.py", "exec", dont_inherit=True), namespace)

    blocked = attempt(prepare)
    for number, test in enumerate(job["tests"]):
        send(verdicts, blocked or attempt(check, test, f"test_{number}.py", namespace))


def check(test: Any, filename: str, namespace: Namespace) -> None:
    if isinstance(test, str):
        exec(compile(test, filename, "exec", dont_inherit=True), namespace)
        return
    expression, expected = test[0], decode(test[1], Line.number)
    value = eval(compile(expression, filename, "eval", dont_inherit=True), namespace)
    if not value == expected:
        raise AssertionError(f"{expression} gave {value!r}, expected {expected!r}")


def attempt(action: Callable[..., None], *arguments: Any) -> str:
    """What went wrong, or nothing. The border: tests may raise anything, `SystemExit` included."""
    try:
        action(*arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
    return ""


ROLES: dict[str, Callable[..., None]] = {"script": script, "candidate": candidate, "tester": tester}

if __name__ == "__main__":
    main()
