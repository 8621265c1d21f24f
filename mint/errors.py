"""The errors MinT raises, on either side of the wire.

A message says what was given, what was expected and what to do. The server maps each class to one HTTP status
(`status`), the client maps the status back to the same class, so `except mint.BadRequest` means the same everywhere.
Each is also a standard-library error where one fits, and each survives pickling: they cross process borders.
"""


class MintError(Exception):
    """Anything MinT raises on purpose."""

    status = 500

    @property
    def status_code(self) -> int:
        return self.status


class StatusError(MintError):
    """The server's answer was an error status."""


class BadRequest(StatusError, ValueError):
    """The request cannot be carried out as given; sending it again will not help."""

    status = 400


class Unauthorized(StatusError):
    """No key, or one the server does not know."""

    status = 401


class Forbidden(StatusError, PermissionError):
    """The key is known, but may not do this."""

    status = 403


class BudgetReached(Forbidden):
    """A run or a key has used what it may; the message says where its state is and how to go on."""


class NotFound(StatusError, LookupError):
    """No such model, run, checkpoint, session or future."""

    status = 404


class Gone(NotFound):
    """It was there and has been lost; asking for it anew may help."""

    status = 410


class Busy(StatusError):
    """The server is out of room for now; the same request may succeed later."""

    status = 429
    queue_state = "paused_capacity"
    """In the protocol's words, for clients that show it."""
    retry_after: float = 1.0
    """Seconds."""


class Internal(StatusError, RuntimeError):
    """A fault of the server or engine, not of the request."""

    status = 500


class Interrupted(Internal):
    """The engine was lost while it worked on this; the same request may be carried out by the next one."""

    status = 503


class Lost(Interrupted):
    """What the engine held of this adapter was damaged; the engine lives, and the adapter can be made again in it."""


class ConnectionFailed(MintError, ConnectionError):
    """No server answered."""

    status = 503


class TimedOut(ConnectionFailed, TimeoutError):
    """The server did not answer in time."""

    status = 504


class RequestFailed(MintError, RuntimeError):
    """A request was accepted but failed while it ran; `category` says whose fault it was: user, server or unknown."""

    status = 500

    def __init__(self, message: str, category: str = "unknown") -> None:
        super().__init__(message, category)
        self.message = message
        self.category = category

    def __str__(self) -> str:
        return self.message


class RequestRejected(RequestFailed, BadRequest):
    """A request was accepted and found at fault while it ran: both a failed request and a bad one."""

    status = 400

    def __init__(self, message: str, category: str = "user") -> None:
        super().__init__(message, category)


# The Tinker SDK's names for the same errors, so that its users' except clauses mean what they say.
TinkerError = APIError = MintError
APIStatusError = StatusError
BadRequestError = ConflictError = UnprocessableEntityError = BadRequest
AuthenticationError = Unauthorized
PermissionDeniedError = BillingError = Forbidden
NotFoundError = NotFound
RateLimitError = Busy
InternalServerError = APIResponseValidationError = Internal
APIConnectionError = ConnectionFailed
APITimeoutError = TimedOut
RequestFailedError = RequestFailed
