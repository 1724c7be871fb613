package conformance

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const (
	// readyTimeout bounds the wait until every process of the world is ready. It is that of `canal up`
	// for building a world (UP_WITHIN in world/src/world.rs); nobody measured it.
	readyTimeout = 120 * time.Second
	// readTimeout bounds the wait until the controller has read a file. The controller watches the
	// files, so only a fault takes as long.
	readTimeout = 10 * time.Second
)

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
		// An interval of polling: each look starts a process.
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

// applyAnswer is what `canal apply` prints as JSON.
type applyAnswer struct {
	Accepted bool `json:"accepted"`
	Changes  []struct {
		Kind string `json:"kind"`
	} `json:"changes"`
	Diagnostics []struct {
		Severity string `json:"severity"`
		Object   string `json:"object"`
		Field    string `json:"field"`
		Problem  string `json:"problem"`
	} `json:"diagnostics"`
	// isRefused says that Canal read the objects and refused them.
	isRefused bool
}

// isEmpty returns whether Canal keeps no object of what it read.
func (a applyAnswer) isEmpty() bool { return len(a.Changes) == 0 }

// apply applies the objects of the YAML text, and waits until the data planes run the result. A
// refusal is an error that has Canal's reason.
func (w *world) apply(text []byte) (applyAnswer, error) {
	process := w.canalCommand("apply", "--wait", "60", "--tenant", tenantName, "--file", "-", "--output", "json")
	process.Stdin = bytes.NewReader(text)
	words, err := process.Output()
	answer := applyAnswer{}
	if json.Unmarshal(words, &answer) != nil || err == nil || answer.Accepted {
		return answer, described(process, words, err)
	}
	for _, d := range answer.Diagnostics {
		if d.Severity == "error" {
			answer.isRefused = true
			return answer, fmt.Errorf("Canal refuses the object: %s", strings.TrimPrefix(d.Object+": ", ": ")+d.Field+": "+d.Problem)
		}
	}
	return answer, described(process, words, err)
}

// delete deletes an applied object, if there is one.
func (w *world) delete(kind, namespace, name string) error {
	if namespace == "" {
		namespace = "default" // Canal's, for kinds without a namespace
	}
	process := w.canalCommand("delete", kind, name, "--namespace", namespace, "--ignore-missing", "--tenant", tenantName)
	words, err := process.Output()
	return described(process, words, err)
}

func (w *world) canalCommand(command ...string) *exec.Cmd {
	return exec.Command(w.canal, append(command, "--world", w.name)...)
}

// described returns the error of a command with what the command printed.
func described(process *exec.Cmd, words []byte, err error) error {
	if err == nil {
		return nil
	}
	text := strings.TrimSpace(string(words))
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		text += strings.TrimSpace(string(exit.Stderr))
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(process.Args, " "), err, text)
}

// tenantFile returns the path of a file of the tenant's configuration.
func (w *world) tenantFile(name string) string {
	return filepath.Join("/run/canal/worlds", w.name, "config", tenantName, name)
}

func (w *world) hasFile(name string) bool {
	_, err := os.Stat(w.tenantFile(name))
	return err == nil
}

// writeFile makes the object as a file of the tenant, and waits until the controller has it as
// written and the data planes run it.
func (w *world) writeFile(name string, text []byte, object *unstructured.Unstructured) error {
	if object.GetKind() == "Secret" {
		var err error
		if text, object, err = withWitness(text, object.GetNamespace()); err != nil {
			return err
		}
	}
	// A file that is read half would be broken.
	whole := filepath.Join("/run/canal/worlds", w.name, name)
	if err := os.WriteFile(whole, text, 0o644); err != nil {
		return err
	}
	if err := os.Rename(whole, w.tenantFile(name)); err != nil {
		return err
	}
	return w.waitForFile(fmt.Sprintf("the controller reads %s", name), func() bool {
		namespace := cmp.Or(object.GetNamespace(), "default")
		shown, err := w.canalCommand("get", object.GetKind(), object.GetName(), "--namespace", namespace,
			"--tenant", tenantName, "--output", "yaml").Output()
		return err == nil && isShown(shown, object)
	})
}

// withWitness adds a ConfigMap to a Secret's file, whose name has the digest of the file, and returns
// both. Canal shows no content of Secrets, but it reads a file as a whole, so that a ConfigMap of this name
// proves that the Secret of this content is read.
func withWitness(text []byte, namespace string) ([]byte, *unstructured.Unstructured, error) {
	witness := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
	}}
	witness.SetName(fmt.Sprintf("witness-%x", sha256.Sum256(text)))
	witness.SetNamespace(namespace)
	added, err := yaml.Marshal(witness.Object)
	return slices.Concat(text, []byte("---\n"), added), witness, err
}

// isShown returns whether Canal shows an object with the same content. Of metadata it shows only what it
// reads.
func isShown(shown []byte, object *unstructured.Unstructured) bool {
	read := unstructured.Unstructured{}
	if yaml.Unmarshal(shown, &read.Object) != nil {
		return false
	}
	for name, written := range object.Object {
		if name != "metadata" && !equality.Semantic.DeepEqual(normalized(written), read.Object[name]) {
			return false
		}
	}
	return read.GetName() == object.GetName()
}

// normalized returns a value as it is read from YAML.
func normalized(value any) any {
	text, err := yaml.Marshal(value)
	if err != nil {
		return err
	}
	var read any
	if err := yaml.Unmarshal(text, &read); err != nil {
		return err
	}
	return read
}

// removeFile removes a file of the tenant, if there is one, and waits until the controller knows.
func (w *world) removeFile(name string) error {
	if err := os.Remove(w.tenantFile(name)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return w.waitForFile(fmt.Sprintf("the controller forgets %s", name), func() bool {
		shown, err := w.canalCommand("get", "--tenant", tenantName, "--output", "json").Output()
		return err == nil && !bytes.Contains(shown, []byte(name))
	})
}

// waitForFile waits until the controller has read a change of a file, and then until the data planes
// run it.
func (w *world) waitForFile(what string, isRead func() bool) error {
	deadline := time.Now().Add(readTimeout)
	isDone := func() bool {
		return isRead() && w.canalCommand("status", "--check").Run() == nil
	}
	for !isDone() {
		if time.Now().After(deadline) {
			return fmt.Errorf("after %s it is not true that %s", readTimeout, what)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil
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
