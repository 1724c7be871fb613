#!/bin/sh
# NATS: the server's greeting, and a message through it.
# needs: nats-server
# port: 4222
case "$1" in
serve) exec nats-server -a :: -p 4222 ;;
check)
  echo "dialogue: $(talk.py say "$HOST" 4222 - 'CONNECT {"verbose":true}' 'SUB a 1' 'PUB a 5\r\nhello' - - | sed 1d | tr '\n' ' ')"
  echo "banner: $(talk.py banner "$HOST" 4222)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
