package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"
)

const (
	tenantName = "shop"
	// outsideHost is a client outside the mesh, insideHost one in it.
	outsideHost = "clients/default/client-0"
	insideHost  = tenantName + "/shop/client-0"
	// readyTimeout bounds the wait until every process of the world is ready, and until its Gateway serves.
	readyTimeout = 180 * time.Second
)

// world is a running mesh on this machine. It ends with this process, however that ends.
type world struct {
	options *options
	name    string
	up      *exec.Cmd
	ended   chan error
}

// observeCanal observes all cases in a world of Canal.
func observeCanal(o *options, all *suite) (map[string]observation, error) {
	records := filepath.Join(o.scratch, "canal")
	if err := emptyFolder(records); err != nil {
		return nil, err
	}
	w, err := startWorld(o, all, records)
	if err != nil {
		return nil, err
	}
	defer w.stop()
	services, err := serviceAddresses(all.base)
	if err != nil {
		return nil, err
	}
	if _, err := w.gateway("public", 80); err != nil {
		return nil, err
	}
	seen := map[string]observation{}
	for _, one := range all.cases {
		if seen[one.name], err = w.observe(one, services, records); err != nil {
			return nil, fmt.Errorf("%s: %w", one.name, err)
		}
	}
	return seen, nil
}

// observe applies a case's objects, sends its requests, and deletes the objects.
func (w *world) observe(one *testCase, services map[string]string, records string) (observation, error) {
	if refusal, err := w.apply(one.objects); err != nil || refusal != "" {
		return observation{Refusal: refusal}, err
	}
	host, told := insideHost, order{Requests: one.requests, Addresses: services}
	// A Gateway's client is outside the tenant and sends every request to the Gateway's address.
	if one.Proxy == "gateway" {
		address, err := w.gateway(one.Gateway, one.requests[0].Port)
		if err != nil {
			return observation{}, err
		}
		host, told.Addresses = outsideHost, map[string]string{"": address}
	}
	program, err := os.Executable()
	if err != nil {
		return observation{}, err
	}
	input, err := json.Marshal(told)
	if err != nil {
		return observation{}, err
	}
	client := exec.Command(w.options.canal, "world", "exec", "--world", w.name, host, "--", program, "client")
	client.Stdin, client.Stderr = bytes.NewReader(input), os.Stderr
	text, err := client.Output()
	if err != nil {
		return observation{}, fmt.Errorf("the client in %s: %w", host, err)
	}
	seen := observation{}
	if err := json.Unmarshal(text, &seen.Answers); err != nil {
		return observation{}, err
	}
	all, err := waitForCopies(one, records)
	if err != nil {
		return observation{}, err
	}
	seen.Records = recordsOf(one, all)
	// The next case must not see the objects of this one.
	deletion := w.command("delete", "--tenant", tenantName, "--file", "-")
	deletion.Stdin = strings.NewReader(one.objects)
	if words, err := deletion.CombinedOutput(); err != nil {
		return observation{}, fmt.Errorf("canal delete: %w: %s", err, words)
	}
	return seen, nil
}

// startWorld makes the world and waits until its processes are ready. The caller's goroutine must be
// locked to its thread, because the kernel ends the world with that thread.
func startWorld(o *options, all *suite, records string) (*world, error) {
	file, err := writeWorld(o, all, records)
	if err != nil {
		return nil, err
	}
	w := &world{o, fmt.Sprintf("envoy-%d", os.Getpid()), nil, make(chan error, 1)}
	w.up = exec.Command(o.canal, "up", "--quiet", "--name", w.name, file)
	var words bytes.Buffer
	w.up.Stdout, w.up.Stderr = &words, &words
	w.up.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := w.up.Start(); err != nil {
		return nil, fmt.Errorf("%s up: %w; fix: build Canal's programs, and name canal by -canal=PATH", o.canal, err)
	}
	go func() { w.ended <- w.up.Wait() }()
	deadline := time.After(readyTimeout)
	for !w.isReady() {
		select {
		case err := <-w.ended:
			return nil, fmt.Errorf("%s up %s ended: %w: %s", o.canal, file, err, words.String())
		case <-deadline:
			w.stop()
			return nil, fmt.Errorf("the world is not ready after %s", readyTimeout)
		case <-time.After(200 * time.Millisecond):
		}
	}
	return w, nil
}

// stop takes the world down, and returns when nothing of it is left.
func (w *world) stop() {
	_ = w.up.Process.Signal(syscall.SIGTERM)
	<-w.ended
}

// isReady returns whether all hosts of the world are ready.
func (w *world) isReady() bool {
	text, err := exec.Command(w.options.canal, "world", "list", w.name, "--output", "json").Output()
	if err != nil {
		return false
	}
	var hosts []struct {
		Ready bool   `json:"ready"`
		State string `json:"state"`
	}
	if json.Unmarshal(text, &hosts) != nil {
		return false
	}
	for _, host := range hosts {
		if !host.Ready && host.State != "idle" {
			return false
		}
	}
	return len(hosts) > 0
}

func (w *world) command(words ...string) *exec.Cmd {
	return exec.Command(w.options.canal, append(words, "--world", w.name)...)
}

