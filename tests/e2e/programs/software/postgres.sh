#!/bin/sh
# PostgreSQL with pgbench, and a rule that admits only the server's own host.
# needs: /usr/lib/postgresql/15/bin/postgres psql pgbench
# port: 5432
bin=/usr/lib/postgresql/15/bin
case "$1" in
serve)
  chown postgres "$DIR"
  su="setpriv --reuid=postgres --regid=postgres --clear-groups"
  $su $bin/initdb -D "$DIR/db" -A trust -U postgres --no-sync >"$DIR/initdb.log"
  printf '%s\n' 'local all all trust' 'host all postgres samehost trust' 'host all postgres all reject' 'host all app all trust' >"$DIR/db/pg_hba.conf"
  exec $su $bin/postgres -D "$DIR/db" -c listen_addresses='*' -c unix_socket_directories="$DIR" -c fsync=off
  ;;
prepare) psql -q -h "$DIR" -U postgres -c "create role app login" -c "create database app owner app" ;;
check)
  export PGCONNECT_TIMEOUT=5
  echo "query: $(psql -h "$HOST" -U app -Atc 'select 6*7' 2>&1)"
  echo "client_address: $(psql -h "$HOST" -U app -Atc 'select host(inet_client_addr())' 2>&1 | sed "$NAMES")"
  psql -h "$HOST" -U postgres -d app -Atc 'select 1' >/dev/null 2>&1 && echo "samehost: let in" || echo "samehost: refused"
  pgbench -q -i -s 1 -h "$HOST" -U app app >/dev/null 2>&1; echo "pgbench_load: $?"
  echo "pgbench: $(pgbench -h "$HOST" -U app -c 4 -t 50 app 2>/dev/null | sed -n 's/^number of transactions actually processed: //p')"
  echo "pgbench_reconnecting: $(pgbench -h "$HOST" -U app -S -C -c 2 -t 40 app 2>/dev/null | sed -n 's/^number of transactions actually processed: //p')"
  echo "copy: $(psql -h "$HOST" -U app -qAtc "copy (select repeat('x', 100) from generate_series(1, 20000)) to stdout" | md5sum | cut -c1-8)"
  echo "cancel: $(psql -h "$HOST" -U app -Atc "set statement_timeout = 300; select pg_sleep(5)" 2>&1 | tail -1)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
