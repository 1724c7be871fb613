#!/bin/sh
# A git daemon: clone and push.
# needs: git
# port: 9418
case "$1" in
serve)
  export HOME="$DIR"; git init -q --bare "$DIR/r.git"; git init -q "$DIR/w"; cd "$DIR/w" || exit 1; git config --global safe.directory '*'
  for i in $(seq 40); do head -c 20000 /dev/urandom >f$i; git add . && git -c user.name=a -c user.email=a@b commit -qm "$i"; done
  git push -q "$DIR/r.git" HEAD:refs/heads/main; git --git-dir "$DIR/r.git" symbolic-ref HEAD refs/heads/main
  exec git daemon --reuseaddr --base-path="$DIR" --export-all --enable=receive-pack --port=9418 "$DIR/r.git"
  ;;
check)
  d=$(mktemp -d); export HOME="$d"
  git clone -q "git://$URLHOST/r.git" "$d/c" 2>&1; echo "clone: $? $(git -C "$d/c" rev-list --count HEAD)"
  git -C "$d/c" push -q origin "HEAD:refs/heads/b-$CLIENT_PATH" 2>&1; echo "push: $?"
  rm -rf "$d"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
