"""Health of a container: that of `qhx serve` where it runs that, at the port it was given. Other commands are well. The
argument is the file of the command: /proc/1/cmdline, also behind the first process of `docker run --init`.
"""

import sys
import urllib.request


def port(arguments):
    """The port of `qhx serve`; None for another command."""
    if "serve" not in arguments:
        return None
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--port":
            return value or arguments[position + 1]
    return "8080"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as command:
        served = port(command.read().split("\0"))
    if served is not None:
        with urllib.request.urlopen(f"http://127.0.0.1:{served}/health", timeout=4) as answer:
            sys.exit(answer.status != 200)
