#!/bin/sh
# 5,000 connections to an echo server, half-close and reset by netcat, and what a client gets at a port without a listener.
# needs: canal-samples nc
# port: 7000
case "$1" in
serve) ulimit -n 12000; exec canal-samples tcp --listen echo=7000 ;;
check)
  echo "half_close: $(printf hello | timeout 5 nc -N "$HOST" 7000)"
  timeout 5 nc -z -w 3 "$HOST" 7000; echo "open_port: $?"
  timeout 5 nc -z -w 3 "$HOST" 7009; echo "closed_port: $?"
  timeout 5 nc -z -w 3 "$HOST" 6; echo "undeclared_port: $?"
  ;;
crowd) echo "five_thousand: $(talk.py many "$HOST" 7000 5000 7069 7069)" ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
