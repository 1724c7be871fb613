#!/bin/sh
# SMTP with STARTTLS (Exim), a mail of 1 MB, and a relay that only the server's own host may use.
# needs: exim4 openssl
# port: 2525
case "$1" in
serve)
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=mail -keyout "$DIR/key.pem" -out "$DIR/cert.pem" 2>/dev/null
  mkdir "$DIR/mail"; chown -R Debian-exim "$DIR"
  cat >"$DIR/exim.conf" <<CONF
primary_hostname = mail.test
spool_directory = $DIR/spool
log_file_path = $DIR/log-%slog
tls_advertise_hosts = *
tls_certificate = $DIR/cert.pem
tls_privatekey = $DIR/key.pem
domainlist local_domains = mail.test
hostlist relay_from = 127.0.0.1 : ::::1 : @[]
acl_smtp_rcpt = rcpt
host_lookup =
rfc1413_hosts =
daemon_smtp_ports = 2525
keep_environment =
begin acl
rcpt:
  accept hosts = +relay_from
  accept domains = +local_domains
  deny message = relay not permitted
begin routers
all:
  driver = accept
  transport = file
begin transports
file:
  driver = appendfile
  file = $DIR/mail/box
  user = Debian-exim
CONF
  exec exim4 -C "$DIR/exim.conf" -bdf -q30m
  ;;
check)
  python3 - "$HOST" <<'PY'
import smtplib, ssl, sys
context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
with smtplib.SMTP(sys.argv[1], 2525, timeout=10) as s:
    print("greeting:", s.ehlo("client.test")[0])
    print("starttls:", s.starttls(context=context)[0], s.sock.version())
    s.ehlo("client.test")
    print("mail:", s.sendmail("a@client.test", ["b@mail.test"], "Subject: x\n\n" + ("line of text\n" * 80000)))
with smtplib.SMTP(sys.argv[1], 2525, timeout=10) as s:
    s.ehlo("client.test"); s.mail("a@client.test"); code = s.rcpt("b@elsewhere.test")[0]
    print("relay:", "let in" if code == 250 else "refused")
PY
  echo "banner: $(talk.py banner "$HOST" 2525)"
  ;;
esac
code=$?
[ "$1" = check ] && exit 0
exit $code
