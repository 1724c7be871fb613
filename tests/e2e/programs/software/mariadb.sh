#!/bin/sh
# MariaDB: the server sends first, and identifies its users by address.
# needs: mariadbd mariadb-install-db mariadb
# port: 3306
case "$1" in
serve)
  chown mysql "$DIR"
  mariadb-install-db --no-defaults --user=mysql --datadir="$DIR/db" --skip-test-db --auth-root-authentication-method=normal --tmpdir="$DIR" >"$DIR/install.log" 2>&1 || { cat "$DIR/install.log"; exit 1; }
  exec mariadbd --no-defaults --user=mysql --datadir="$DIR/db" --socket="$DIR/sock" --pid-file="$DIR/pid" --bind-address='*' --skip-name-resolve --innodb-buffer-pool-size=16M --tmpdir="$DIR"
  ;;
prepare) mariadb --no-defaults -uroot -S "$DIR/sock" -e "create database app; create user app@'%' identified by 'secret'; grant all on app.* to app@'%'" ;;
check)
  q() { mariadb --no-defaults --connect-timeout=5 -h "$HOST" -uapp -psecret app -N -B -e "$1" 2>&1; }
  echo "query: $(q 'select 6*7')"
  echo "user: $(q 'select user()' | sed "$NAMES")"
  echo "blob: $(q "select md5(repeat('x', 1000000))")"
  echo "wrong_password: $(mariadb --no-defaults -h "$HOST" -uapp -pwrong -N -B -e 'select 1' 2>&1 | cut -d' ' -f1-2)"
  echo "banner: $(talk.py banner "$HOST" 3306)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
