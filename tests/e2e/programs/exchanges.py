#!/usr/bin/env python3
"""HTTP/1.1 exchanges that meet an application which closes an idle connection, or answers before it has read the request.

The first argument of each is how long, in seconds, it waits for a response; it is left out here.

`exchanges.py serve` is the application. `exchanges.py race CLIENT HOST PORT N` sends N POSTs about when the application closes the connection
that a proxy has kept: each on a connection of its own if CLIENT is `new`, or all on one if it is `kept`. `exchanges.py upload CLIENT HOST PORT N` sends N bodies that are refused unread, and
`exchanges.py early HOST PORT` one that is accepted before it is read. `exchanges.py proxy NAME PORT HOST` runs another proxy in front of the
application. Each prints one JSON object. Nothing here knows whether there is a mesh, or what is right.
"""
import http.client, json, os, random, select, signal, socket, subprocess, sys, tempfile, threading, time

PORT = 8080
# s: after it the application closes a connection without a request. Short, so that hundreds of closes end soon.
IDLE = 0.020
# s: how far around that moment the POSTs come. A mesh's hop takes less, so that some POSTs meet the close.
SPREAD = 0.003
UPLOAD_BYTES = 5_000_000    # more than all buffers of a mesh, so that the refusal meets a body that is still being sent
TIMEOUT = 10            # s: the first argument

seen, closes, lock = {}, [], threading.Lock()


def read_head(conn, had=b""):
    """The head, and what came after it; None at the end."""
    while b"\r\n\r\n" not in had:
        more = conn.recv(65536)
        if not more:
            return None, b""
        had += more
    head, rest = had.split(b"\r\n\r\n", 1)
    return head.decode("latin-1"), rest


def read_body(conn, head, body):
    length = next((int(l.split(":")[1]) for l in head.split("\r\n") if l.lower().startswith("content-length:")), 0)
    while len(body) < length:
        more = conn.recv(65536)
        if not more:
            return None
        body += more
    return body


def say(conn, status, body, more=""):
    conn.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n{body}".encode())


def serve_one(conn):
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        head, body = read_head(conn)
        if head is None:
            return
        path = head.split(" ")[1]
        if path == "/413":
            say(conn, "413 Content Too Large", "big", "connection: close\r\n")
            return                                      # with the body unread
        if path == "/early":
            say(conn, "200 OK", "stored")
        body = read_body(conn, head, body)
        if path == "/early":
            with lock:
                seen["early"] = -1 if body is None else len(body)
            continue
        if body is None:
            return
        if path == "/seen":
            with lock:
                say(conn, "200 OK", json.dumps({"seen": seen, "closes": closes}))
            continue
        with lock:
            seen[body.decode()] = seen.get(body.decode(), 0) + 1
        say(conn, "200 OK", "ok")
        if not select.select([conn], [], [], IDLE)[0]:
            conn.close()
            with lock:
                closes.append((time.monotonic(), body.decode()))
            return


def serve():
    listener = socket.create_server(("0.0.0.0", PORT), backlog=512)
    print("serving", flush=True)

    def run(conn):
        try:
            serve_one(conn)
        except OSError:
            pass
        conn.close()

    while True:
        threading.Thread(target=run, args=(listener.accept()[0],), daemon=True).start()


def post(host, port, path, body, kept=None):
    """The status, 0 where there is no answer; when the request was sent, and when the answer was there."""
    conn = kept or http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    sent = time.monotonic()
    try:
        if conn.sock is None:
            conn.connect()
            conn.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.monotonic()
        conn.request("POST", path, body)
        answer = conn.getresponse()
        text = answer.read()
        return answer.status, text, sent, time.monotonic()
    except (OSError, http.client.HTTPException):
        conn.close()
        return 0, b"", sent, time.monotonic()
    finally:
        if kept is None:
            conn.close()


