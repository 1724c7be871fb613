#!/bin/sh
# iperf3 both ways; its measurements are not compared.
# needs: iperf3
# port: 5201
case "$1" in
serve) exec iperf3 -s ;;
check)
  # A server that has just ended one test may say for a moment that it is busy.
  measure() {
    for i in 1 2 3 4 5; do
      said=$(iperf3 -c "$HOST" -n 50M "$@" 2>&1); code=$?
      case "$said" in *busy*) sleep 0.5 ;; *) break ;; esac
    done
    echo $code
  }
  echo "up: $(measure)"
  echo "down: $(measure -R -P 2)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
