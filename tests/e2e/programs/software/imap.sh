#!/bin/sh
# IMAP (Dovecot): login, a mail of 500 KB appended and fetched, IDLE.
# needs: dovecot
# port: 143
case "$1" in
serve)
  mkdir "$DIR/mail" "$DIR/run"; chown nobody "$DIR/mail"; chmod 755 "$DIR"
  cat >"$DIR/dovecot.conf" <<CONF
base_dir = $DIR/run
state_dir = $DIR/run
log_path = $DIR/log
protocols = imap
ssl = no
disable_plaintext_auth = no
first_valid_uid = 1
mail_location = maildir:$DIR/mail
passdb {
  driver = static
  args = password=secret
}
userdb {
  driver = static
  args = uid=nobody gid=nogroup home=$DIR/mail
}
service anvil {
  unix_listener anvil-auth-penalty {
    mode = 0
  }
}
CONF
  exec dovecot -F -c "$DIR/dovecot.conf"
  ;;
check)
  python3 - "$HOST" <<'PY'
import hashlib, imaplib, sys
m = imaplib.IMAP4(sys.argv[1], 143, timeout=10)
print("login:", m.login("user", "secret")[0])
text = b"Subject: x\r\n\r\n" + b"line of text\r\n" * 40000
m.create("box"); print("append:", m.append("box", None, None, text)[0])
n = int(m.select("box")[1][0]); got = m.fetch(str(n), "(BODY[])")[1][0][1]
print("fetch:", hashlib.sha256(got).digest() == hashlib.sha256(text).digest())
m.send(b"x IDLE\r\n"); print("idle:", m.readline().split()[0]); m.send(b"DONE\r\n"); m.readline()
PY
  echo "banner: $(talk.py banner "$HOST" 143)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