def race(client, host, port, tries):
    run, results, failed = f"{os.getpid()}-{port}", [], []
    kept = http.client.HTTPConnection(host, port, timeout=TIMEOUT) if client == "kept" else None
    for n in range(tries):
        status, _, sent, answered = post(host, port, "/", f"{run}-{n}", kept)
        results.append((n, status, sent))
        if status != 200:
            failed.append((n, status, sent))
        time.sleep(max(0, answered + IDLE + random.uniform(-SPREAD, SPREAD) - time.monotonic()))
    # This request, too, may meet a close, and a proxy then responds with 502.
    for _ in range(20):
        status, text, *_ = post(host, port, "/seen", "")
        if status == 200:
            break
        time.sleep(2 * IDLE)
    assert status == 200, status
    known = json.loads(text)
    mine = {key: times for key, times in known["seen"].items() if key.startswith(run + "-")}
    # One connection is idle at a time, that of the POST before. The application's own clock shows whether it had closed that one when the
    # request was sent. Another one's close says nothing: a POST that was sent again leaves the time of its first connection's close.
    closed = {last: at for at, last in known["closes"]}
    after = [n for n, _, sent in failed if closed.get(f"{run}-{n - 1}", sent) < sent]
    for n, status, sent in failed:
        near = [f"{(at - sent) * 1000:+.2f}" for at, _ in known["closes"] if abs(at - sent) < 2 * IDLE]
        print(f"POST {n}: status {status}; the application closed at these ms after it was sent: {' '.join(near)}", file=sys.stderr)
    print(json.dumps({
        "tries": tries, "failed": len(failed), "failed_after_close": len(after), "statuses": sorted({s for _, s, _ in failed}),
        "twice": sum(times > 1 for times in mine.values()), "closes": len([at for at, _ in known["closes"] if at > results[0][2]]),
        "lost": sum(status == 200 and f"{run}-{n}" not in mine for n, status, _ in results),
    }))


def upload(client, host, port, tries):
    failed = 0
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"x" * UPLOAD_BYTES)
        body.flush()
        for _ in range(tries):
            if client == "curl":
                words = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-m", str(TIMEOUT), "-H", "Expect:", "--data-binary",
                         "@" + body.name, f"http://{host}:{port}/413"]
                failed += subprocess.run(words, capture_output=True, text=True).stdout != "413"
            else:
                failed += post(host, port, "/413", b"x" * UPLOAD_BYTES)[0] != 413
    print(json.dumps({"tries": tries, "failed": failed}))


def early(host, port):
    with socket.create_connection((host, port), timeout=TIMEOUT) as conn:
        cut = 0
        conn.sendall(f"POST /early HTTP/1.1\r\nhost: {host}\r\ncontent-length: 400000\r\n\r\n".encode())
        try:
            for _ in range(4):
                # Four pieces with pauses: the response comes before the second.
                conn.sendall(b"x" * 100_000)
                time.sleep(0.3)
        except OSError:
            cut = 1
        try:
            answer = conn.recv(65536).decode("latin-1")
        except OSError:
            answer = ""
    # The application may still read; it has stored nothing before it has read all.
    end, stored = time.monotonic() + TIMEOUT, None
    while stored is None and time.monotonic() < end:
        time.sleep(0.05)
        status, text, *_ = post(host, port, "/seen", "")
        stored = json.loads(text)["seen"].get("early") if status == 200 else None
    print(json.dumps({"cut": cut, "status": answer[9:12], "stored": stored}))


NGINX = """daemon off; master_process off; error_log stderr; pid {dir}/pid; events {{}}
http {{ access_log off; client_max_body_size 0; client_body_temp_path {dir}; proxy_temp_path {dir};
  upstream app {{ server {host}:8080; keepalive 16; }}
  server {{ listen {port}; location / {{ proxy_pass http://app; proxy_http_version 1.1; proxy_set_header Connection ""; }} }} }}
"""
HAPROXY = """global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen all
  bind :{port}
  server app {host}:8080
"""
ENVOY = """static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: a
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
            - {{name: a, domains: ["*"], routes: [{{match: {{prefix: "/"}}, route: {{cluster: app}}}}]}}
  clusters:
  - name: app
    type: STATIC
    load_assignment: {{cluster_name: app, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: {host}, port_value: 8080}}}}}}}}]}}]}}
"""
ENVOY_PROGRAM = os.path.join(os.path.dirname(__file__), "../../../.tools/envoy/bin/envoy")      # as setup/install leaves it
PROXIES = {
    "nginx": (NGINX, ["nginx", "-c", "{file}", "-p", "{dir}"]),
    "haproxy": (HAPROXY, ["haproxy", "-db", "-f", "{file}"]),
    "envoy": (ENVOY, [ENVOY_PROGRAM, "-c", "{file}", "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]),
}


def proxy(name, port, host):
    text, words = PROXIES[name]
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "proxy.yaml" if name == "envoy" else "proxy.conf")
        with open(file, "w") as out:
            out.write(text.format(dir=folder, port=port, host=host))
        child = subprocess.Popen([w.format(file=file, dir=folder) for w in words])
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end and child.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            print("serving" if child.poll() is None else "ended", flush=True)
            child.wait()
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    TIMEOUT, what, *words = int(sys.argv[1]), *sys.argv[2:]
    if what == "serve":
        serve()
    elif what == "race":
        race(words[0], words[1], int(words[2]), int(words[3]))
    elif what == "upload":
        upload(words[0], words[1], int(words[2]), int(words[3]))
    elif what == "early":
        early(words[0], int(words[1]))
    elif what == "proxy":
        proxy(words[0], int(words[1]), words[2])
