#!/bin/sh
# gRPC by its C core, which most languages use: streams both ways at once, half-close by the client, status and trailers, cancellation.
# needs: /usr/bin/python3 /usr/lib/python3/dist-packages/grpc
# port: 9101
case "$1" in
serve)
  cat >"$DIR/server.py" <<'PY'
import threading, time
from concurrent import futures
import grpc

cancelled = threading.Event()


def meet(requests, context):
    """Speaks first; then each side says 200 numbers without waiting, and the last ones only after half of the other's have come."""
    context.send_initial_metadata((("x-greeting", "hello"),))
    yield b"first"
    heard, half, done = [], threading.Event(), threading.Event()
    def hear():
        for one in requests:
            heard.append(one)
            if len(heard) == 100:
                half.set()
        done.set()
    threading.Thread(target=hear, daemon=True).start()
    for n in range(200):
        if n == 150 and not half.wait(20):
            context.abort(grpc.StatusCode.ABORTED, "the client waits")
        yield b"%d" % n
    # What comes now comes after the client's half-close.
    done.wait(20)
    in_order = heard == [b"%d" % n for n in range(200)]
    yield b"closed after %d, %s" % (len(heard), b"in order" if in_order else b"out of order")
    context.set_trailing_metadata((("x-end", "fin"), ("x-end-bin", b"\x00\xff\x80")))


def answer(requests, context):
    for one in requests:
        yield one[::-1]


def refuse(requests, context):
    for n, one in enumerate(requests):
        yield one
        if n == 2:
            context.set_trailing_metadata((("x-why", "three is enough"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no more, bitte schön: 100%")


def silent(requests, context):
    cancelled.clear()
    context.add_callback(cancelled.set)
    yield b"begun"
    cancelled.wait(20)


def was_cancelled(request, context):
    return b"yes" if cancelled.wait(5) else b"no"


streams = {"Meet": meet, "Answer": answer, "Refuse": refuse, "Silent": silent}
methods = {name: grpc.stream_stream_rpc_method_handler(of) for name, of in streams.items()}
methods |= {"WasCancelled": grpc.unary_unary_rpc_method_handler(was_cancelled)}
server = grpc.server(futures.ThreadPoolExecutor(200))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("e2e.Talk", methods),))
assert server.add_insecure_port("[::]:9101")
server.start()
server.wait_for_termination()
PY
  exec /usr/bin/python3 "$DIR/server.py"
  ;;
check)
  /usr/bin/python3 - "$URLHOST:9101" <<'PY'
import hashlib, queue, sys, threading, time
import grpc

channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.enable_http_proxy", 0)])
stream = lambda name: channel.stream_stream("/e2e.Talk/" + name)


def told(error):
    return error.code().name, error.details(), [(k, v) for k, v in error.trailing_metadata() or () if k.startswith("x-")]


def meet():
    half, sent_all, heard = threading.Event(), threading.Event(), []
    greeted = threading.Event()
    def say():
        assert greeted.wait(20)
        for n in range(200):
            if n == 150:
                assert half.wait(20), "the server waits"
            yield b"%d" % n
        sent_all.set()
    begun = time.monotonic()
    call = stream("Meet")(say(), timeout=30)
    first = next(call).decode()
    print("greeting:", dict(call.initial_metadata()).get("x-greeting"), first, "at once" if time.monotonic() - begun < 1 else "late")
    greeted.set()
    for one in call:
        heard.append(one)
        if len(heard) == 100:
            half.set()
    in_order = heard[:-1] == [b"%d" % n for n in range(200)]
    print("both_ways:", len(heard) - 1, "in order" if in_order else "out of order")
    print("half_close:", heard[-1].decode())
    print("status:", call.code().name, sorted((k, v) for k, v in call.trailing_metadata() if k.startswith("x-")))


def turns():
    asked = queue.Queue()
    call = stream("Answer")(iter(asked.get, None), timeout=30)
    said = []
    for word in (b"one", b"two", b"three"):
        asked.put(word)
        said.append(next(call).decode())
    asked.put(None)
    print("turns:", *said, "and the end" if next(call, None) is None else "and more", call.code().name)
    big = bytes(range(256)) * 8000
    got = b"".join(stream("Answer")(iter([big, big[:100]]), timeout=30))
    print("big:", hashlib.md5(got).hexdigest()[:8], len(got))


def at_once():
    def one(results):
        results.append(list(stream("Answer")(iter([b"ab"] * 20), timeout=30)) == [b"ba"] * 20)
    results = []
    threads = [threading.Thread(target=one, args=(results,)) for _ in range(100)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("hundred_streams:", sum(results))


def refused():
    asked, heard = queue.Queue(), []
    for n in range(5): asked.put(b"%d" % n)
    call = stream("Refuse")(iter(asked.get, None), timeout=30)
    try:
        for one in call: heard.append(one.decode())
    except grpc.RpcError as error:
        print("refusal:", *heard, *told(error))
    asked.put(None)
    try:
        next(stream("Nothing")(iter([b"x"]), timeout=10))
    except grpc.RpcError as error:
        print("no_method:", *told(error))


def ended():
    asked = queue.Queue()
    try:
        call = stream("Silent")(iter(asked.get, None), timeout=1)
        next(call); next(call)
    except grpc.RpcError as error:
        print("deadline:", error.code().name)
    call = stream("Silent")(iter(asked.get, None), timeout=30)
    next(call); call.cancel()
    print("cancelled:", call.code().name, channel.unary_unary("/e2e.Talk/WasCancelled")(b"", timeout=10).decode())
    asked.put(None); asked.put(None)


for part in (meet, turns, at_once, refused, ended):
    try:
        part()
    except Exception as broken:
        print("broken:", part.__name__, repr(broken))
PY
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
