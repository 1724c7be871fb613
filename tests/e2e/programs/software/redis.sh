#!/bin/sh
# Redis: replication as the master records it, and a Sentinel that reads that record. The client's pod has the replica and the Sentinel.
# needs: redis-server redis-cli redis-sentinel
# port: 6379
case "$1" in
serve) ulimit -n 12000; exec redis-server --port 6379 --bind '*' '-::*' --protected-mode no --save '' --dir "$DIR" --repl-diskless-sync-delay 0 --tcp-backlog 4096 ;;
check)
  r() { redis-cli -h "$HOST" "$@" 2>&1; }
  echo "ping: $(r ping)"
  echo "set_get: $(r set k v) $(r get k)"
  echo "pipeline: $(yes 'incr n' | head -1000 | r | tail -1 | awk '{print ($1 >= 1000 && $1 % 1000 == 0) ? "whole" : $1}')"
  # Waits until the words print something that matches; it only ends a hang.
  soon() { want=$1; shift; for i in $(seq 600); do "$@" 2>/dev/null | grep -q "$want" && return; sleep 0.1; done; }
  d=$(mktemp -d); port=$((6400 + ${#HOST}))
  redis-cli -h "$HOST" subscribe ch >"$d/heard" & subscriber=$!
  soon '^1$' redis-cli -h "$HOST" --raw pubsub numsub ch
  r publish ch hello >/dev/null; soon hello cat "$d/heard"; kill $subscriber; wait $subscriber 2>/dev/null
  echo "pubsub: $(tr '\n' ' ' <"$d/heard")"
  timeout 60 redis-cli -h "$HOST" blpop q 0 >"$d/popped" & popper=$!
  soon 'blocked_clients:1' redis-cli -h "$HOST" info clients
  r rpush q item >/dev/null; wait $popper
  echo "blocked_pop: $(tr '\n' ' ' <"$d/popped")"
  redis-server --port $port --bind '*' '-::*' --protected-mode no --save '' --dir "$d" --replicaof "$HOST" 6379 --daemonize yes --pidfile "$d/pid" --logfile "$d/log" >/dev/null
  soon master_link_status:up redis-cli -p $port info replication
  echo "replica_link: $(redis-cli -p $port info replication | tr -d '\r' | sed -n 's/^master_link_status://p')"
  echo "replica_value: $(redis-cli -p $port get k)"
  echo "replica_address: $(r info replication | tr -d '\r' | sed -n "s/^slave[0-9]*:ip=\([^,]*\),port=$port.*/\1/p" | sed "$NAMES")"
  printf 'port %s\ndir %s\nsentinel monitor m %s 6379 1\nsentinel down-after-milliseconds m 60000\nprotected-mode no\n' $((port + 100)) "$d" "$HOST" >"$d/sentinel.conf"
  redis-sentinel "$d/sentinel.conf" --daemonize yes --pidfile "$d/spid" --logfile "$d/slog" >/dev/null
  soon "^$port\$" redis-cli -p $((port + 100)) sentinel replicas m
  echo "sentinel_sees_replica: $(redis-cli -p $((port + 100)) sentinel replicas m | tr -d '\r' | awk -v p=$port '$0 == "ip" {getline; ip = $0} $0 == "port" {getline; if ($0 == p) print ip}' | sed "$NAMES")"
  redis-cli -p $((port + 100)) shutdown nosave 2>/dev/null; kill "$(cat "$d/spid" 2>/dev/null)" 2>/dev/null; redis-cli -p $port shutdown nosave 2>/dev/null
  rm -rf "$d"
  ;;
crowd) echo "five_thousand: $(talk.py many "$HOST" 6379 5000 50494e470d0a 2b504f4e470d0a)" ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
