#!/bin/sh
# gRPC: the gRPC project's own client and server in Go: streams both ways, metadata, trailers and statuses of streams.
# needs: grpc-interop-server grpc-interop-client
# port: 9100
case "$1" in
serve) exec grpc-interop-server -port 9100 ;;
check)
  for one in ping_pong client_streaming server_streaming cancel_after_begin cancel_after_first_response empty_stream large_unary \
    custom_metadata status_code_and_message special_status_message timeout_on_sleeping_server unimplemented_method unimplemented_service; do
    grpc-interop-client -server_host "$HOST" -server_port 9100 -test_case $one >/dev/null 2>&1; echo "$one: $?"
  done
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
