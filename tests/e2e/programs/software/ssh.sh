#!/bin/sh
# OpenSSH: a command, sftp, rsync over it, a forwarded port, and the client's address as the server has it.
# needs: sshd ssh sftp rsync ssh-keygen
# port: 22
case "$1" in
serve)
  mkdir -p /run/sshd; chmod 755 "$DIR"
  ssh-keygen -q -t ed25519 -N '' -f "$DIR/host"; ssh-keygen -q -t ed25519 -N '' -f "$DIR/user"
  printf '%s\n' 'Port 22' "HostKey $DIR/host" "AuthorizedKeysFile $DIR/user.pub" 'StrictModes no' 'UsePAM no' 'PermitRootLogin yes' "PidFile $DIR/pid" 'Subsystem sftp internal-sftp' >"$DIR/conf"
  exec /usr/sbin/sshd -D -e -f "$DIR/conf"
  ;;
check)
  o="-q -i $DIR/user -oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oBatchMode=yes -oConnectTimeout=5"
  echo "command: $(ssh $o "root@$HOST" 'echo hello; exit 3'; echo $?)" | tr '\n' ' '; echo
  echo "client_address: $(ssh $o "root@$HOST" 'echo ${SSH_CONNECTION%% *}' | sed "$NAMES")"
  echo "big_output: $(ssh $o "root@$HOST" 'head -c 20000000 /dev/zero' | md5sum | cut -c1-8)"
  echo "big_input: $(head -c 20000000 /dev/zero | ssh $o "root@$HOST" 'md5sum' | cut -c1-8)"
  d=$(mktemp -d); head -c 1000000 /dev/zero >"$d/f"
  rsync -a -e "ssh $o" "$d/f" "root@$URLHOST:$DIR/got-$CLIENT_PATH"; echo "rsync: $? $(cmp "$d/f" "$DIR/got-$CLIENT_PATH" && echo same)"
  echo "get $DIR/got-$CLIENT_PATH $d/back" | sftp $o -b - "root@$URLHOST" >/dev/null; echo "sftp: $? $(cmp "$d/f" "$d/back" && echo same)"
  rm -rf "$d"
  echo "banner: $(talk.py banner "$HOST" 22)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
