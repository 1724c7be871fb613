#!/bin/sh
# memcached's text protocol.
# needs: memcached
# port: 11211
case "$1" in
serve) exec memcached -u memcache -l ::,0.0.0.0 -p 11211 ;;
check) echo "dialogue: $(talk.py say "$HOST" 11211 'set k 0 60 5\r\nhello' 'get k' - - 'incr nothing 1' 'verbosity 0' | tr '\n' ' ')" ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
