"""An MCP server with hand-written messages, some of which the SDK rejects."""

import base64
import json
import os
import sys

ECHO = {
    "type": "object",
    "properties": {
        "start": {"type": "integer"},
        "end": {"$ref": "#/properties/start"},
        "$ref": {"type": "string"},
        "definitions": True,
        "tags": {"type": "object", "additionalProperties": {"type": "string"}},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "additionalProperties": True,
    "dependentRequired": {"card": ["address"]},
    "if": {"required": ["else"]},
    "then": {"required": ["end"]},
}
EMPTY = {"type": "object"}
LOST = {"name": "lost", "inputSchema": {"properties": {"a": {"$ref": "#/$defs/gone"}}}}
TOOLS = [
    {"name": "echo", "description": "Echo.", "inputSchema": ECHO},
    {"name": "null_part", "inputSchema": {"type": "object", "properties": {"a": None}}},
    {"name": "echo", "inputSchema": EMPTY},
    LOST,
    {"name": "files.read", "inputSchema": {"type": "object", "properties": {"kind": {"type": "string"}}}},
    {"name": "files/read", "inputSchema": EMPTY},
    {"name": "list!", "inputSchema": {**EMPTY, "properties": {"a": {"pattern": "(?<=x+)y"}}}},
    {"name": "no_schema", "inputSchema": None},
    {"name": "", "inputSchema": EMPTY},
    None,
]
ERRORS = {
    "invalid": (-32602, "kind must be a noun"),
    "raised": (-32603, "Not Found: no such file"),
    "own": (404, "no such page"),
    "unread": (-32600, "the request has no method"),
    "lost": (-32000, "Connection closed"),
}
BLOB = base64.b64encode(b"1234").decode()
RESULTS = {
    "embedded": {
        "content": [
            {"type": "resource", "resource": {"uri": "file:///notes.txt", "text": "buy milk"}},
            {
                "type": "resource",
                "resource": {"uri": "file:///data.json", "mimeType": "application/json", "blob": "e30="},
            },
            {"type": "resource", "resource": {"uri": "file:///a.png", "mimeType": "image/png", "blob": BLOB}},
        ]
    },
    "link": {
        "content": [
            {
                "type": "resource_link",
                "uri": "file:///notes.txt",
                "name": "notes",
                "title": "The notes",
                "description": "what to buy",
                "mimeType": "text/plain",
            }
        ]
    },
    "structured": {"content": [], "structuredContent": {"price": 12, "of": "öl"}},
    "image": {"content": [{"type": "image", "mimeType": "image/png", "data": BLOB}]},
    "both": {"content": [{"type": "text", "text": "twelve"}], "structuredContent": {"price": 12}},
    "unknown": {"content": [{"type": "hologram", "size": 3}]},
    "nothing": {"content": []},
    "null": {"content": None, "structuredContent": [1]},
    "odd": {"content": ["text", {"type": "resource", "resource": None}]},
}


def answer(method, params):
    """Return the result of a request, or an error."""
    if method == "initialize":
        about = {"name": "odd", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    if method == "tools/list":
        return {"tools": [LOST] if "lost" in sys.argv else TOOLS}
    kind = params["arguments"].get("kind")
    if kind in ERRORS:
        code, message = ERRORS[kind]
        return {"code": code, "message": message}
    if kind == "variables":
        text = f"{os.environ.get('TOKEN')} {os.environ.get('LEVEL')}"
        return {"content": [{"type": "text", "text": text}]}
    return RESULTS.get(kind) or {
        "content": [{"type": "text", "text": json.dumps({key: params[key] for key in ("name", "arguments")})}]
    }


def main():
    """Answer requests, one per line, until the end of the input."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            found = answer(request["method"], request.get("params", {}))
            key = "error" if "code" in found else "result"
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], key: found}), flush=True)


if __name__ == "__main__":
    main()
