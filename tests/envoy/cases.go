package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// testCase is a feature, the objects that use it, and requests whose fate shows what it does.
type testCase struct {
	name string
	// Feature is the feature in the words of its API.
	Feature string `json:"feature"`
	// Proxy is `gateway`, which clients outside the mesh reach, or `sidecar`, the proxy of a client in
	// the mesh.
	Proxy string `json:"proxy"`
	// Gateway is the name of the Gateway that the requests go to, in the namespace shop.
	Gateway string `json:"gateway"`
	// Bodies says that bodies of answers that no backend gave are compared, too.
	Bodies bool `json:"bodies"`
	// AnyPod says that it does not matter which pod of a Service a request reaches.
	AnyPod bool `json:"anyPod"`
	// Values are texts that requests name by $NAME.
	Values map[string]string `json:"values"`
	// Requests are the requests, one a line.
	Requests string `json:"requests"`

	requests []request
	// objects is the YAML of the case's own objects.
	objects string
	// bootstrap is Envoy's, as istiod's configuration makes it.
	bootstrap json.RawMessage
}

// request is `METHOD URL [NAME:VALUE]... [@OPTION=VALUE]...`, in which a part with spaces is quoted. A
// URL that is only a path is on the host case.example.
type request struct {
	Text    string      `json:"text"`
	ID      string      `json:"id"`
	Method  string      `json:"method"`
	Host    string      `json:"host"`
	Port    int         `json:"port"`
	Target  string      `json:"target"`
	Headers [][2]string `json:"headers"`
	Body    string      `json:"body"`
	// Times is how often the request is sent: `@times=N`.
	Times int `json:"times"`
	// Copies is the number of requests that backends must have received before it is looked what they
	// received: `@copies=N`. A mirror gets its copy after the answer.
	Copies int `json:"copies"`
}

// rendered is a file that canal-bench-istiod wrote.
type rendered struct {
	MadeBy struct {
		Digest   string            `json:"objects_sha256"`
		Proxy    string            `json:"proxy"`
		Versions map[string]string `json:"versions"`
	} `json:"made_by"`
	Bootstrap json.RawMessage `json:"bootstrap"`
}

// suite is all cases.
type suite struct {
	cases []*testCase
	// base is the YAML of the objects that all cases share.
	base []string
	// istio is the version of istiod's code.
	istio string
}

