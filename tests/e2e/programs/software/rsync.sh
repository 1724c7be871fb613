#!/bin/sh
# An rsync daemon, both directions.
# needs: rsync
# port: 873
case "$1" in
serve)
  mkdir "$DIR/files"; for i in $(seq 30); do head -c $((i * 10000)) /dev/zero >"$DIR/files/$i"; done; chmod -R 777 "$DIR/files"
  printf 'use chroot = no\npid file = %s/pid\n[files]\npath = %s/files\nread only = no\nuid = root\n' "$DIR" "$DIR" >"$DIR/conf"
  exec rsync --daemon --no-detach --config="$DIR/conf" --port=873
  ;;
check)
  d=$(mktemp -d)
  rsync -a "rsync://$URLHOST/files/" "$d/"; echo "pull: $? $(ls "$d" | grep -c '^[0-9]*$')"
  echo "$CLIENT_PATH" >"$d/new-$CLIENT_PATH"; rsync -a "$d/new-$CLIENT_PATH" "rsync://$URLHOST/files/"; echo "push: $? $(cmp "$d/new-$CLIENT_PATH" "$DIR/files/new-$CLIENT_PATH" && echo same)"
  rm -rf "$d"
  echo "banner: $(talk.py say "$HOST" 873 '@RSYNCD: 31.0' | cut -c1-8)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
