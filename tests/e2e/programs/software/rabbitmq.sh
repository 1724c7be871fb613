#!/bin/sh
# RabbitMQ: a queue filled and emptied over AMQP.
# needs: rabbitmq-server amqp-publish amqp-get
# port: 5672
case "$1" in
serve)
  chown rabbitmq "$DIR"
  export HOME="$DIR" RABBITMQ_BASE="$DIR" RABBITMQ_HOME=/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8 RABBITMQ_NODENAME=rabbit@localhost RABBITMQ_MNESIA_BASE="$DIR/db" RABBITMQ_LOG_BASE="$DIR/log" RABBITMQ_LOGS=-
  export RABBITMQ_PID_FILE="$DIR/pid" RABBITMQ_ENABLED_PLUGINS_FILE="$DIR/plugins" RABBITMQ_CONFIG_FILE="$DIR/rabbitmq" RABBITMQ_GENERATED_CONFIG_DIR="$DIR/conf"
  printf 'loopback_users = none\nlisteners.tcp.1 = :::5672\nlog.console = true\n' >"$DIR/rabbitmq.conf"
  exec setpriv --reuid=rabbitmq --regid=rabbitmq --clear-groups /usr/lib/rabbitmq/bin/rabbitmq-server
  ;;
prepare) amqp-declare-queue --url=amqp://guest:guest@127.0.0.1:5672 -q ready ;;
check)
  u="amqp://guest:guest@$URLHOST:5672"
  amqp-declare-queue --url="$u" -q "q$CLIENT_PATH" >/dev/null; echo "declare: $?"
  amqp-publish --url="$u" -r "q$CLIENT_PATH" -b hello; echo "publish: $?"
  echo "get: $(amqp-get --url="$u" -q "q$CLIENT_PATH" 2>&1)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
