#!/opt/agentrl/bin/python -I
"""Calls a tool of the task, as one turn of the episode.

task                     show the task again, and its tools
task TOOL                call a tool without arguments
task TOOL '{"n": 7}'     call it with arguments, as a JSON object
task TOOL - <FILE        read the arguments from a file

"""

import json
import socket
import sys

SOCKET = "/run/agentrl-task.sock"


def main() -> int:
    """Make the call of the command line and return the exit status."""
    name, *given = sys.argv[1:] or [""]
    if name in ("-h", "--help") or len(given) > 1:
        print(__doc__, end="")
        return 0 if name in ("-h", "--help") else 2
    text = sys.stdin.read() if given == ["-"] else "".join(given) or "{}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        print(f"task: the arguments are not JSON: {error}", file=sys.stderr)
        return 2
    if not isinstance(arguments, dict):
        print("task: the arguments are not a JSON object", file=sys.stderr)
        return 2
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(SOCKET)
            connection.sendall(json.dumps({"name": name, "arguments": arguments} if name else {}).encode())
            connection.sendall(b"\n")
            answer = json.loads(connection.makefile("rb").read())
    except (OSError, ValueError) as error:
        print(f"task: the episode does not answer: {error}", file=sys.stderr)
        return 1
    print(answer["text"])
    for tool in answer.get("tools", ()):
        print(f"\ntask {tool['name']} {json.dumps(tool['parameters'])}\n  {tool['description']}")
    if answer["status"] != "running":
        print(f"The episode has ended: {answer['status']}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
