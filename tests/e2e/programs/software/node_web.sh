#!/bin/sh
# A Node.js application: uploads, server-sent events, early refusals, and its five seconds of keep-alive shortened to one.
# needs: node curl
# port: 3000
case "$1" in
serve)
  cat >"$DIR/app.js" <<'JS'
const http = require('http'), crypto = require('crypto');
const server = http.createServer((q, s) => {
  if (q.url === '/upload') { const h = crypto.createHash('md5'); q.on('data', d => h.update(d)); q.on('end', () => s.end(h.digest('hex'))); }
  else if (q.url === '/events') { let n = 0; s.writeHead(200, {'content-type': 'text/event-stream'}); const t = setInterval(() => { s.write(`data: ${n}\n\n`); if (++n === 5) { clearInterval(t); s.end(); } }, 50); }
  else if (q.url === '/address') s.end(q.socket.remoteAddress);
  else { s.writeHead(200); s.end('ok'); }
});
server.keepAliveTimeout = 1000;
server.listen(3000, '::');
JS
  exec node "$DIR/app.js"
  ;;
check)
  c() { curl -sS -g --max-time 10 "$@" 2>&1; }
  d=$(mktemp -d); head -c 5000000 /dev/zero >"$d/f"; u="http://$URLHOST:3000"
  echo "upload: $(c --data-binary "@$d/f" "$u/upload")"
  echo "upload_chunked: $(c -T - "$u/upload" <"$d/f")"
  echo "events: $(c -N "$u/events" | tr '\n' ' ')"
  echo "kept: $(c "$u/a" "$u/b" "$u/c")"
  echo "address: $(c "$u/address" | sed "$NAMES")"
  rm -rf "$d"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
