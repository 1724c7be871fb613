package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// readyTimeout bounds the wait until every process of the world is ready.
const readyTimeout = 120 * time.Second

// world is a running mesh on this machine. It ends with this process, however that ends.
type world struct {
	canal string
	name  string
	// up and ended are nil in the process that runs inside.
	up    *exec.Cmd
	ended chan error
}

// worldHost is a host as `canal world list` prints it.
type worldHost struct {
	Name  string `json:"name"`
	Kind  string `json:"kind"`
	IPv4  string `json:"ip4"`
	Ready bool   `json:"ready"`
	State string `json:"state"`
}

// startWorld makes the world of the file and waits until its processes are ready. The caller's
// goroutine must be locked to its thread, because the kernel ends the world with that thread.
func startWorld(canal, name, file string) (*world, error) {
	w := &world{canal, name, exec.Command(canal, "up", "--quiet", file), make(chan error, 1)}
	var words bytes.Buffer
	w.up.Stdout, w.up.Stderr = &words, &words
	w.up.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := w.up.Start(); err != nil {
		return nil, fmt.Errorf("%s up: %w; fix: build Canal's programs, and name canal by -canal=PATH", canal, err)
	}
	go func() { w.ended <- w.up.Wait() }()
	deadline := time.After(readyTimeout)
	for {
		select {
		case err := <-w.ended:
			return nil, fmt.Errorf("%s up %s ended: %w: %s", canal, file, err, words.String())
		case <-deadline:
			w.stop()
			return nil, fmt.Errorf("the world is not ready after %s", readyTimeout)
		case <-time.After(200 * time.Millisecond):
		}
		if hosts, err := w.hosts(); err == nil && allReady(hosts) {
			return w, nil
		}
	}
}

// stop takes the world down, and returns when nothing of it is left.
func (w *world) stop() {
	_ = w.up.Process.Signal(syscall.SIGTERM)
	<-w.ended
}

func allReady(hosts []worldHost) bool {
	for _, host := range hosts {
		if !host.Ready && host.State != "idle" {
			return false
		}
	}
	return len(hosts) > 0
}

func (w *world) hosts() ([]worldHost, error) {
	text, err := exec.Command(w.canal, "world", "list", w.name, "--output", "json").Output()
	if err != nil {
		return nil, err
	}
	var hosts []worldHost
	return hosts, json.Unmarshal(text, &hosts)
}

// command returns a command that runs in a host or pod.
func (w *world) command(host string, command ...string) *exec.Cmd {
	return exec.Command(w.canal, append([]string{"world", "exec", "--world", w.name, host, "--"}, command...)...)
}

// applyAnswer is what `canal apply` and `canal delete` print as JSON.
type applyAnswer struct {
	Accepted    bool `json:"accepted"`
	Diagnostics []struct {
		Severity string `json:"severity"`
		Object   string `json:"object"`
		Field    string `json:"field"`
		Problem  string `json:"problem"`
	} `json:"diagnostics"`
}

// change applies or deletes the objects of the YAML text, and waits until the data planes run the
// result. A refusal is an error that has Canal's reason.
func (w *world) change(text []byte, command ...string) error {
	command = append(command, "--world", w.name, "--tenant", tenantName, "--file", "-", "--output", "json")
	process := exec.Command(w.canal, command...)
	process.Stdin = bytes.NewReader(text)
	answer, err := process.Output()
	if err == nil {
		return nil
	}
	var parsed applyAnswer
	if json.Unmarshal(answer, &parsed) == nil {
		for _, d := range parsed.Diagnostics {
			if d.Severity == "error" {
				return fmt.Errorf("Canal refuses the object: %s", strings.TrimPrefix(d.Object+": ", ": ")+d.Field+": "+d.Problem)
			}
		}
	}
	words := strings.TrimSpace(string(answer))
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		words += strings.TrimSpace(string(exit.Stderr))
	}
	return fmt.Errorf("canal %s: %w: %s", strings.Join(command, " "), err, words)
}

// buildEcho builds the program of the suite's pods into the folder.
func buildEcho(folder string) error {
	build := exec.Command("go", "build", "-o", filepath.Join(folder, "echo"), "./cmd/echo")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if words, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build ./cmd/echo: %w: %s", err, words)
	}
	return nil
}
