#!/bin/sh
# FTP (vsftpd), passive and active: active mode uses the client's own address of its control connection.
# needs: vsftpd curl
# port: 21
case "$1" in
serve)
  mkdir -p "$DIR/root/pub" "$DIR/empty"; chmod 755 "$DIR" "$DIR/root"; head -c 3000000 /dev/zero | tr '\0' x >"$DIR/root/pub/f"
  cat >"$DIR/conf" <<CONF
listen=NO
listen_ipv6=YES
background=NO
anonymous_enable=YES
local_enable=NO
anon_root=$DIR/root
secure_chroot_dir=$DIR/empty
pasv_min_port=30000
pasv_max_port=30009
connect_from_port_20=NO
seccomp_sandbox=NO
CONF
  exec vsftpd "$DIR/conf"
  ;;
check)
  get() { curl -sS -g --max-time 4 "$@" "ftp://$URLHOST/pub/f" 2>/dev/null | md5sum | cut -c1-8; }
  echo "extended_passive: $(get)"
  echo "passive: $(get --disable-epsv)"
  echo "active: $(get -P "$CLIENT")"
  echo "active_own_address: $(get -P -)"
  echo "active_by_port_command: $(get -P - --disable-eprt)"
  echo "list: $(curl -sS -g --max-time 4 -l "ftp://$URLHOST/pub/" 2>/dev/null)"
  echo "banner: $(talk.py banner "$HOST" 21)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
