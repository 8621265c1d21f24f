"""Bad input, in quantity: every operation of the OpenAPI page, thousands of times, over a real server.

    python benchmarks/fuzz.py --examples 200 [--out benchmarks/results/fuzz.json]

Starts `mint serve` on a free port and a data folder of its own. Ends with a table of the statuses that came back and
one JSON line; any 5xx is a failure, and the smallest request that causes it is printed. `tests/server/test_openapi.py`
is the same in small.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from serving import Serving

from tests.server.fuzzing import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200, help="requests an operation and kind")
    parser.add_argument("--out", type=Path, help="also write the result here")
    asked = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder)) as server:
        told = fuzz(server.url, asked.examples, derandomize=False)
        healthy = server.get("/readyz").status_code == 200
    total: Counter[int] = Counter()
    for operation, seen in sorted(told.items()):
        print(f"{operation:90} {dict(sorted(seen.items()))}")
        total += seen
    result = {
        "requests": total.total(),
        "statuses": dict(sorted(total.items())),
        "operations": len(told),
        "ready_afterwards": healthy,
        "seconds": round(time.perf_counter() - started),
    }
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if not healthy or any(status >= 500 for status in total):
        sys.exit(1)


if __name__ == "__main__":
    main()
