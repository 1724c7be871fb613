"""Connections that stop reading: stalls.py MODE HOST PORT COUNT. It prints `stalled` once no connection moves a byte any more, and holds them
until it is killed. MODE: `get` asks for a large HTTP response, `read` for as many bytes, and neither reads; `write` writes without end."""
import select, signal, socket, sys, time

QUIET = 1.0             # s without a byte after which the connections stall
SIZE = 200_000_000      # bytes of the response that nobody reads

mode, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
first = {
    "get": b"GET /blob?size=%d HTTP/1.1\r\nHost: blob\r\n\r\n" % SIZE,
    "read": b"%d\n" % SIZE,
    "write": b"\2" * 65536,
}[mode]
connections = [socket.create_connection((host, port)) for _ in range(count)]
for connection in connections:
    connection.setblocking(False)
    connection.send(first)

if mode == "write":
    moved = time.monotonic()
    while time.monotonic() - moved < QUIET:
        _, writable, _ = select.select([], connections, [], 0.1)
        for connection in writable:
            try:
                connection.send(first)
                moved = time.monotonic()
            except BlockingIOError:
                pass
else:
    # Every connection has bytes to read, and then time for as many as its buffers take.
    waiting = set(connections)
    while waiting:
        readable, _, _ = select.select(list(waiting), [], [], 1)
        waiting -= set(readable)
    time.sleep(QUIET)
print("stalled", flush=True)
# At the end bytes are unread, so that the kernel resets each connection.
signal.pause()