// readSuite reads the cases of the folder whose name contains the text, with what istiod made of them.
func readSuite(folder, only string) (*suite, error) {
	base, err := os.ReadFile(filepath.Join(folder, "cases", "_base.yaml"))
	if err != nil {
		return nil, err
	}
	found := &suite{base: documents(base)}
	files, err := filepath.Glob(filepath.Join(folder, "cases", "*.yaml"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		if strings.HasPrefix(name, "_") || !strings.Contains(name, only) {
			continue
		}
		one, made, err := readCase(folder, name, found.base)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		found.istio = made.MadeBy.Versions["istio.io/istio"]
		found.cases = append(found.cases, one)
	}
	if len(found.cases) == 0 {
		return nil, fmt.Errorf("%s has no case whose name contains %q", folder, only)
	}
	return found, nil
}

func readCase(folder, name string, base []string) (*testCase, *rendered, error) {
	text, err := os.ReadFile(filepath.Join(folder, "cases", name+".yaml"))
	if err != nil {
		return nil, nil, err
	}
	parts := documents(text)
	if len(parts) == 0 {
		return nil, nil, fmt.Errorf("the file is empty")
	}
	one := &testCase{name: name, Proxy: "gateway", Gateway: "public", objects: strings.Join(parts[1:], "---\n")}
	if err := yaml.UnmarshalStrict([]byte(parts[0]), one); err != nil {
		return nil, nil, fmt.Errorf("the case's description: %w", err)
	}
	isTaken := map[string]bool{}
	for i, text := range strings.Split(strings.TrimSpace(one.Requests), "\n") {
		if isTaken[text] {
			return nil, nil, fmt.Errorf("request %q is there twice", text)
		}
		isTaken[text] = true
		read, err := readRequest(os.Expand(text, func(name string) string { return one.Values[name] }))
		if err != nil {
			return nil, nil, fmt.Errorf("request %q: %w", text, err)
		}
		read.Text, read.ID = text, fmt.Sprintf("%s.%d", name, i)
		one.requests = append(one.requests, read)
	}
	path := filepath.Join(folder, "rendered", name+".json")
	made := &rendered{}
	if text, err = os.ReadFile(path); err == nil {
		err = json.Unmarshal(text, made)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("what istiod made of the objects: %w; fix: %s", err, renderCommand)
	}
	if made.MadeBy.Digest != objectsDigest(base, parts[1:]) || made.MadeBy.Proxy != one.Proxy {
		return nil, nil, fmt.Errorf("%s was made from other objects; fix: %s", path, renderCommand)
	}
	one.bootstrap = made.Bootstrap
	return one, made, nil
}

// documents splits a file at its lines `---`, and leaves out documents of comments only.
func documents(text []byte) []string {
	var found []string
	for part := range strings.SplitSeq("\n"+string(text), "\n---\n") {
		object := map[string]any{}
		if err := yaml.Unmarshal([]byte(part), &object); err != nil || len(object) > 0 {
			found = append(found, strings.TrimSpace(part)+"\n")
		}
	}
	return found
}

// objectsDigest returns the digest by which canal-bench-istiod names the objects of a case.
func objectsDigest(base, objects []string) string {
	sum := sha256.New()
	for _, document := range slices.Concat(base, objects) {
		fmt.Fprintf(sum, "---\n%s", document)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func readRequest(text string) (request, error) {
	parts, err := splitQuoted(text)
	if err != nil {
		return request{}, err
	}
	if len(parts) < 2 {
		return request{}, fmt.Errorf("method and URL are needed")
	}
	read := request{Method: parts[0], Host: "case.example", Port: 80, Target: parts[1], Times: 1}
	if authority, ok := strings.CutPrefix(parts[1], "http://"); ok {
		path := strings.IndexByte(authority, '/')
		if path < 0 {
			return request{}, fmt.Errorf("the URL has no path")
		}
		read.Host, read.Target = authority[:path], authority[path:]
		if _, port, ok := strings.Cut(read.Host, ":"); ok {
			if read.Port, err = strconv.Atoi(port); err != nil {
				return request{}, err
			}
		}
	}
	for _, part := range parts[2:] {
		if err := read.add(part); err != nil {
			return request{}, fmt.Errorf("%s: %w", part, err)
		}
	}
	return read, nil
}

// add adds a header or an option.
func (r *request) add(part string) (err error) {
	option, isOption := strings.CutPrefix(part, "@")
	if !isOption {
		name, value, isHeader := strings.Cut(part, ":")
		if !isHeader {
			return fmt.Errorf("it is neither NAME:VALUE nor @OPTION=VALUE")
		}
		r.Headers = append(r.Headers, [2]string{name, value})
		return nil
	}
	switch name, value, _ := strings.Cut(option, "="); name {
	case "times":
		r.Times, err = strconv.Atoi(value)
	case "copies":
		r.Copies, err = strconv.Atoi(value)
	case "port":
		r.Port, err = strconv.Atoi(value)
	case "body":
		r.Body = value
	default:
		err = fmt.Errorf("no such option")
	}
	return err
}

// splitQuoted splits a text at spaces that are not in double quotes.
func splitQuoted(text string) ([]string, error) {
	isQuoted := false
	parts := strings.FieldsFunc(text, func(c rune) bool {
		if c == '"' {
			isQuoted = !isQuoted
		}
		return c == ' ' && !isQuoted
	})
	if isQuoted {
		return nil, fmt.Errorf("a quote is not closed")
	}
	for i := range parts {
		parts[i] = strings.ReplaceAll(parts[i], `"`, "")
	}
	return parts, nil
}
