package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/websocket"
)

// answerer answers HTTP requests with what it saw of them, as JSON.
type answerer struct {
	pod  pod
	port string

	mu sync.Mutex
	// attempts counts the requests of each flow of `/retry/`, by its parameter `uuid`.
	attempts map[string]int
}

// answer has the fields that the suite reads.
type answer struct {
	Path     string              `json:"path"`
	Host     string              `json:"host"`
	Method   string              `json:"method"`
	Proto    string              `json:"proto"`
	Headers  map[string][]string `json:"headers"`
	HTTPPort string              `json:"httpPort"`
	pod
	TLS *answerTLS `json:"tls,omitempty"`
}

type answerTLS struct {
	Version            string   `json:"version"`
	PeerCertificates   []string `json:"peerCertificates,omitempty"`
	ServerName         string   `json:"serverName"`
	NegotiatedProtocol string   `json:"negotiatedProtocol,omitempty"`
	CipherSuite        string   `json:"cipherSuite"`
}

func newAnswerer(p pod, port string) *answerer {
	return &answerer{pod: p, port: port, attempts: map[string]int{}}
}

// http1 returns the server of the plain port, and of the one with TLS.
func (a *answerer) http1() *http.Server {
	return &http.Server{Handler: http.HandlerFunc(a.serve)}
}

// h2c returns the server of the port that speaks HTTP/2 without TLS only.
func (a *answerer) h2c() *http.Server {
	server := &http.Server{Handler: http.HandlerFunc(a.echo), Protocols: new(http.Protocols)}
	server.Protocols.SetUnencryptedHTTP2(true)
	return server
}

// serve answers by the path. It uses no ServeMux, which would redirect paths with `//`.
func (a *answerer) serve(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	switch {
	case path == "/health":
		_, _ = io.WriteString(w, "OK")
	case path == "/ws":
		websocket.Handler(func(c *websocket.Conn) { _, _ = io.Copy(c, c) }).ServeHTTP(w, r)
	case strings.HasPrefix(path, "/status/"):
		code, err := strconv.Atoi(strings.TrimPrefix(path, "/status/"))
		if err != nil || code < 100 || code > 999 {
			code = http.StatusBadRequest
		}
		w.WriteHeader(code)
	case strings.HasPrefix(path, "/retry/"):
		a.retry(w, r)
	default:
		a.echo(w, r)
	}
}

// retry fails the first `succeedAfter` requests of a flow: with `responseCode`, or else by a reset of
// the connection.
func (a *answerer) retry(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	uuid := query.Get("uuid")
	failures, err := strconv.Atoi(query.Get("succeedAfter"))
	if err != nil || uuid == "" {
		http.Error(w, "uuid and succeedAfter are needed", http.StatusBadRequest)
		return
	}
	a.mu.Lock()
	fails := a.attempts[uuid] < failures
	if fails {
		a.attempts[uuid]++
	}
	a.mu.Unlock()
	if !fails {
		a.echo(w, r)
		return
	}
	if !wait(w, r, "delayRetry") {
		return
	}
	if code, err := strconv.Atoi(query.Get("responseCode")); err == nil {
		w.WriteHeader(code)
		return
	}
	connection, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if socket, ok := connection.(*net.TCPConn); ok {
		_ = socket.SetLinger(0) // close resets
	}
	_ = connection.Close()
}

func (a *answerer) echo(w http.ResponseWriter, r *http.Request) {
	if !wait(w, r, "delay") {
		return
	}
	seen := answer{r.RequestURI, r.Host, r.Method, r.Proto, r.Header, a.port, a.pod, tlsSeen(r.TLS)}
	// The suite searches the pod's log for mirrored requests. The time is the log's, as a container's.
	fmt.Printf("%s Echoing back request made to %s to client (%s)\n",
		time.Now().UTC().Format(time.RFC3339Nano), r.RequestURI, r.RemoteAddr)
	text, err := json.Marshal(seen)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	for _, list := range r.Header["X-Echo-Set-Header"] {
		for item := range strings.SplitSeq(list, ",") {
			name, value, _ := strings.Cut(strings.TrimSpace(item), ":")
			if value = strings.TrimSpace(value); len(w.Header()[name]) > 0 {
				value = w.Header()[name][0] + "," + value
			}
			w.Header()[name] = []string{value} // as written, not in canonical case
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text)
}

// wait waits as long as the parameter says. It answers itself if that is no duration.
func wait(w http.ResponseWriter, r *http.Request, parameter string) bool {
	text := r.URL.Query().Get(parameter)
	if text == "" {
		return true
	}
	duration, err := time.ParseDuration(text)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	time.Sleep(duration)
	return true
}

func tlsSeen(state *tls.ConnectionState) *answerTLS {
	if state == nil {
		return nil
	}
	seen := &answerTLS{
		Version:            strings.Replace(tls.VersionName(state.Version), "TLS ", "TLSv", 1),
		ServerName:         state.ServerName,
		NegotiatedProtocol: state.NegotiatedProtocol,
		CipherSuite:        tls.CipherSuiteName(state.CipherSuite),
	}
	for _, certificate := range state.PeerCertificates {
		seen.PeerCertificates = append(seen.PeerCertificates, certificateText(certificate))
	}
	return seen
}
