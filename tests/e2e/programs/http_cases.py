#!/usr/bin/env python3
"""HTTP/1 cases: bytes that a client sends, bytes that a server answers, and what both observe, as one line of text for each case.

`http_cases.py server` serves all cases on each port; a request names its case in `x-case`. `http_cases.py client` runs all cases against
one address and prints a JSON object: case -> observation of both ends. Nothing here knows whether there is a mesh: the test compares.
What RFC 9110 leaves to a hop is no observation: how a body is framed, `connection`, how long a connection is kept after an exchange.
"""
import errno, hashlib, json, socket, struct, sys, threading, time

PORTS = (8080, 8082)
CONTROL_PORT = 8099
LIMITS = {"patience": 4.0}      # s: no single wait is longer; the gate sets more
HEAD_MAX = 400_000      # bytes: more than any case's head, so that it only ends a peer that never stops
# Fields of a hop, or added by one; docs/compatibility.md lists them.
HOP = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "content-length", "te", "upgrade", "trailer", "date", "via", "server",
       "x-request-id", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-case", "x-run", "forwarded", "traceparent", "tracestate"}
FIN, RST = "FIN", "RST"
DONE = "(done)"
ROWS = {}               # name -> (request script, answer script, options)


def row(name, ask, answer, **options):
    assert name not in ROWS, name
    ROWS[name] = (ask if isinstance(ask, list) else [ask], answer if isinstance(answer, list) else [answer], options)


def req(line="GET /p HTTP/1.1", *fields, body=b"", host="Host: cases", eol=b"\r\n"):
    lines = [line] + ([host] if host else []) + ["x-case: @", "x-run: %"] + list(fields)
    return eol.join(l.encode("utf-8", "surrogateescape") if isinstance(l, str) else l for l in lines) + eol * 2 + body


def ans(line="HTTP/1.1 200 OK", *fields, body=b"", eol=b"\r\n"):
    return eol.join(l.encode() if isinstance(l, str) else l for l in [line] + list(fields)) + eol * 2 + body


def chunked(*parts, trailers=b"", ext=b""):
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), ext, p) for p in parts) + b"0\r\n" + trailers + b"\r\n"


OK = ans("HTTP/1.1 200 OK", "Content-Length: 2", body=b"ok")
TE = "Transfer-Encoding: chunked"
BIG = b"0123456789abcdef" * 20_000          # 320,000 bytes

