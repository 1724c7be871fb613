package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// envoyTimeout bounds the wait until an Envoy serves.
	envoyTimeout = 60 * time.Second
	adminAddress = "127.0.0.1:9901"
	// backendPort is the pods' port of cases/_base.yaml. No Gateway of a case has it, because Envoy listens beside them.
	backendPort = "3000"
)

// backendAddresses are the pods' addresses of cases/_base.yaml.
var backendAddresses = map[string]string{"one-0": "10.9.0.1", "two-0": "10.9.0.2"}

// observation is what happened to the requests of a case.
type observation struct {
	Answers []answer              `json:"answers"`
	Records map[string][]received `json:"records"`
	// Refusal is the reason for which a proxy does not take the case's configuration.
	Refusal string `json:"refusal"`
}

// observeEnvoy runs this program again in a network namespace of its own, which ends with it. There, each
// case has an Envoy of its own beside the backends.
func observeEnvoy(o *options) (map[string]observation, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	inside := exec.Command(program, append([]string{"inside"}, o.arguments()...)...)
	var text bytes.Buffer
	inside.Stdout, inside.Stderr = &text, os.Stderr
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := inside.Run(); err != nil {
		return nil, fmt.Errorf("the side of Envoy: %w", err)
	}
	seen := map[string]observation{}
	return seen, json.Unmarshal(text.Bytes(), &seen)
}

// runInside observes all cases in the namespace in which it runs.
func runInside(o *options, out io.Writer) error {
	all, err := readSuite(o.folder, o.only)
	if err != nil {
		return err
	}
	records := filepath.Join(o.scratch, "envoy")
	if err := emptyFolder(records); err != nil {
		return err
	}
	if err := run("ip", "link", "set", "lo", "up"); err != nil {
		return err
	}
	for pod, address := range backendAddresses {
		if err := run("ip", "address", "add", address+"/32", "dev", "lo"); err != nil {
			return err
		}
		backend, err := newEcho(pod, records)
		if err != nil {
			return err
		}
		if err := backend.serve(net.JoinHostPort(address, backendPort)); err != nil {
			return err
		}
	}
	seen := map[string]observation{}
	for _, one := range all.cases {
		if seen[one.name], err = observeOne(o, one, records); err != nil {
			return fmt.Errorf("%s: %w", one.name, err)
		}
	}
	return json.NewEncoder(out).Encode(seen)
}

// observeOne starts an Envoy with what istiod made of the case's objects, and sends the requests.
func observeOne(o *options, one *testCase, records string) (observation, error) {
	bootstrap := map[string]json.RawMessage{}
	if err := json.Unmarshal(one.bootstrap, &bootstrap); err != nil {
		return observation{}, err
	}
	// The address is a constant, so splitting it cannot fail.
	host, port, _ := net.SplitHostPort(adminAddress)
	bootstrap["admin"] = fmt.Appendf(nil, `{"address": {"socket_address": {"address": %q, "port_value": %s}}}`, host, port)
	bootstrap["node"] = json.RawMessage(`{"id": "proxy", "cluster": "shop"}`)
	text, err := json.Marshal(bootstrap)
	if err != nil {
		return observation{}, err
	}
	file := filepath.Join(o.scratch, "bootstrap.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return observation{}, err
	}
	words := bytes.Buffer{}
	// One worker balances all requests of a case. Another Envoy of the machine must not share memory
	// with this one.
	process := exec.Command(o.envoy, "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error")
	process.Stdout, process.Stderr = &words, &words
	process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.Start(); err != nil {
		return observation{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- process.Wait() }()
	if err := waitForEnvoy(ended); err != nil {
		// It may have ended by itself, so a failed kill is no problem.
		_ = process.Process.Kill()
		<-ended
		return observation{}, fmt.Errorf("%w: %s", err, words.String())
	}
	told := order{Addresses: map[string]string{"": "127.0.0.1"}}
	seen := observation{Answers: []answer{}}
	for _, request := range one.requests {
		seen.Answers = append(seen.Answers, told.send(request)...)
	}
	all, err := waitForCopies(one, records)
	seen.Records = recordsOf(one, all)
	// Envoy is killed, because it has nothing to finish.
	_ = process.Process.Kill()
	<-ended
	return seen, err
}

// recordsOf returns the records of a case's requests.
func recordsOf(one *testCase, all map[string][]received) map[string][]received {
	own := map[string][]received{}
	for _, request := range one.requests {
		own[request.ID] = all[request.ID]
	}
	return own
}

// waitForEnvoy waits until Envoy's listeners serve.
func waitForEnvoy(ended chan error) error {
	deadline := time.After(envoyTimeout)
	for {
		if response, err := http.Get("http://" + adminAddress + "/ready"); err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case err := <-ended:
			ended <- err
			return fmt.Errorf("Envoy ended: %v", err)
		case <-deadline:
			return fmt.Errorf("Envoy does not serve after %s", envoyTimeout)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func run(command ...string) error {
	if words, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", command, err, words)
	}
	return nil
}

func emptyFolder(path string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return os.MkdirAll(path, 0o755)
}
