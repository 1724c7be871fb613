#!/bin/sh
# WebSocket (the Python package websockets): a server that sends first, text and binary messages both ways, pings, close codes.
# needs: /usr/bin/python3 /usr/lib/python3/dist-packages/websockets
# port: 8765
case "$1" in
serve)
  cat >"$DIR/server.py" <<'PY'
import asyncio, http, socket, struct
import websockets

ends = {}


async def talk(ws):
    word = ws.path.rsplit("/", 1)[1]
    if ws.path.startswith("/end/"):
        for _ in range(50):
            if word in ends: break
            await asyncio.sleep(0.1)
        return await ws.send(str(ends.get(word)))
    await ws.send("hello")
    ticking = None
    try:
        async for message in ws:
            if message == "address":
                await ws.send(ws.remote_address[0])
            elif message == "ping me":
                await asyncio.wait_for(await ws.ping(b"from the server"), 10)
                await ws.send("ponged")
            elif message == "tick":
                ticking = asyncio.create_task(tick(ws))
            elif message == "close":
                await ws.close(4001, "as you wish")
            elif message == "reset":
                reset(ws)
            elif isinstance(message, str):
                await ws.send(message.upper())
            else:
                await ws.send(message[::-1])
    except websockets.ConnectionClosed:
        pass
    finally:
        ends[word] = (ws.close_code, ws.close_reason)


def reset(ws):
    ws.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ws.transport.abort()


async def tick(ws):
    for n in range(20):
        await ws.send(f"tick {n}")
        await asyncio.sleep(0.01)


async def refuse(path, headers):
    if path == "/refused":
        return http.HTTPStatus.FORBIDDEN, [("x-why", "no")], b"not here"


async def main():
    async with websockets.serve(talk, None, 8765, process_request=refuse, subprotocols=["b", "c"], max_size=8 << 20):
        await asyncio.Future()

asyncio.run(main())
PY
  exec /usr/bin/python3 "$DIR/server.py"
  ;;
check)
  /usr/bin/python3 - "ws://$URLHOST:8765" "$CLIENT_PATH" <<'PY' | sed "$NAMES"
import asyncio, hashlib, socket, struct, sys, time
import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatusCode

url, client_path = sys.argv[1:]
connect = lambda path, **more: websockets.connect(url + path, max_size=8 << 20, open_timeout=10, **more)


async def ask(ws, message):
    await ws.send(message)
    return await asyncio.wait_for(ws.recv(), 10)


async def end_at_server(name):
    async with connect("/end/" + name) as ws:
        return await asyncio.wait_for(ws.recv(), 10)


async def talk():
    begun = time.monotonic()
    async with connect(f"/{client_path}-by-client", subprotocols=["a", "b"]) as ws:
        print("first:", await asyncio.wait_for(ws.recv(), 10), "at once" if time.monotonic() - begun < 1 else "late")
        print("negotiated:", ws.subprotocol, *(e.name for e in ws.extensions))
        print("text:", await ask(ws, "grüße"), await ask(ws, "") == "")
        print("binary:", hashlib.md5(await ask(ws, bytes(range(256)) * 8000)).hexdigest()[:8])
        print("fragments:", await ask(ws, ["in ", "three ", "parts"]))
        await asyncio.wait_for(await ws.ping(b"from the client"), 10)
        print("ping: ponged;", await ask(ws, "ping me"))
        # The server's messages arrive while the client's are in transit.
        await ws.send("tick")
        for n in range(20):
            await ws.send(f"tock {n}")
        got = [await asyncio.wait_for(ws.recv(), 10) for _ in range(40)]
        for word in ("tick", "TOCK"):
            mine = [one for one in got if one.startswith(word)]
            print(f"both_ways_{word.lower()}:", len(mine), "in order" if mine == [f"{word} {n}" for n in range(20)] else mine)
        await asyncio.sleep(2)
        print("after_silence:", await ask(ws, "still there"))
        print("address:", await ask(ws, "address"))
        await ws.close(4002, "enough")
        print("closed_by_client:", ws.close_code, ws.close_reason)
    print("closed_by_client_at_server:", await end_at_server(f"{client_path}-by-client"))


async def ends():
    for how in ("close", "reset"):
        async with connect(f"/{client_path}-{how}", ping_interval=None) as ws:
            await ws.recv()
            try:
                print(f"server_{how}:", await ask(ws, how))
            except ConnectionClosed as closed:
                reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else ("without a close frame", ws.close_code)
                print(f"server_{how}:", *reason)
    async with connect(f"/{client_path}-reset", ping_interval=None) as ws:
        await ws.recv()
        ws.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ws.transport.abort()
    print("client_reset:", await end_at_server(f"{client_path}-reset"))


async def refusals():
    try:
        async with connect("/refused"):
            print("refused: let in")
    except InvalidStatusCode as refused:
        print("refused:", refused.status_code, refused.headers.get("x-why"))


async def crowd():
    async def one():
        async with connect(f"/{client_path}-crowd") as ws:
            return [await ws.recv(), await ask(ws, "x")] == ["hello", "X"]
    print("hundred_at_once:", sum(await asyncio.gather(*(one() for _ in range(100)))))


async def main():
    for part in (talk, ends, refusals, crowd):
        try:
            await part()
        except Exception as broken:
            print("broken:", part.__name__, repr(broken))

asyncio.run(main())
PY
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
