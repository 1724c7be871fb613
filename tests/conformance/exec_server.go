package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// streamTimeout bounds the wait for the streams that a client of the exec server must open. It only ends
// a hang.
const streamTimeout = 60 * time.Second

// execServer has the two endpoints of a Kubernetes API server that the suite calls over HTTP. One runs
// commands in pods: the suite's mesh tests send their requests by it. The other has the logs of pods.
type execServer struct {
	world *world
	// echo is the program that the command `client` of the suite's image means.
	echo string
}

// start serves on a free port of the loopback interface and returns the URL.
func (s *execServer) start() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/v1/namespaces/{namespace}/pods/{pod}/exec", s.exec)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods/{pod}/log", s.log)
	go func() { _ = http.Serve(listener, mux) }()
	return "http://" + listener.Addr().String(), nil
}

func (s *execServer) exec(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	streams := make(chan httpstream.Stream, 3)
	connection := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(stream httpstream.Stream, _ <-chan struct{}) error {
		streams <- stream
		return nil
	})
	if connection == nil {
		return // the upgrader has answered
	}
	defer connection.Close()
	byType := map[string]httpstream.Stream{}
	deadline := time.After(streamTimeout)
	for len(byType) < 3 {
		select {
		case stream := <-streams:
			byType[stream.Headers().Get(corev1.StreamType)] = stream
		case <-deadline:
			return
		}
	}
	command := r.URL.Query()["command"]
	if len(command) > 0 && command[0] == "client" {
		command = append([]string{s.echo}, command...)
	}
	process := s.world.command(podHost(r.PathValue("namespace"), r.PathValue("pod")), command...)
	process.Stdout, process.Stderr = byType[corev1.StreamTypeStdout], byType[corev1.StreamTypeStderr]
	writeStatus(byType[corev1.StreamTypeError], process.Run())
	for _, stream := range byType {
		_ = stream.Close()
	}
}

// log answers with the lines of a pod's log that are not older than the parameter sinceTime. A line
// begins with its time, which the answer leaves out.
func (s *execServer) log(w http.ResponseWriter, r *http.Request) {
	since, _ := time.Parse(time.RFC3339, r.URL.Query().Get("sinceTime"))
	host := podHost(r.PathValue("namespace"), r.PathValue("pod"))
	text, err := exec.Command(s.world.canal, "logs", host, "--world", s.world.name).Output()
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	for line := range strings.Lines(string(text)) {
		written, rest, _ := strings.Cut(line, " ")
		if at, err := time.Parse(time.RFC3339Nano, written); err == nil && !at.Before(since) {
			_, _ = io.WriteString(w, rest)
		}
	}
}

// writeStatus writes how a command ended, in the words of the protocol's version 4.
func writeStatus(w io.Writer, err error) {
	status := metav1.Status{Status: metav1.StatusSuccess}
	if err != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			status.Reason = remotecommand.NonZeroExitCodeReason
			status.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{
				Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.ExitCode()),
			}}}
		}
	}
	text, err := json.Marshal(status)
	if err != nil {
		text = fmt.Appendf(nil, `{"status":"Failure","message":%q}`, err)
	}
	_, _ = w.Write(text)
}
