#!/bin/sh
# Redis Sentinel: the primary is killed, two Sentinels agree on it over the mesh, a client queries one of them and writes to the new primary.
# The server's pod has the primary (6391), a replica (6392) and a Sentinel (26391), the client's a replica (6393) and a Sentinel (26392).
# needs: redis-server redis-cli redis-sentinel
# port: 26391
node() {
  port=$1; dir=$2; shift 2; set -- --dir "$dir" --pidfile "$dir/$port.pid" "$@"
  redis-server --port "$port" --bind '*' '-::*' --protected-mode no --save '' --repl-diskless-sync-delay 0 "$@"
}
case "$1" in
serve)
  # The primary is not started again while the file `down` exists.
  while :; do [ -e "$DIR/down" ] || node 6391 "$DIR"; sleep 0.1; done &
  node 6392 "$DIR" &
  printf 'port 26391\ndir %s\nprotected-mode no\n' "$DIR" >"$DIR/sentinel.conf"
  exec redis-sentinel "$DIR/sentinel.conf"
  ;;
prepare) redis-cli -p 6391 ping && redis-cli -p 6392 ping ;;
check)
  old() { redis-cli -h "$SERVER" -p 6391 "$@" 2>&1; }
  other() { redis-cli -h "$SERVER" -p 6392 "$@" 2>&1; }
  mine() { redis-cli -p 6393 "$@" 2>&1; }
  sentinel() { redis-cli -h "$HOST" -p 26391 "$@" 2>&1; }
  my_sentinel() { redis-cli -p 26392 "$@" 2>&1; }
  # Addresses and ports of a list of instances, or of a primary.
  places() { awk '$0 == "ip" { getline; ip = $0 } $0 == "port" { getline; print $0, ip }' | sed "$NAMES" | sort | tr '\n' ' '; }
  primary() { sentinel sentinel get-master-addr-by-name m | sed "$NAMES" | tr '\n' ' '; }
  role() { "$1" role | head -1; }
  following() { mine info replication | tr -d '\r' | sed -n 's/^master_port:/port /p; s/^master_link_status:/link /p' | tr '\n' ' '; }
  # Waits until a command prints the expected text, and prints its last output. A Sentinel that finds its machine slow does nothing for 30 s.
  wanted() {
    want=$1; shift; end=$(($(date +%s) + 60))
    while [ "$("$@")" != "$want" ] && [ "$(date +%s)" -lt $end ]; do sleep 0.2; done; "$@"
  }
  sentinels_known() { sentinel sentinel sentinels m | places; my_sentinel sentinel sentinels m | places; }
  replicas_known() { sentinel sentinel replicas m | places; }
  d=$(mktemp -d)
  # Removes the effects of the run over the previous path: otherwise the Sentinel would revert what is done here.
  sentinel sentinel remove m >/dev/null
  old replicaof no one >/dev/null; old flushall >/dev/null; other replicaof "$SERVER" 6391 >/dev/null
  node 6393 "$d" --replicaof "$SERVER 6391" --replica-priority 0 --daemonize yes >/dev/null
  printf 'port 26392\ndir %s\nprotected-mode no\n' "$d" >"$d/sentinel.conf"
  redis-sentinel "$d/sentinel.conf" --daemonize yes --pidfile "$d/26392.pid" >/dev/null
  wanted 'port 6391 link up ' following >/dev/null; wanted PONG my_sentinel ping >/dev/null
  for one in sentinel my_sentinel; do
    $one sentinel monitor m "$SERVER" 6391 2 >/dev/null
    $one sentinel set m down-after-milliseconds 2000 failover-timeout 5000 >/dev/null
  done
  echo "sentinels: $(wanted '26392 client 26391 server ' sentinels_known)"
  echo "replicas: $(wanted '6392 server 6393 client ' replicas_known)"
  echo "primary_before: $(primary)"
  echo "write_before: $(old set k before) $(wanted before mine get k)"
  timeout 120 redis-cli -h "$HOST" -p 26391 subscribe +switch-master >"$d/events" &
  touch "$DIR/down"; kill -9 "$(cat "$DIR/6391.pid")"
  echo "primary_after: $(wanted 'server 6392 ' primary)"
  set -- $(sentinel sentinel get-master-addr-by-name m)
  echo "write_after: $(redis-cli -h "$1" -p "$2" set new after 2>&1) $(redis-cli -h "$1" -p "$2" get k 2>&1)"
  told() { tail -1 "$d/events" | tr ' ' '\n' | sed "$NAMES" | tr '\n' ' '; }
  echo "told: $(wanted 'm server 6391 server 6392 ' told)"
  echo "replica_follows: $(wanted 'port 6392 link up ' following) $(wanted after mine get new)"
  rm "$DIR/down"
  echo "old_primary: $(wanted slave role old) $(wanted after old get new)"
  my_sentinel shutdown nosave >/dev/null; mine shutdown nosave >/dev/null
  for one in 26392 6393; do kill "$(cat "$d/$one.pid" 2>/dev/null)" 2>/dev/null; done
  kill %1 2>/dev/null; wait
  rm -rf "$d"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
