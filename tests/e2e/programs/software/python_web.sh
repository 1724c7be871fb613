#!/bin/sh
# A Flask application under gunicorn: uploads by length and in chunks, a download, and the address that it sees as the client's.
# needs: gunicorn /usr/lib/python3/dist-packages/flask curl
# port: 8000
case "$1" in
serve)
  cat >"$DIR/app.py" <<'PY'
import hashlib
from flask import Flask, Response, request
app = Flask(__name__)
@app.post("/upload")
def upload(): return {k: hashlib.md5(f.read()).hexdigest() for k, f in request.files.items()}
@app.put("/raw")
def raw(): return hashlib.md5(request.stream.read()).hexdigest()
@app.get("/stream")
def stream(): return Response(("x" * 1000 for _ in range(2000)), mimetype="text/plain")
@app.get("/address")
def address(): return request.remote_addr
@app.get("/unread")
def unread(): return "", 413
PY
  cd "$DIR" && exec /usr/bin/python3 /usr/bin/gunicorn -b '[::]:8000' -w 2 --log-file "$DIR/log" app:app
  ;;
check)
  c() { curl -sS -g --max-time 10 "$@" 2>&1; }
  d=$(mktemp -d); head -c 5000000 /dev/zero >"$d/f"; u="http://$URLHOST:8000"
  echo "form: $(c -F "a=@$d/f" -F "b=@$d/f" "$u/upload")"
  echo "put: $(c -T "$d/f" "$u/raw")"
  echo "put_chunked: $(c -T - "$u/raw" <"$d/f")"
  echo "stream: $(c "$u/stream" | md5sum | cut -c1-8)"
  echo "missing: $(c -o /dev/null -w '%{http_code}' "$u/nothing")"
  echo "address: $(c "$u/address" | sed "$NAMES")"
  rm -rf "$d"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
