"""Stands in for `mint serve --local`: ready after a moment, gone when its standard input ends. Touches no model."""

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers.get("X-API-Key") == os.environ["MINT_API_KEY"]
        self.send_response(200 if known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    print("stub:", *sys.argv[1:], file=sys.stderr)
    if "--broken" in sys.argv:
        sys.exit("the stub is broken")
    if "--slow" in sys.argv:
        time.sleep(60)
    if "--when" in sys.argv:
        while not os.path.exists(sys.argv[-1]):
            time.sleep(0.01)
    server = HTTPServer(("127.0.0.1", 0), Health)
    Thread(target=server.serve_forever, daemon=True).start()
    print("some other line")
    print(f"MINT_READY http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


main()
