"""A bundle called without a server: `python -m benchmarks.servers.engine MODEL BUNDLE THREADS SECONDS`.

Prints the seconds of each call as JSON: what a server adds is the rest.
"""

from __future__ import annotations

import json
import sys
import time

from aotexport_runtime import Servable
from benchmarks.servers.models import SERVED


def main() -> None:
    """Call the bundle with the requests of the clients."""
    name, bundle, threads, seconds = sys.argv[1:]
    servable = Servable(bundle, threads=int(threads))
    servable.warm_up()
    requests = SERVED[name].requests(64)
    for request in requests:
        servable.infer(request)
    latencies_s: list[float] = []
    end = time.perf_counter() + float(seconds)
    while time.perf_counter() < end:
        begin = time.perf_counter()
        servable.infer(requests[len(latencies_s) % len(requests)])
        latencies_s.append(time.perf_counter() - begin)
    print(json.dumps(latencies_s))


if __name__ == "__main__":
    main()
