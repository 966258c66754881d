"""A server in between that passes everything on and notes what clients send."""

import collections
import contextlib
import http.client
import http.server
import json
import threading
import urllib.parse

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
LONGEST_TEXT = 200
MOST_TOOLS = 3


def shortened(value):
    """The same request with long texts cut off, and at most three of the tools of each type. JSON stays JSON."""
    if isinstance(value, str):
        if len(value) <= LONGEST_TEXT:
            return value
        try:
            return json.dumps(shortened(json.loads(value)))
        except ValueError:
            return value[:LONGEST_TEXT]
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: shortened(few(item) if name == "tools" else item) for name, item in value.items()}
    return value


def few(tools):
    """The first three of each type."""
    if not isinstance(tools, list):
        return tools
    seen = collections.Counter()
    kept = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        seen[kind] += 1
        if seen[kind] <= MOST_TOOLS:
            kept.append(tool)
    return kept


class Recorder:
    """Listens on loopback in front of `url`. `bodies` has the path and the JSON of every POST. With `shorten` they are
    shortened before they are noted and passed on: a small model has no room for the prompts of agents."""

    def __init__(self, url, shorten=False):
        self.bodies = []
        parts = urllib.parse.urlsplit(url)
        recorder = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.pass_on()

            def do_POST(self):
                self.pass_on()

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if body:
                    sent = json.loads(body)
                    if shorten:
                        sent = shortened(sent)
                        body = json.dumps(sent).encode()
                    recorder.bodies.append((self.path, sent))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
                connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
                with contextlib.closing(connection):
                    connection.request(self.command, self.path, body or None, headers)
                    self.answer(connection.getresponse())

            def answer(self, response):
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                # Streams have no length: their end is the end of the connection.
                self.send_header("connection", "close")
                self.end_headers()
                # A client that has heard enough goes away.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    while piece := response.read1():
                        self.wfile.write(piece)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
