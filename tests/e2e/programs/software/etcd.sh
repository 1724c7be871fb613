#!/bin/sh
# etcd: unary calls and a watch, which is a gRPC stream.
# needs: etcd etcdctl
# port: 2379
case "$1" in
serve) exec etcd --data-dir "$DIR/db" --listen-client-urls "http://[::]:2379" --advertise-client-urls "http://$SERVER:2379" --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync ;;
check)
  export ETCDCTL_API=3 ETCDCTL_ENDPOINTS="http://$URLHOST:2379"
  echo "put: $(etcdctl put k v 2>&1)"
  echo "get: $(etcdctl get k 2>&1 | tr '\n' ' ')"
  echo "watch: $( (timeout 2 etcdctl watch w & sleep 0.6; etcdctl put w seen >/dev/null; wait) 2>/dev/null | tr '\n' ' ')"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