// apply applies objects and waits until the data planes run the result. A refusal is Canal's reason.
func (w *world) apply(text string) (refusal string, err error) {
	process := w.command("apply", "--wait", "60", "--tenant", tenantName, "--file", "-", "--output", "json")
	process.Stdin = strings.NewReader(text)
	words, err := process.Output()
	read := struct {
		Accepted    bool `json:"accepted"`
		Diagnostics []struct {
			Severity string `json:"severity"`
			Field    string `json:"field"`
			Problem  string `json:"problem"`
		} `json:"diagnostics"`
	}{}
	if err == nil {
		return "", nil
	}
	if json.Unmarshal(words, &read) == nil && !read.Accepted {
		for _, d := range read.Diagnostics {
			if d.Severity == "error" {
				return d.Field + ": " + d.Problem, nil
			}
		}
	}
	return "", fmt.Errorf("canal apply: %w: %s", err, words)
}

// gateway returns the address of a Gateway, when it serves at the port.
func (w *world) gateway(name string, port int) (string, error) {
	pattern := regexp.MustCompile(`198\.19\.0\.\d+`)
	deadline := time.Now().Add(readyTimeout)
	for {
		words, _ := w.command("gateway", "status", tenantName+"/shop/"+name+".istio-gateway").Output()
		if address := pattern.Find(words); address != nil && w.isServed(fmt.Sprintf("%s:%d", address, port)) {
			return string(address), nil
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("the Gateway %s does not serve after %s: %s", name, readyTimeout, words)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// isServed returns whether a client outside gets an answer at the address.
func (w *world) isServed(address string) bool {
	probe := exec.Command(w.options.canal, "world", "exec", "--world", w.name, outsideHost, "--",
		"curl", "--silent", "--output", "/dev/null", "--max-time", "5", "http://"+address+"/")
	return probe.Run() == nil
}

// serviceAddresses returns the addresses of the shared Services, by their short names.
func serviceAddresses(base []string) (map[string]string, error) {
	found := map[string]string{}
	for _, document := range base {
		read := struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			Spec struct {
				ClusterIP string `json:"clusterIP"`
			} `json:"spec"`
		}{}
		if err := yaml.Unmarshal([]byte(document), &read); err != nil {
			return nil, err
		}
		if read.Kind == "Service" {
			name := read.Metadata.Name
			for _, host := range []string{name, name + ".shop", name + ".shop.svc", name + ".shop.svc.cluster.local"} {
				found[host] = read.Spec.ClusterIP
			}
		}
	}
	return found, nil
}

// writeWorld writes the file of the world, and returns its path. The shared objects are the tenant's
// configuration, except Pods, which the world has.
func writeWorld(o *options, all *suite, records string) (string, error) {
	type object = map[string]any
	program, err := os.Executable()
	if err != nil {
		return "", err
	}
	var shared []string
	pods := []object{{
		"name": "client", "namespace": "shop", "node": "node-1", "labels": object{"app": "client"}, "command": []string{"sleep", "infinity"},
	}}
	for _, document := range all.base {
		read := struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Name   string            `json:"name"`
				Labels map[string]string `json:"labels"`
			} `json:"metadata"`
		}{}
		if err := yaml.Unmarshal([]byte(document), &read); err != nil {
			return "", err
		}
		if read.Kind != "Pod" {
			shared = append(shared, document)
			continue
		}
		// The world adds its number to the name of each pod.
		pods = append(pods, object{
			"name": strings.TrimSuffix(read.Metadata.Name, "-0"), "namespace": "shop", "node": "node-1", "labels": read.Metadata.Labels,
			"command":   []string{program, "echo", read.Metadata.Name, records},
			"readiness": object{"tcp": object{"port": 3000}, "periodMs": 1000},
		})
	}
	if err := os.WriteFile(filepath.Join(o.scratch, "shared.yaml"), []byte(strings.Join(shared, "---\n")), 0o644); err != nil {
		return "", err
	}
	// The VNIs and ranges of the two tenants only have to differ.
	text, err := yaml.Marshal(object{
		"world":      "envoy",
		"azs":        []string{"az1"},
		"controller": object{"az": "az1"},
		"edges":      []object{{"name": "edge-1", "az": "az1"}},
		"gateways":   []object{{"name": "gw-1", "az": "az1", "backend": "b1"}},
		"tenants": []object{{
			"name": "clients", "vni": 700, "trustDomain": "clients.example", "podCidrs": []string{"198.18.0.0/17", "2001:db8:18::/64"},
			"gatewayCidrs": []string{"198.19.0.0/24", "2001:db8:19::/64"}, "ingressNetwork": true,
			"nodes": []object{{"name": "border", "az": "az1", "proxy": false}},
			"pods":  []object{{"name": "client", "namespace": "default", "node": "border", "command": []string{"sleep", "infinity"}}},
		}, {
			"name": tenantName, "vni": 101, "trustDomain": "shop.example", "podCidrs": []string{"10.1.0.0/16", "fd00:1::/64"},
			"serviceCidrs": []string{"10.101.0.0/16", "fd00:101::/64"}, "gatewayCidrs": []string{"10.102.0.0/20", "fd00:102::/64"},
			"config": []string{"shared.yaml"}, "nodes": []object{{"name": "node-1", "az": "az1"}}, "pods": pods,
		}},
	})
	if err != nil {
		return "", err
	}
	file := filepath.Join(o.scratch, "world.yaml")
	return file, os.WriteFile(file, text, 0o644)
}
