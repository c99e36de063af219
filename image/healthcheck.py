"""Exits with 0 where a URL answers 200, else with 1 and a line that says why.

    python3 healthcheck.py [URL]

By default it asks the producer's /healthz, which is 200 while its gRPC health is SERVING.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

DEFAULT = "http://127.0.0.1:9464/healthz"
TIMEOUT_S = 4.0  # below the HEALTHCHECK's own


def trouble(url: str) -> str:
    """What is wrong with `url`; "" where it answers 200. Proxies and redirects are not followed."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{url}: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if status == 200 else f"{url}: {status}"


if __name__ == "__main__":
    why = trouble(sys.argv[1] if len(sys.argv) > 1 else DEFAULT)
    print(why or "serving")
    sys.exit(1 if why else 0)
