#!/bin/sh
# Redis Cluster of one node in each pod, which learn each other's address from their connections.
# needs: redis-server redis-cli
# port: 6390
# paths: declared-pod4 declared-pod6
start() { redis-server --port 6390 --bind '*' '-::*' --protected-mode no --save '' --dir "$1" --cluster-enabled yes --cluster-node-timeout 3000 "${2:---loglevel}" "${3:-notice}" "${4:---loglevel}" "${5:-notice}" "${6:---loglevel}" "${7:-notice}"; }
case "$1" in
serve) exec redis-server --port 6390 --bind '*' '-::*' --protected-mode no --save '' --dir "$DIR" --cluster-enabled yes --cluster-node-timeout 3000 ;;
check)
  redis-cli -h "$HOST" -p 6390 cluster reset hard >/dev/null
  d=$(mktemp -d)
  start "$d" --daemonize yes --pidfile "$d/pid" --logfile "$d/log" >/dev/null
  for i in $(seq 20); do redis-cli -p 6390 ping >/dev/null 2>&1 && break; sleep 0.1; done
  redis-cli -p 6390 cluster meet "$HOST" 6390 >/dev/null
  for i in $(seq 40); do [ "$(redis-cli -h "$HOST" -p 6390 cluster nodes | grep -c connected)" = 2 ] && [ "$(redis-cli -p 6390 cluster nodes | grep -c connected)" = 2 ] && break; sleep 0.1; done
  known() { redis-cli "$@" -p 6390 cluster nodes | grep -c ' connected'; }
  echo "nodes_known: server $(known -h "$HOST") client $(known)"
  echo "client_at_server: $(redis-cli -h "$HOST" -p 6390 cluster nodes | grep -v myself | awk '{print $2}' | sed "s/:6390@.*//;$NAMES")"
  redis-cli -p 6390 shutdown nosave 2>/dev/null
  rm -rf "$d"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
