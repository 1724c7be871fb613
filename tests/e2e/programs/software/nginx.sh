#!/bin/sh
# nginx: a file, ranges, and 5,000 connections at once.
# needs: nginx curl
# port: 80
case "$1" in
serve)
  mkdir "$DIR/html"; chmod 755 "$DIR"; head -c 2000000 /dev/zero >"$DIR/html/f"; printf ok >"$DIR/html/ok"
  cat >"$DIR/conf" <<CONF
worker_processes 1; worker_rlimit_nofile 12000; daemon off; pid $DIR/pid; error_log $DIR/log;
events { worker_connections 11000; }
http { access_log off; keepalive_timeout 60; server { listen 80 backlog=4096; listen [::]:80 backlog=4096; root $DIR/html; } }
CONF
  exec nginx -c "$DIR/conf"
  ;;
check)
  c() { curl -sS -g --max-time 10 "$@" 2>&1; }
  echo "file: $(c "http://$URLHOST/f" | md5sum | cut -c1-8)"
  echo "range: $(c -r 5-9 "http://$URLHOST/f" | wc -c)"
  echo "missing: $(c -o /dev/null -w '%{http_code}' "http://$URLHOST/nothing")"
  ;;
crowd) echo "five_thousand: $(talk.py many "$HOST" 80 5000 "$(printf 'HEAD /ok HTTP/1.1\r\nHost: x\r\n\r\n' | od -An -tx1 -v | tr -d ' \n')" "$(printf 'HTTP/1.1 200 OK\r\n' | od -An -tx1 -v | tr -d ' \n')")" ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