# --- plain responses and their ends
row("get", req(), OK)
row("get_empty", req(), ans("HTTP/1.1 200 OK", "Content-Length: 0"))
row("get_big", req(), ans("HTTP/1.1 200 OK", f"Content-Length: {len(BIG)}", body=BIG))
row("get_chunked", req(), ans("HTTP/1.1 200 OK", TE, body=chunked(b"a", b"bc", b"def")))
row("get_until_close", req(), [ans("HTTP/1.1 200 OK", "Connection: close", body=b"until the end"), FIN])
row("get_until_close_big", req(), [ans("HTTP/1.1 200 OK", "Connection: close", body=BIG), FIN])
row("get_until_close_reset", req(), [ans("HTTP/1.1 200 OK", "Connection: close", body=b"cut"), "GO", RST], go=b"cut")
row("length_cut_by_fin", req(), [ans("HTTP/1.1 200 OK", "Content-Length: 10", body=b"cut"), 0.1, FIN])
row("length_cut_by_rst", req(), [ans("HTTP/1.1 200 OK", "Content-Length: 10", body=b"cut"), "GO", RST], go=b"cut")
row("chunked_cut_by_fin", req(), [ans("HTTP/1.1 200 OK", TE, body=b"3\r\ncut\r\n"), 0.1, FIN])
row("chunked_cut_in_chunk", req(), [ans("HTTP/1.1 200 OK", TE, body=b"a\r\ncut"), 0.1, FIN])
row("chunked_cut_by_rst", req(), [ans("HTTP/1.1 200 OK", TE, body=b"3\r\ncut\r\n"), "GO", RST], go=b"cut")
row("head_cut", req(), [b"HTTP/1.1 200 OK\r\nContent-Le", 0.1, FIN])
row("no_answer_fin", req(), [FIN])
row("no_answer_rst", req(), [RST])
row("drip_answer", req(), [p for c in OK for p in (bytes([c]), 0.002)])
row("answer_in_two", req(), [OK[:20], 0.3, OK[20:]])
row("slow_body", req(), [ans("HTTP/1.1 200 OK", "Content-Length: 4", body=b"a"), 0.4, b"b", 0.4, b"cd"])
row("first_chunk_at_once", req(), [ans("HTTP/1.1 200 OK", TE, body=b"1\r\na\r\n"), "GO", b"1\r\nb\r\n0\r\n\r\n"], go=b"a\r\n")
row("close_answer", req(), [ans("HTTP/1.1 200 OK", "Content-Length: 2", "Connection: close", body=b"ok"), FIN])
row("surplus_after_answer", req(), OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nleak")

# --- HTTP/1.0
row("http10_get", req("GET /p HTTP/1.0"), [ans("HTTP/1.0 200 OK", "Content-Length: 2", body=b"ok"), FIN])
row("http10_until_close", req("GET /p HTTP/1.0"), [ans("HTTP/1.0 200 OK", body=b"until the end"), FIN])
row("http10_answer_to_11", req(), [ans("HTTP/1.0 200 OK", "Content-Length: 2", body=b"ok"), FIN])
row("http10_until_close_to_11", req(), [ans("HTTP/1.0 200 OK", body=b"until the end"), FIN])
row("http10_no_host", req("GET /p HTTP/1.0", host=None), [OK, FIN])
row("http10_keep_alive", [req("GET /p HTTP/1.0", "Connection: keep-alive")], ans("HTTP/1.0 200 OK", "Connection: keep-alive", "Content-Length: 2", body=b"ok"))
row("http10_chunked_answer", req("GET /p HTTP/1.0"), [ans("HTTP/1.1 200 OK", TE, body=chunked(b"abc")), FIN])
row("http10_post", req("POST /p HTTP/1.0", "Content-Length: 3", body=b"abc"), [OK, FIN])

# --- responses without a body
row("head", req("HEAD /p HTTP/1.1"), ans("HTTP/1.1 200 OK", "Content-Length: 1234"), show="content-length")
row("head_chunked", req("HEAD /p HTTP/1.1"), ans("HTTP/1.1 200 OK", TE))
row("head_no_length", req("HEAD /p HTTP/1.1"), ans("HTTP/1.1 200 OK", "X-A: b"))
row("head_with_body", req("HEAD /p HTTP/1.1"), ans("HTTP/1.1 200 OK", "Content-Length: 5", body=b"wrong"))
row("head_404", req("HEAD /p HTTP/1.1"), ans("HTTP/1.1 404 Not Found", "Content-Length: 9"), show="content-length")
row("s204", req(), ans("HTTP/1.1 204 No Content"))
row("s204_length", req(), ans("HTTP/1.1 204 No Content", "Content-Length: 5"))
row("s204_length_zero", req(), ans("HTTP/1.1 204 No Content", "Content-Length: 0"))
row("s204_chunked", req(), ans("HTTP/1.1 204 No Content", TE))
row("s205", req(), ans("HTTP/1.1 205 Reset Content", "Content-Length: 0"))
row("s304", req(), ans("HTTP/1.1 304 Not Modified", 'ETag: "a"'))
row("s304_length", req(), ans("HTTP/1.1 304 Not Modified", "Content-Length: 500"), show="content-length")
row("s304_with_body", req(), ans("HTTP/1.1 304 Not Modified", "Content-Length: 5", body=b"wrong"))

# --- statuses and heads
for status in ("201 Created", "206 Partial Content", "299 Odd", "300 Multiple Choices", "301 Moved Permanently", "400 Bad Request", "401 Unauthorized", "418 I'm a teapot",
               "421 Misdirected Request", "429 Too Many Requests", "451 Unavailable For Legal Reasons", "499 Odd", "500 Internal Server Error", "503 Service Unavailable",
               "507 Insufficient Storage", "599 Odd", "600 Beyond", "999 Beyond"):
    row("s" + status[:3], req(), ans("HTTP/1.1 " + status, "Content-Length: 2", "Location: /x", body=b"ok"))
row("no_reason", req(), ans("HTTP/1.1 200 ", "Content-Length: 2", body=b"ok"))
row("no_reason_no_space", req(), ans("HTTP/1.1 200", "Content-Length: 2", body=b"ok"))
row("header_order", req("GET /p HTTP/1.1", "X-B: 1", "X-A: 2", "X-B: 3"), ans("HTTP/1.1 200 OK", "X-D: 1", "X-C: 2", "X-D: 3", "Content-Length: 0"))
row("header_case", req("GET /p HTTP/1.1", "X-MiXeD: Aa"), ans("HTTP/1.1 200 OK", "X-OtHeR: Bb", "Content-Length: 0"), raw=True)
row("header_empty_value", req("GET /p HTTP/1.1", "X-E:"), ans("HTTP/1.1 200 OK", "X-F:", "Content-Length: 0"))
row("header_spaces", req("GET /p HTTP/1.1", "X-S: \t a  b \t "), ans("HTTP/1.1 200 OK", "X-T:c", "Content-Length: 0"))
row("header_latin1", req("GET /p HTTP/1.1", b"X-L: caf\xe9"), ans("HTTP/1.1 200 OK", b"X-M: na\xefve", "Content-Length: 0"))
row("header_utf8", req("GET /p HTTP/1.1", "X-U: grüße"), ans("HTTP/1.1 200 OK", "X-V: größe", "Content-Length: 0"))
row("header_7_kilobytes", req("GET /p HTTP/1.1", "X-Long: " + "a" * 7000), ans("HTTP/1.1 200 OK", "X-Long: " + "b" * 7000, "Content-Length: 0"))
row("header_33_kilobytes_answered", req(), ans("HTTP/1.1 200 OK", "X-Long: " + "b" * 33_000, "Content-Length: 0"))
row("header_33_kilobytes_asked", req("GET /p HTTP/1.1", "X-Long: " + "a" * 33_000), OK)
row("headers_90", req("GET /p HTTP/1.1", *[f"X-{i}: {i}" for i in range(85)]), ans("HTTP/1.1 200 OK", *[f"X-{i}: {i}" for i in range(90)], "Content-Length: 0"))
row("headers_150_answered", req(), ans("HTTP/1.1 200 OK", *[f"X-{i}: {i}" for i in range(150)], "Content-Length: 0"))
row("headers_150_asked", req("GET /p HTTP/1.1", *[f"X-{i}: {i}" for i in range(150)]), OK)
row("set_cookie_twice", req("GET /p HTTP/1.1", "Cookie: a=1", "Cookie: b=2"), ans("HTTP/1.1 200 OK", "Set-Cookie: a=1", "Set-Cookie: b=2", "Content-Length: 0"))
row("connection_names_header", req("GET /p HTTP/1.1", "Connection: x-hop", "X-Hop: 1"), ans("HTTP/1.1 200 OK", "Connection: x-back", "X-Back: 1", "Content-Length: 0"))
row("header_names_odd", req("GET /p HTTP/1.1", "x_under: 1", "x.dot: 2", "x!#$: 3"), ans("HTTP/1.1 200 OK", "y_under: 1", "Content-Length: 0"))
row("own_forwarded_for", req("GET /p HTTP/1.1", "X-Real-Ip: 1.2.3.4"), OK)
row("lf_answer", req(), ans("HTTP/1.1 200 OK", "Content-Length: 2", body=b"ok", eol=b"\n"))
row("lf_request", req(eol=b"\n"), OK)
row("blank_line_before_request", b"\r\n" + req(), OK)
row("length_twice_equal", req(), ans("HTTP/1.1 200 OK", "Content-Length: 2", "Content-Length: 2", body=b"ok"))
row("length_list_equal", req(), ans("HTTP/1.1 200 OK", "Content-Length: 2, 2", body=b"ok"))
row("length_and_chunked", req(), [ans("HTTP/1.1 200 OK", "Content-Length: 3", TE, body=chunked(b"abc")), FIN])
row("folded_header", req(), ans("HTTP/1.1 200 OK", "X-F: a\r\n b", "Content-Length: 2", body=b"ok"))
row("gzip_chunked", req(), ans("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked", body=chunked(b"zzz")))
row("content_encoding", req("GET /p HTTP/1.1", "Accept-Encoding: gzip"), ans("HTTP/1.1 200 OK", "Content-Encoding: gzip", "Content-Length: 3", body=b"\x1f\x8b\x08"))

# --- targets and methods
row("absolute_form", req("GET http://cases/p?q=1 HTTP/1.1"), OK)
row("absolute_form_other_host", req("GET http://other/p HTTP/1.1"), OK)
row("options_star", req("OPTIONS * HTTP/1.1"), OK)
row("options_path", req("OPTIONS /p HTTP/1.1"), OK)
row("query", req("GET /p?a=%20b&c=%2F&d HTTP/1.1"), OK)
row("percent_path", req("GET /a%2Fb/%C3%A9/%7e HTTP/1.1"), OK)
row("double_slash", req("GET //a//b HTTP/1.1"), OK)
row("dot_segments", req("GET /a/./b/../c HTTP/1.1"), OK)
row("odd_characters", req("GET /a;b=c,d:e@f!$&'()*+=|{}^`\" HTTP/1.1"), OK)
row("long_path", req("GET /" + "a" * 6000 + " HTTP/1.1"), OK)
row("no_host", req(host=None), OK)
row("host_twice", req("GET /p HTTP/1.1", "Host: other"), OK)
row("host_port", req(host="Host: cases:8080"), OK)
for method in ("PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "PURGE", "M-SEARCH", "get", "FOO!"):
    row("method_" + method.replace("!", "_odd").replace("get", "lower_case"), req(f"{method} /p HTTP/1.1"), OK)
row("get_with_body", req("GET /p HTTP/1.1", "Content-Length: 3", body=b"abc"), OK)
row("delete_with_body", req("DELETE /p HTTP/1.1", "Content-Length: 3", body=b"abc"), OK)

# --- bodies of requests
row("post", req("POST /p HTTP/1.1", "Content-Length: 5", body=b"hello"), OK)
row("post_empty", req("POST /p HTTP/1.1", "Content-Length: 0"), OK)
row("post_no_length", req("POST /p HTTP/1.1"), OK)
row("post_big", req("POST /p HTTP/1.1", f"Content-Length: {len(BIG)}", body=BIG), OK)
row("post_chunked", req("POST /p HTTP/1.1", TE, body=chunked(b"a", b"bc")), OK)
row("post_chunk_extensions", req("POST /p HTTP/1.1", TE, body=chunked(b"a", b"bc", ext=b";x=y")), OK)
row("post_trailers", req("POST /p HTTP/1.1", TE, "Trailer: X-T", body=chunked(b"abc", trailers=b"X-T: v\r\n")), OK)
row("answer_trailers", req("GET /p HTTP/1.1", "TE: trailers"), ans("HTTP/1.1 200 OK", TE, "Trailer: X-T", body=chunked(b"abc", trailers=b"X-T: v\r\n")))
row("answer_chunk_extensions", req(), ans("HTTP/1.1 200 OK", TE, body=chunked(b"abc", ext=b";x=y")))
row("post_drip", [req("POST /p HTTP/1.1", "Content-Length: 5"), 0.1, b"h", 0.1, b"el", 0.1, b"lo"], OK)
row("head_drip", req(), OK, drip=0.001)
row("head_in_two", [req()[:15], 0.3, req()[15:]], OK)
row("post_cut_by_fin", [req("POST /p HTTP/1.1", "Content-Length: 10", body=b"cut"), 0.2, FIN], OK)
row("post_cut_by_rst", [req("POST /p HTTP/1.1", "Content-Length: 10", body=b"cut"), 0.2, RST], OK)
row("post_chunked_cut", [req("POST /p HTTP/1.1", TE, body=b"3\r\ncut\r\n"), 0.2, FIN], OK)
row("request_then_fin", [req(), FIN], [0.3, OK])
row("post_then_fin", [req("POST /p HTTP/1.1", "Content-Length: 5", body=b"hello"), FIN], [0.3, OK])
row("fin_long_answer", [req(), FIN], [ans("HTTP/1.1 200 OK", f"Content-Length: {len(BIG)}", body=BIG[:1000]), 0.5, BIG[1000:]])

# --- interim responses and Expect
row("s102", req(), [b"HTTP/1.1 102 Processing\r\n\r\n", 0.1, OK])
row("s103", req(), b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK)
row("s103_twice", req(), b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 2 + OK)
row("s100_unasked", req(), b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
row("expect_accepted", [req("POST /p HTTP/1.1", "Expect: 100-continue", "Content-Length: 5"), "100", b"hello"], OK, interim=b"HTTP/1.1 100 Continue\r\n\r\n")
row("expect_ignored", [req("POST /p HTTP/1.1", "Expect: 100-continue", "Content-Length: 5"), 0.3, b"hello"], OK)
row("expect_at_once", req("POST /p HTTP/1.1", "Expect: 100-continue", "Content-Length: 5", body=b"hello"), OK)
row("expect_refused", [req("POST /p HTTP/1.1", "Expect: 100-continue", "Content-Length: 5")],
    ans("HTTP/1.1 417 Expectation Failed", "Connection: close", "Content-Length: 0"), before_body=True)
row("expect_413", [req("POST /p HTTP/1.1", "Expect: 100-continue", "Content-Length: 500000")],
    [ans("HTTP/1.1 413 Content Too Large", "Connection: close", "Content-Length: 0"), FIN], before_body=True)
row("expect_unknown", req("POST /p HTTP/1.1", "Expect: wonders", "Content-Length: 5", body=b"hello"), OK)
row("expect_http10", req("POST /p HTTP/1.0", "Expect: 100-continue", "Content-Length: 5", body=b"hello"), [OK, FIN])

# --- early responses
row("early_413_close", [req("POST /p HTTP/1.1", f"Content-Length: {len(BIG) * 4}", body=BIG), BIG, BIG, BIG],
    [ans("HTTP/1.1 413 Content Too Large", "Connection: close", "Content-Length: 3", body=b"big"), "CLOSE"], before_body=True, repeat=6, only_answer=True)
row("early_200_keeps_reading", [req("POST /p HTTP/1.1", "Content-Length: 40000", body=b"a" * 10_000), 0.2, b"b" * 10_000, 0.2, b"c" * 10_000, 0.2, b"d" * 10_000],
    ans("HTTP/1.1 200 OK", "Content-Length: 6", body=b"stored"), before_body=True)
row("early_200_chunked", [req("POST /p HTTP/1.1", TE, body=chunked(b"a")[:-5]), 0.3, chunked(b"b")], [ans("HTTP/1.1 200 OK", TE, body=b"1\r\nx\r\n"), 0.6, b"1\r\ny\r\n0\r\n\r\n"],
    before_body=True)
row("early_403_keeps_reading", [req("POST /p HTTP/1.1", "Content-Length: 20000", body=b"a" * 10_000), "ANSWER", b"b" * 10_000],
    ans("HTTP/1.1 403 Forbidden", "Content-Length: 2", body=b"no"), before_body=True)

# --- several on one connection
row("keep_alive", [req(), "ANSWER", req(), "ANSWER", req()], OK, answers=3)
row("keep_alive_post", [req("POST /p HTTP/1.1", "Content-Length: 3", body=b"abc"), "ANSWER", req("POST /p HTTP/1.1", "Content-Length: 3", body=b"def")], OK, answers=2)
row("pipelined", req() + req("GET /q HTTP/1.1") + req("GET /r HTTP/1.1"), OK, answers=3)
row("pipelined_posts", req("POST /p HTTP/1.1", "Content-Length: 3", body=b"abc") + req("POST /q HTTP/1.1", TE, body=chunked(b"def")), OK, answers=2)
row("pipelined_then_fin", [req() + req("GET /q HTTP/1.1"), FIN], [0.2, OK], answers=2)
row("after_head", [req("HEAD /p HTTP/1.1"), "ANSWER", req("HEAD /q HTTP/1.1")], ans("HTTP/1.1 200 OK", "Content-Length: 77"), answers=2)
row("after_304", [req(), "ANSWER", req()], ans("HTTP/1.1 304 Not Modified", "Content-Length: 77"), answers=2)
row("close_asked", req("GET /p HTTP/1.1", "Connection: close"), OK)
row("closed_by_server_when_idle", [req("POST /p HTTP/1.1", "Content-Length: 1", body=b"a"), "ANSWER", 0.5, "REOPEN", req("POST /p HTTP/1.1", "Content-Length: 1", body=b"b")], [OK, "IDLE-CLOSE"],
    answers=2)

# --- upgrades
UP = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]
UPPED = ans("HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
row("ws_closed_by_client", [req("GET /p HTTP/1.1", *UP), "ANSWER", b"ping", 0.2, FIN], [UPPED, "ECHO"], upgrade=True)
row("ws_closed_by_server", [req("GET /p HTTP/1.1", *UP), "ANSWER"], [UPPED, b"bye", 0.1, FIN, "READ"], upgrade=True)
row("ws_half_closed_by_server", [req("GET /p HTTP/1.1", *UP), "ANSWER", 0.5, b"still", 0.1, FIN], [UPPED, b"bye", "HALF", "READ"], upgrade=True)
row("ws_reset_by_client", [req("GET /p HTTP/1.1", *UP), "ANSWER", b"ping", "READ BY SERVER", RST], [UPPED, "READ"], upgrade=True)
row("ws_reset_by_server", [req("GET /p HTTP/1.1", *UP), "ANSWER"], [UPPED, b"bye", "GO", RST], upgrade=True, go=b"bye")
row("ws_early_frames_of_server", [req("GET /p HTTP/1.1", *UP), "ANSWER", FIN], [UPPED + b"early", "READ"], upgrade=True)
row("ws_early_frames_of_client", [req("GET /p HTTP/1.1", *UP) + b"early", "ANSWER", FIN], [UPPED, "READ"], upgrade=True)
row("ws_refused", req("GET /p HTTP/1.1", *UP), ans("HTTP/1.1 403 Forbidden", "Content-Length: 2", body=b"no"))
row("ws_ignored", req("GET /p HTTP/1.1", *UP), OK)
row("ws_big", [req("GET /p HTTP/1.1", *UP), "ANSWER", BIG, FIN], [UPPED, "ECHO"], upgrade=True)
row("upgrade_other", [req("GET /p HTTP/1.1", "Connection: Upgrade", "Upgrade: chat/1"), "ANSWER", b"hi", 0.1, FIN],
    [ans("HTTP/1.1 101 Switching Protocols", "Upgrade: chat/1", "Connection: Upgrade"), "ECHO"], upgrade=True)
row("upgrade_required", req(), ans("HTTP/1.1 426 Upgrade Required", "Upgrade: h9", "Connection: Upgrade", "Content-Length: 0"))
row("s101_unasked", req(), [ans("HTTP/1.1 101 Switching Protocols", "Upgrade: x", "Connection: Upgrade"), 0.2, FIN])


# --- reading

def ending(e):
    return "TIMEOUT" if isinstance(e, TimeoutError) else errno.errorcode.get(e.errno, str(e))


class Reader:
    """Reads messages from a socket; remembers how it ended."""

    def __init__(self, sock):
        self.sock, self.data, self.end = sock, b"", None
        sock.settimeout(LIMITS["patience"])

    def more(self):
        if self.end:
            return False
        try:
            got = self.sock.recv(262_144)
        except OSError as e:
            self.end = ending(e)
            return False
        if not got:
            self.end = "EOF"
            return False
        self.data += got
        return True

    def head(self):
        """A head's lines, with either kind of line end; nothing where it does not come whole."""
        while True:
            text = self.data.lstrip(b"\r\n")
            places = [(at, n) for at, n in ((text.find(b"\r\n\r\n"), 4), (text.find(b"\n\n"), 2)) if at >= 0]
            if places:
                at, n = min(places)
                self.data = text[at + n:]
                return text[:at].replace(b"\r\n", b"\n").split(b"\n")
            if len(text) > HEAD_MAX or not self.more():
                return None

    def take(self, n):
        while len(self.data) < n and self.more():
            pass
        got, self.data = self.data[:n], self.data[n:]
        return got

    def line(self):
        while b"\n" not in self.data and self.more():
            pass
        if b"\n" not in self.data:
            return None
        got, self.data = self.data.split(b"\n", 1)
        return got.rstrip(b"\r")

    def rest(self):
        while self.more():
            pass
        got, self.data = self.data, b""
        return got

    def body(self, fields, until_close):
        """The body, trailers, and whether it is whole."""
        if any(b"chunked" in v for k, v in fields if k == b"transfer-encoding"):
            body, trailers = b"", []
            while True:
                size = self.line()
                try:
                    n = int((size or b"").split(b";")[0], 16)
                except ValueError:
                    return body, [], "cut"
                if n == 0:
                    while line := self.line():
                        trailers.append(line)
                    return body, trailers, "whole" if line == b"" else "cut"
                part = self.take(n)
                body += part
                if len(part) < n or self.line() is None:
                    return body, [], "cut"
        lengths = [v.split(b",")[0] for k, v in fields if k == b"content-length"]
        if lengths:
            body = self.take(int(lengths[0]))
            return body, [], "whole" if len(body) == int(lengths[0]) else "cut"
        if until_close:
            return self.rest(), [], "whole" if self.end == "EOF" else "cut"
        return b"", [], "whole"


def fields_of(lines):
    return [(k.strip().lower(), v.strip()) for k, _, v in (line.partition(b":") for line in lines)]


def short(data):
    return repr(data)[1:] if len(data) <= 48 else f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:8]}"


def tell_fields(lines, options):
    told = []
    for line in lines:
        name, _, value = line.partition(b":")
        key = name.strip().lower().decode("latin-1")
        if key in HOP and key != options.get("show"):
            continue
        shown = name.decode("latin-1") if options.get("raw") else key
        told.append(shown + "=" + short(value.strip()))
    if len(told) > 20:
        joined = " ".join(told).encode()
        return f"{len(told)} fields {hashlib.sha256(joined).hexdigest()[:8]}"
    return " ".join(told)


def play(sock, script, name, run, on_word, drip=None):
    """Sends a script's bytes, waits its pauses, ends as it says. True: goes on."""
    for step in script:
        try:
            if isinstance(step, (int, float)):
                time.sleep(step)
            elif isinstance(step, bytes):
                data = step.replace(b"x-case: @", b"x-case: " + name.encode()).replace(b"x-run: %", b"x-run: " + run.encode())
                for part in [data] if drip is None else [data[i:i + 1] for i in range(len(data))]:
                    sock.sendall(part)
                    time.sleep(drip or 0)
            elif step == RST:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
                return False
            elif step == FIN:
                sock.shutdown(socket.SHUT_WR)
            else:
                said = on_word(step)
                if said is False:
                    return False
                if isinstance(said, tuple):
                    sock = said[1]
        except OSError:
            return False
    return True


# --- the server

class Server:
    def __init__(self):
        self.seen, self.lock = {}, threading.Condition()
        # By run and case: the case's client has read what came first, and the bytes that a case's server has read.
        self.going, self.read = set(), {}

    def serve_connection(self, sock):
        reader, count = Reader(sock), 0
        while True:
            lines = reader.head()
            if not lines:
                break
            fields = fields_of(lines[1:])
            by_name = dict(fields)
            name, run = by_name.get(b"x-case", b"?").decode(), by_name.get(b"x-run", b"?").decode()
            log = []
            with self.lock:
                self.seen.setdefault(run + " " + name, []).append(log)
            try:
                if not self.exchange(sock, reader, lines, fields, name, run, log):
                    break
            finally:
                with self.lock:
                    log.append(DONE)
                    self.lock.notify_all()
            count += 1
        try:
            sock.close()
        except OSError:
            pass

    def exchange(self, sock, reader, lines, fields, name, run, log):
        _, script, options = ROWS.get(name, ([], [OK], {}))
        version = lines[0].rsplit(b" ", 1)
        log.append(f"{short(version[0])} {tell_fields(lines[1:], options)}".strip())
        if options.get("interim"):
            sock.sendall(options["interim"])
        state = {"keep": True}

        def read_body():
            body, trailers, whole = reader.body(fields, False)
            if body or whole == "cut":
                log.append(f"body {short(body)} {whole}")
            if trailers:
                log.append("trailers " + " ".join(short(t) for t in trailers))
            return whole == "whole"

        def word(step):
            key = run + " " + name
            if step == "GO":
                self.wait(lambda: key in self.going)
            if step == "CLOSE":
                sock.close()
                return False
            if step == "HALF":
                sock.shutdown(socket.SHUT_WR)
            if step in ("ECHO", "READ"):
                with self.lock:
                    self.read[key] = reader
                got = reader.rest() if step == "READ" else b""
                while step == "ECHO" and (reader.data or reader.more()):
                    got += reader.data
                    sock.sendall(reader.data)
                    reader.data = b""
                log.append(f"then {short(got)} {reader.end}")
                return False
            if step == "IDLE-CLOSE":
                time.sleep(0.25)
                return False
            return True

        if options.get("before_body"):
            writer = threading.Thread(target=lambda: state.update(keep=play(sock, script, name, run, word)))
            writer.start()
            if "CLOSE" not in script:
                read_body()
            writer.join()
        else:
            if not read_body():
                return False
            state["keep"] = play(sock, script, name, run, word)
        return state["keep"] and FIN not in script and RST not in script

    def wait(self, holds):
        with self.lock:
            end = time.monotonic() + LIMITS["patience"]
            while not holds() and time.monotonic() < end:
                self.lock.wait(0.02)

    def control(self, sock):
        """`go RUN CASE`: its client has read what came first. `read RUN CASE`: waits until its server has read bytes. `take RUN`: all
        that the run's servers observed, once they are done."""
        what, key = sock.recv(256).decode().strip().split(" ", 1)
        answer = b"ok"
        if what == "go":
            with self.lock:
                self.going.add(key)
                self.lock.notify_all()
        elif what == "read":
            self.wait(lambda: key in self.read and self.read[key].data)
        else:
            answer = self.take(key + " ")
        sock.sendall(answer)
        sock.close()

    def take(self, run):
        # A request that nobody waits for may still be under way.
        time.sleep(0.3)
        self.wait(lambda: all(log and log[-1] == DONE for key, logs in self.seen.items() if key.startswith(run) for log in logs))
        with self.lock:
            taken = {key: [[entry for entry in log if entry != DONE] for log in logs] for key, logs in self.seen.items() if key.startswith(run)}
            self.seen = {key: logs for key, logs in self.seen.items() if key not in taken}
            self.going = {key for key in self.going if not key.startswith(run)}
            self.read = {key: reader for key, reader in self.read.items() if not key.startswith(run)}
        return json.dumps(taken).encode()

    def serve(self):
        def listen(port, attend):
            def loop(s):
                while True:
                    conn, _ = s.accept()
                    threading.Thread(target=attend, args=(conn,), daemon=True).start()
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                s = socket.socket(family, socket.SOCK_STREAM)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.bind((address, port))
                s.listen(512)
                threading.Thread(target=loop, args=(s,), daemon=True).start()
        for port in PORTS:
            listen(port, self.serve_connection)
        listen(CONTROL_PORT, self.control)
        print("serving", flush=True)
        threading.Event().wait()


# --- the client

def ask_server(address, words):
    """Asks the case's server about the case, beside its connection."""
    with socket.create_connection((address, CONTROL_PORT), timeout=LIMITS["patience"] + 15) as s:
        s.sendall(words.encode() + b"\n")
        data = b""
        while got := s.recv(65536):
            data += got
    return data


def read_answer(reader, method, options, log):
    """One answer with the interim ones before it, into the log; its status."""
    while True:
        lines = reader.head()
        if not lines:
            log.append(f"no answer {short(reader.data)} {reader.end}")
            return None
        fields = fields_of(lines[1:])
        parts = lines[0].split(b" ", 2)
        status = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
        told = f"{status} {short(parts[2]) if len(parts) > 2 else ''} {tell_fields(lines[1:], options)}".rstrip()
        if 100 <= status < 200 and status != 101:
            log.append(told)
            if options.get("interim"):
                return status
            continue
        if status == 101 or method == b"HEAD" or status in (204, 304):
            log.append(told)
            return status
        body, trailers, whole = reader.body(fields, True)
        log.append(f"{told} body {short(body)} {whole}" + "".join(" trailer " + short(t) for t in trailers))
        return status


def client_case(name, target, port, run, log, control):
    ask, _, options = ROWS[name]
    sock = socket.create_connection((target, port), timeout=LIMITS["patience"])
    reader, answered = Reader(sock), 0
    method = next(step for step in ask if isinstance(step, bytes)).lstrip().split(b" ")[0]
    state = {"answers": 0}

    def word(step):
        nonlocal sock, reader
        if step == "100":
            read_answer(reader, method, options, log)
            options_now.pop("interim", None)
        if step == "REOPEN":
            # Every client does this when it finds its idle connection closed.
            sock.settimeout(0.01)
            reader.more()
            if reader.end == "EOF":
                sock = socket.create_connection((target, port), timeout=LIMITS["patience"])
            reader = Reader(sock)
            return ("socket", sock)
        if step == "READ BY SERVER":
            ask_server(control, f"read {run} {name}")
        if step == "ANSWER":
            state["answers"] += 1
            return read_answer(reader, method, options_now, log) is not None or None
        return True

    options_now = dict(options)
    upload = threading.Thread(target=lambda: play(sock, ask, name, run, word, options.get("drip")))
    upload.start()
    if "ANSWER" in ask or "100" in ask or RST in ask:
        upload.join()
    if first := options.get("go"):
        # The server goes on only then, so who holds the beginning back until the end comes shows here.
        while first not in reader.data and reader.more():
            pass
        log.append("the beginning " + ("before the rest" if first in reader.data else f"not alone {reader.end}"))
        ask_server(control, f"go {run} {name}")
    if RST not in ask:
        if options.get("upgrade"):
            log.append(f"then {short(reader.rest())} {reader.end}")
        else:
            while state["answers"] < options.get("answers", 1):
                state["answers"] += 1
                if read_answer(reader, method, options_now, log) is None:
                    break
            sock.settimeout(0.15)
            reader.more()
            if reader.data:
                log.append("more " + short(reader.data))
    upload.join()
    sock.close()


def run_all(a):
    logs, threads = {}, []
    names = [n for n in ROWS if not a.get("only") or n in a["only"]]
    for name in names:
        for i in range(ROWS[name][2].get("repeat", 1)):
            log = []
            logs.setdefault(name, []).append(log)

            def one(name=name, log=log):
                try:
                    client_case(name, a["target"], a["port"], a["run"], log, a["control"])
                except OSError as e:
                    log.append("client: " + ending(e))
            threads.append(threading.Thread(target=one, daemon=True))
    for t in threads:
        t.start()
        time.sleep(0.008)
    for t in threads:
        t.join(3 * LIMITS["patience"] + 8)
    served = json.loads(ask_server(a["control"], "take " + a["run"]))

    def told(name):
        client = sorted({"; ".join(log) for log in logs[name]})
        server = sorted({"; ".join(log) for log in served.get(a["run"] + " " + name, [])}) if "repeat" in ROWS[name][2] else \
            ["; ".join(log) for log in served.get(a["run"] + " " + name, [])]
        at_server = "" if ROWS[name][2].get("only_answer") else " / server: " + (" | ".join(server) or "no request")
        return "client: " + " | ".join(client) + at_server
    print(json.dumps({name: told(name) for name in names}))


if __name__ == "__main__":
    if sys.argv[1] == "list":
        print("\n".join(ROWS))
    elif sys.argv[1] == "server":
        LIMITS["patience"] = float(sys.argv[3])
        Server().serve()
    else:
        chosen = json.loads(sys.argv[2])
        LIMITS["patience"] = chosen["patience"]
        run_all(chosen)
